//! Packs rows, in code that is compiled for each instruction set.
use super::{Codec, with_codec};
use crate::arch::{Isa, Kernel, Simd, Uses};
use half::f16;
use kvist_device::DType;
use std::marker::PhantomData;

/// [`Codec::encode`]. The bytes are the same with every instruction set.
pub fn encode(
    isa: Isa,
    dtype: DType,
    (row, group): (&[f32], usize),
    codes: &mut [u8],
    params: &mut [f16],
) -> bool {
    with_codec!(dtype, C => isa.run(Encode::<C> { row, group, codes, params, codec: PhantomData }))
}

struct Encode<'e, C> {
    row: &'e [f32],
    group: usize,
    codes: &'e mut [u8],
    params: &'e mut [f16],
    codec: PhantomData<C>,
}

impl<C: Codec> Kernel for Encode<'_, C> {
    type Out = bool;
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> bool {
        C::encode(self.row, self.group, self.codes, self.params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Geometry;
    use kvist_device::Side;
    use kvist_testing::SplitMix64;

    #[test]
    fn every_instruction_set_packs_the_same_bytes() {
        let odd =
            [0.0, -0.0, 1e-40, -1e-40, 3e-8, 65_519.0, 65_520.0, -1e30, f32::MAX, f32::NAN, f32::INFINITY];
        let mut random = SplitMix64(11);
        for storage in ["f32", "f16", "bf16", "q8", "q8-64", "q4", "q4-64", "t4", "t4-o"] {
            for head_dim in [8, 16, 24, 32, 40, 64, 80, 96, 128] {
                let storage: kvist_device::Storage = storage.parse().unwrap();
                let geometry = Geometry::new(Side::K, storage, 1, head_dim as u32);
                for round in 0..40 {
                    let mut row: Vec<f32> =
                        (0..head_dim).map(|_| (random.unit() as f32 - 0.5) * 2f32.powi(round - 20)).collect();
                    if round % 4 == 0 {
                        row[random.index(head_dim)] = odd[random.index(odd.len())];
                    }
                    let packed = |isa: Isa| {
                        let (mut codes, mut params) =
                            (vec![7; geometry.row], vec![f16::ONE; geometry.params]);
                        let row = (&row[..], geometry.group);
                        let finite = encode(isa, storage.dtype, row, &mut codes, &mut params);
                        (finite, codes, params.into_iter().map(f16::to_bits).collect::<Vec<_>>())
                    };
                    let mut all = Isa::available().into_iter().map(|isa| (isa, packed(isa)));
                    let (_, first) = all.next().unwrap();
                    all.for_each(|(isa, other)| assert_eq!(other, first, "{isa} {storage}: {row:?}"));
                }
            }
        }
    }
}
