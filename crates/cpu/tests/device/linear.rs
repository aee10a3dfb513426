//! Packed linear layers against f64 sums: on every instruction set, with odd shapes and outputs prefilled with garbage.
use half::{bf16, f16};
use kvist_cpu::arch::Isa;
use kvist_cpu::linear::{ENCODINGS as ALL, Inputs, Matrix, row_multiple};
use kvist_cpu::{Compute, Cpu};
use kvist_device::weights::{Encoding, FileTensor};
use kvist_testing::SplitMix64;

/// Between -1 and 1.
fn float(random: &mut SplitMix64) -> f32 {
    random.below(20_001) as f32 / 10_000.0 - 1.0
}

/// Rows as in a file: arbitrary codes, scales of reasonable size.
fn file(encoding: Encoding, outputs: usize, inputs: usize, random: &mut SplitMix64) -> Vec<u8> {
    let (elements, bytes) = encoding.block();
    let mut all = Vec::new();
    for _ in 0..outputs * inputs / elements {
        let mut block: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        let mut scale =
            |at: usize| block[at..at + 2].copy_from_slice(&f16::from_f32(float(random) * 0.01).to_le_bytes());
        match encoding {
            Encoding::F32 => block.copy_from_slice(&float(random).to_le_bytes()),
            Encoding::F16 => block.copy_from_slice(&f16::from_f32(float(random)).to_le_bytes()),
            Encoding::BF16 => {
                for half in block.chunks_exact_mut(2) {
                    half.copy_from_slice(&bf16::from_f32(float(random)).to_le_bytes());
                }
            }
            Encoding::Q8_0 | Encoding::Q4_0 | Encoding::Q5_0 | Encoding::Iq4Nl | Encoding::Iq4Xs => scale(0),
            Encoding::Q4_1 | Encoding::Q5_1 | Encoding::Q4K | Encoding::Q5K => {
                [0, 2].into_iter().for_each(scale)
            }
            Encoding::Mxfp4 => block[0] = 116 + block[0] % 10,
            Encoding::Q2K => [80, 82].into_iter().for_each(scale),
            Encoding::Q3K => scale(108),
            Encoding::Q6K => scale(208),
            Encoding::Table16 => {
                block[..4].copy_from_slice(&(float(random) * 0.01).to_le_bytes());
                // One table for all rows.
                (4..20).for_each(|i| block[i] = (i * 53 % 256) as u8);
            }
            Encoding::Int8 => {}
            other => panic!("{} has no kernels", other.name()),
        }
        all.extend(block);
    }
    if encoding == Encoding::Int8 {
        // A scale per row. Its codes are no less than −127 in files that other programs write, but nothing relies on it.
        for row in all.chunks_exact_mut(inputs / elements * bytes) {
            let scale = (float(random) * 0.01).to_le_bytes();
            row.chunks_exact_mut(bytes).for_each(|block| block[..4].copy_from_slice(&scale));
        }
    }
    all
}

/// What kernels round weights and inputs to, besides 8 bits per 32 inputs of packed weights.
#[derive(Clone, Copy, PartialEq)]
enum Rounded {
    No,
    /// bf16.
    Pairs,
    /// 8 bits per 256 inputs, both.
    Wide,
    /// 8 bits per 256 inputs; the weights stay.
    WideInputs,
}

/// f64 sums and their tolerances: f32 rounding, and for packed weights x in 8 bits per 32 inputs.
fn expected(matrix: &Matrix, x: &[f32], rounded: Rounded) -> Vec<(f64, f64)> {
    let (inputs, outputs) = (matrix.inputs(), matrix.outputs());
    let packed = !matches!(matrix.encoding(), Encoding::F32 | Encoding::F16 | Encoding::BF16);
    let mut row = vec![0.0; inputs];
    let mut all = vec![(0.0, 0.0); x.len() / inputs * outputs];
    for output in 0..outputs {
        matrix.row(output, &mut row);
        for (token, x) in x.chunks_exact(inputs).enumerate() {
            let products = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            let sum: f64 = products.clone().sum();
            let size: f64 = products.map(f64::abs).sum();
            let group = if matches!(rounded, Rounded::Wide | Rounded::WideInputs) { 256 } else { 32 };
            let groups = |a: &[f32], b: &[f32]| {
                let groups = a.chunks(group).zip(b.chunks(group)).map(|(a, b)| {
                    let largest = b.iter().fold(0f32, |max, x| max.max(x.abs()));
                    a.iter().map(|a| f64::from(a.abs() * largest)).sum::<f64>()
                });
                groups.sum::<f64>() / 254.0
            };
            let codes = if packed { groups(&row, x) } else { 0.0 };
            let more = match rounded {
                Rounded::No | Rounded::WideInputs => 0.0,
                Rounded::Pairs => size / 256.0,
                Rounded::Wide => 1.01 * groups(x, &row) + 0.01 * codes, // the product of both errors
            };
            all[token * outputs + output] = (sum, codes + more + size * 1e-5 + 1e-6);
        }
    }
    all
}

fn multiply(compute: &Compute, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    let mut inputs = Inputs::default();
    let mut out = vec![f32::NAN; x.len() / matrix.inputs() * matrix.outputs()];
    matrix.multiply(compute, &mut inputs.of(x, matrix.inputs()), &mut out);
    out
}

#[test]
fn products_are_sums() {
    let mut random = SplitMix64(7);
    let mut bad = Vec::new();
    // Whole tiles, more panels than a unit has, and batches that weights are decoded for.
    let many = |isa: &Isa| isa.tiles().is_some() || isa.multiplies_bytes();
    let large: Vec<Isa> = Isa::tested().into_iter().filter(many).collect();
    for encoding in ALL {
        // Not all rows are whole super-blocks, or whole groups of a scale per 256.
        let odd = if row_multiple(encoding) <= 32 { 608 } else { 768 };
        for (outputs, inputs, n) in [(50, 768, 64), (17, odd, 67), (530, 256, 79), (33, 768, 530)] {
            let bytes = file(encoding, outputs, inputs, &mut random);
            let x: Vec<f32> = (0..n * inputs).map(|_| float(&mut random)).collect();
            for isa in &large {
                if n > 100 && *isa != large[large.len() - 1] {
                    continue; // slow in plain loops
                }
                for fast in [false, true] {
                    let compute = Compute::new(*isa, 2).fast_prefill(fast);
                    let matrix = Matrix::pack(&compute, encoding, outputs, inputs, &bytes).unwrap();
                    let out = multiply(&compute, &matrix, &x);
                    let rounded = match encoding {
                        Encoding::F32 | Encoding::F16 => Rounded::No,
                        Encoding::BF16 if isa.tiles().is_some() || isa.multiplies_pairs() => Rounded::Pairs,
                        Encoding::Int8 if !fast || isa.tiles().is_none() => Rounded::WideInputs,
                        _ if !fast || encoding == Encoding::BF16 => Rounded::No,
                        _ if isa.tiles().is_some() => Rounded::Pairs,
                        _ => Rounded::Wide,
                    };
                    for (i, (out, (sum, within))) in
                        out.iter().zip(expected(&matrix, &x, rounded)).enumerate()
                    {
                        let fits = (f64::from(*out) - sum).abs() <= within;
                        assert!(
                            fits,
                            "{isa} {encoding:?} fast {fast} n {n} [{i}]: {out}, not {sum} ± {within}"
                        );
                    }
                }
            }
        }
        for (outputs, blocks) in [(1, 1), (15, 2), (16, 1), (17, 3), (50, 2), (130, 1)] {
            let inputs = blocks * row_multiple(encoding).max(32)
                + match row_multiple(encoding) {
                    multiple @ ..=2 => blocks * multiple,
                    _ => 0,
                };
            let bytes = file(encoding, outputs, inputs, &mut random);
            for n in [1, 2, 3, 4, 7, 8, 9, 16, 23] {
                let x: Vec<f32> = (0..n * inputs).map(|_| float(&mut random) * 3.0).collect();
                for isa in Isa::tested() {
                    for deterministic in [false, true] {
                        let compute = Compute::new(isa, 2).deterministic(deterministic);
                        let matrix = Matrix::pack(&compute, encoding, outputs, inputs, &bytes).unwrap();
                        let out = multiply(&compute, &matrix, &x);
                        let pairs = encoding == Encoding::BF16 && n >= 16 && !deterministic;
                        let rounded = match encoding {
                            _ if pairs => Rounded::Pairs,
                            Encoding::Int8 => Rounded::WideInputs,
                            _ => Rounded::No,
                        };
                        for (i, (out, (sum, within))) in
                            out.iter().zip(expected(&matrix, &x, rounded)).enumerate()
                        {
                            // Written so that NaN fails.
                            let fits = (f64::from(*out) - sum).abs() <= within;
                            if !fits {
                                bad.push(format!("{isa} {encoding:?} {outputs}×{inputs} n {n} [{i}]: {out}, not {sum} ± {within}"));
                                break;
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(bad.is_empty(), "{} bad:\n{}", bad.len(), bad[..bad.len().min(20)].join("\n"));
}

/// The bits of a row do not depend on its batch or on the number of threads.
#[test]
fn a_row_is_the_same_alone_and_among_others() {
    let mut random = SplitMix64(11);
    for encoding in ALL {
        let (outputs, inputs, n) = (300, 512, 37);
        let bytes = file(encoding, outputs, inputs, &mut random);
        let x: Vec<f32> = (0..n * inputs).map(|_| float(&mut random)).collect();
        for isa in Isa::tested() {
            let one = Compute::new(isa, 1).deterministic(true);
            let matrix = Matrix::pack(&one, encoding, outputs, inputs, &bytes).unwrap();
            let alone: Vec<u32> =
                x.chunks_exact(inputs).flat_map(|x| multiply(&one, &matrix, x)).map(f32::to_bits).collect();
            for threads in [1, 3, 70] {
                let many = Compute::new(isa, threads).deterministic(true);
                let together: Vec<u32> = multiply(&many, &matrix, &x).into_iter().map(f32::to_bits).collect();
                assert!(alone == together, "{isa} {encoding:?}, {threads} threads");
            }
        }
    }
}

/// Packed weights times many tokens: tiles give the bits of vectors of the same width.
#[test]
fn tiles_have_the_bits_of_vectors() {
    let mut random = SplitMix64(23);
    for encoding in ALL.into_iter().filter(|e| !matches!(e, Encoding::BF16)) {
        // A chunk and a part of one, where blocks are small enough.
        let (outputs, inputs) = (40, if row_multiple(encoding) <= 32 { 352 } else { 768 });
        let bytes = file(encoding, outputs, inputs, &mut random);
        for n in [9, 16, 17, 70, 150] {
            let x: Vec<f32> = (0..n * inputs).map(|_| float(&mut random)).collect();
            for isa in Isa::tested().into_iter().filter(|isa| isa.tiles().is_some()) {
                let compute = Compute::new(isa, 2);
                let matrix = Matrix::pack(&compute, encoding, outputs, inputs, &bytes).unwrap();
                let together = multiply(&compute, &matrix, &x);
                for (x, together) in x.chunks_exact(inputs).zip(together.chunks_exact(outputs)) {
                    let alone = multiply(&compute, &matrix, x);
                    let same = alone.iter().zip(together).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{isa} {encoding:?}, {n} tokens");
                }
            }
        }
    }
}

#[test]
fn what_is_not_a_number_is_seen() {
    let mut random = SplitMix64(13);
    for encoding in ALL {
        let bytes = file(encoding, 20, 256, &mut random);
        for isa in Isa::tested() {
            let compute = Compute::new(isa, 1);
            let matrix = Matrix::pack(&compute, encoding, 20, 256, &bytes).unwrap();
            let fast = Compute::new(isa, 1).fast_prefill(true);
            let mut broken = bytes.clone();
            let scale = match encoding {
                Encoding::F32 | Encoding::Int8 => 0..4,
                Encoding::Q2K | Encoding::Q3K | Encoding::Q6K => bytes.len() / 20 - 2..bytes.len() / 20,
                Encoding::Table16 | Encoding::Mxfp4 => 0..0,
                _ => 0..2,
            };
            if !scale.is_empty() {
                // A NaN with all bits set, in the scale of the first row.
                broken[scale].fill(0xff);
                if encoding == Encoding::Int8 {
                    // Every block of a row repeats its scale.
                    broken[..256 / 32 * 36].chunks_exact_mut(36).for_each(|block| block[..4].fill(0xff));
                }
                let matrix = Matrix::pack(&fast, encoding, 20, 256, &broken).unwrap();
                let out = multiply(&fast, &matrix, &vec![0.5; 70 * 256]);
                for row in out.chunks_exact(20) {
                    assert!(
                        row[0].is_nan() && row[1..].iter().all(|y| y.is_finite()),
                        "{isa} {encoding:?}: {row:?}"
                    );
                }
            }
            for (strange, n) in [f32::NAN, f32::INFINITY].into_iter().flat_map(|x| [(x, 2), (x, 20), (x, 70)])
            {
                let mut x: Vec<f32> = (0..n * 256).map(|_| float(&mut random)).collect();
                x[256 + 77] = strange;
                for compute in [&compute, &fast] {
                    let out = multiply(compute, &matrix, &x);
                    for (token, row) in out.chunks_exact(20).enumerate() {
                        let as_expected = row.iter().all(|y| y.is_finite() != (token == 1));
                        assert!(as_expected, "{isa} {encoding:?}: token {token} of {n}: {row:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let compute = Compute::new(Isa::best(), 1);
    for encoding in ALL {
        let mut random = SplitMix64(17);
        let bytes = file(encoding, 4, 256, &mut random);
        assert!(Matrix::pack(&compute, encoding, 4, 256, &bytes[1..]).is_err());
        assert!(Matrix::pack(&compute, encoding, 0, 256, &[]).is_err());
        assert!(Matrix::pack(&compute, encoding, 4, 0, &[]).is_err());
        assert!(Matrix::pack(&compute, encoding, usize::MAX, 256, &bytes).is_err());
        if row_multiple(encoding) > 1 {
            assert!(Matrix::pack(&compute, encoding, 4, 255, &bytes).is_err());
        }
        let matrix = Matrix::pack(&compute, encoding, 4, 256, &bytes).unwrap();
        assert_eq!(Some(matrix.bytes()), Matrix::resident_bytes(encoding, 4, 256));
    }
}

/// A matrix decodes its rows from panels; the scalar decoder reads the file.
#[test]
fn rows_are_what_the_file_says() {
    let (compute, mut random) = (Compute::new(Isa::best(), 2), SplitMix64(19));
    for encoding in ALL {
        let (rows, inputs) = (19, 512);
        let bytes = file(encoding, rows, inputs, &mut random);
        let matrix = Matrix::pack(&compute, encoding, rows, inputs, &bytes).unwrap();
        let shape = [rows, inputs];
        let tensor = FileTensor { name: "w", shape: &shape, encoding, bytes: (&bytes).into(), factor: 1.0 };
        let mut row = vec![f32::NAN; inputs];
        for (i, expected) in tensor.to_f32().chunks_exact(inputs).enumerate() {
            matrix.row(i, &mut row);
            assert_eq!(row, expected, "{} row {i}", encoding.name());
        }
    }
}

/// A layer multiplies by its factor, and then adds its bias; its results can be added to what is there.
#[test]
fn layers_have_factors_and_biases() {
    // Packed weights meet inputs in 8 bits, which the suite's tolerance is not for.
    kvist_testing::operations::linear_layers(&Cpu::default(), &[Encoding::F32, Encoding::F16], 19);
}
