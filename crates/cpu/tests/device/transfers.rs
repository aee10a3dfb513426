//! The bytes of a block, decoded as the documentation of `kvist_device`'s transfers describes them.
use crate::decoding::*;
use half::{bf16, f16};
use kvist_cache::*;
use kvist_cpu::Cpu;
use kvist_device::*;

/// The code of element `i` of a group of `len` elements with two to a byte.
fn nibble(codes: &[u8], i: usize, len: usize) -> u8 {
    let half = len.div_ceil(2);
    if i < half { codes[i] & 15 } else { codes[i - half] >> 4 }
}

fn half_at(bytes: &[u8], i: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32()
}

/// A row as it is stored: still rotated.
fn decode(storage: Storage, d: usize, row: &[u8]) -> Vec<f32> {
    let group = storage.group as usize;
    match storage.dtype {
        DType::F32 => row.chunks(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect(),
        DType::F16 => (0..d).map(|i| half_at(row, i)).collect(),
        DType::BF16 => row.chunks(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect(),
        DType::Q8 => {
            let (codes, scales) = row.split_at(d);
            (0..d).map(|i| (f32::from(codes[i]) - 128.0) * half_at(scales, i / group)).collect()
        }
        DType::Q4 => {
            let (codes, scales) = row.split_at(d.div_ceil(2));
            let element = |i: usize| {
                let first = i / group * group;
                let code = nibble(&codes[first / 2..], i - first, group.min(d - first));
                let (scale, minimum) =
                    (half_at(scales, 2 * (i / group)), half_at(scales, 2 * (i / group) + 1));
                minimum + scale * f32::from(code)
            };
            (0..d).map(element).collect()
        }
        DType::T4 => {
            const LEVELS: [f32; 8] = [6.0, 18.0, 31.0, 44.0, 58.0, 75.0, 96.0, 127.0];
            // Codes ascend with the levels, the negative ones first; zero has none of its own.
            let level =
                |code: u8| if code < 8 { -LEVELS[7 - code as usize] } else { LEVELS[code as usize - 8] };
            let wide = storage.n_outliers(d as u32) as usize;
            let (codes, scales) = row.split_at(wide + (d - wide).div_ceil(2));
            let outlier = |i: usize| (f32::from(codes[i]) - 128.0) * half_at(scales, 0);
            let last = scales.len() / 2 - 1;
            let other = |i: usize| level(nibble(&codes[wide..], i, d - wide)) * half_at(scales, last);
            (0..wide).map(outlier).chain((0..d - wide).map(other)).collect()
        }
    }
}

/// The stored rows of some cells.
fn exported(pools: &mut dyn Pools, spec: &PoolSpec, cells: CellRun) -> HostBlock {
    let block = HostBlock::new(spec.block_bytes(GroupId(0), cells.len).unwrap()).unwrap();
    let transfer = pools.export(Ticket::START, GroupId(0), cells, block).unwrap();
    pools.finished(&transfer).unwrap().unwrap()
}

/// Whole blocks of sixteen cells, halves and quarters of them, and runs that begin and end anywhere.
#[test]
fn a_block_has_the_documented_bytes() {
    let runs = [(13, 21), (0, 40), (8, 16), (4, 4), (20, 11)].map(|(start, len)| CellRun { start, len });
    for storage in storages() {
        for head_dim in [35, 64, 80] {
            let model = Model { k: storage, v: storage, heads: (6, 3), head_dim, ..Model::default() };
            let cache = model.cache("contiguous", 60);
            let (spec, d) = (model.spec(cache.capacity_cells()), head_dim as usize);
            let mut pools = Cpu::default().pools(&spec).unwrap();
            fill(&model, cache, &mut *pools);
            for cells in runs {
                let block = exported(&mut *pools, &spec, cells);
                let mut bytes = block.bytes();
                let mut inspected = vec![0.0; d];
                for layer in 0..2 {
                    for (side, storage) in [(Side::K, spec.k), (Side::V, spec.v)] {
                        for (cell, head) in
                            cells.cells().flat_map(|cell| (0..3).map(move |head| (cell, head)))
                        {
                            let (row, rest) = bytes.split_at(storage.row_bytes(head_dim) as usize);
                            bytes = rest;
                            let row = decode(storage, d, row);
                            pools.inspect(LayerId(layer), side, head, cell, &mut inspected).unwrap();
                            let what = format!(
                                "{storage} {head_dim} layer {layer} {side:?} cell {cell} head {head}"
                            );
                            if storage.rotate || storage.dtype == DType::T4 {
                                // Only the length of a rotated row is known without rotating it back.
                                let length = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
                                let (a, b) = (length(&row), length(&inspected));
                                assert!((a - b).abs() <= 1e-4 * a, "{what}: {a} {b}");
                            } else {
                                assert_eq!(row, inspected, "{what}");
                            }
                        }
                    }
                }
                assert!(bytes.is_empty(), "{storage} {head_dim}");
            }
        }
    }
}

/// Random runs of random bytes go into any cells, and all other cells keep theirs.
#[test]
fn an_import_changes_its_cells_alone() {
    const CELLS: u32 = 75; // the last sixteen are not all there
    let mut random = kvist_testing::SplitMix64(9);
    for storage in storages() {
        for head_dim in [35, 64, 80] {
            let model = Model { k: storage, v: storage, heads: (6, 3), head_dim, ..Model::default() };
            let spec = model.spec(model.cache("contiguous", CELLS).capacity_cells());
            let mut pools = Cpu::default().pools(&spec).unwrap();
            // K and V of two layers: the bytes of all heads, by cell.
            let rows = [spec.k, spec.v, spec.k, spec.v].map(|side| 3 * side.row_bytes(head_dim) as usize);
            let mut expected = rows.map(|row| vec![0; CELLS as usize * row]);
            for n in 0..12 {
                let start = random.index(CELLS as usize) as u32;
                let cells = match n {
                    0 => CellRun { start: 0, len: CELLS },
                    _ => CellRun { start, len: 1 + random.index((CELLS - start) as usize) as u32 },
                };
                let mut block = HostBlock::new(spec.block_bytes(GroupId(0), cells.len).unwrap()).unwrap();
                block.bytes_mut().iter_mut().for_each(|byte| *byte = random.index(256) as u8);
                let mut bytes = block.bytes();
                for (expected, row) in expected.iter_mut().zip(rows) {
                    let (side, rest) = bytes.split_at(cells.len as usize * row);
                    expected[cells.start as usize * row..][..side.len()].copy_from_slice(side);
                    bytes = rest;
                }
                let transfer = pools.import(Ticket::START, GroupId(0), cells, block).unwrap();
                pools.finished(&transfer).unwrap().unwrap();
                let found = exported(&mut *pools, &spec, CellRun { start: 0, len: CELLS });
                assert!(found.bytes() == expected.concat(), "{storage} {head_dim} {cells:?}");
            }
        }
    }
}

/// The f16 rows of recent tokens, decoded as `Pools::read_recent` documents them.
#[test]
fn recent_rows_have_the_documented_bytes() {
    for (k, v) in [("q8", "q4"), ("f16", "q8"), ("t4-o", "f32"), ("q4-rot", "t4"), ("f32", "f16")] {
        for head_dim in [35, 64] {
            let (k, v): (Storage, Storage) = (k.parse().unwrap(), v.parse().unwrap());
            let model = Model { k, v, heads: (6, 3), head_dim, ..Model::default() };
            let cache = model.cache("contiguous", 60);
            let (spec, d) = (model.spec(cache.capacity_cells()), head_dim as usize);
            let mut pools = Cpu::default().pools(&spec).unwrap();
            let written = fill(&model, cache, &mut *pools);
            let what = format!("K in {k}, V in {v}, {head_dim}");
            let (packed_k, packed_v) = (k.dtype.is_quantised(), v.dtype.is_quantised());
            let sides = usize::from(packed_k) + usize::from(packed_v);
            assert_eq!(spec.recent_row_bytes(GroupId(0)), Some(2 * 3 * sides * d * 2), "{what}");
            let mut rows = vec![7; 2 * 3 * sides * d * 2];
            // The row of a token far back is gone, and cells have the positions that they have.
            for (cell, position, kept) in
                [(33, 33, sides > 0), (20, 20, sides > 0), (33, 34, false), (3, 3, false)]
            {
                let found =
                    pools.read_recent(GroupId(0), CellPosition { cell, position }, &mut rows).unwrap();
                assert_eq!(found, kept, "{what} {cell} {position}");
            }
            let token = CellPosition { cell: 33, position: 33 };
            if sides == 0 || !pools.read_recent(GroupId(0), token, &mut rows).unwrap() {
                continue;
            }
            let mut values = rows.chunks_exact(2).map(|x| f16::from_le_bytes([x[0], x[1]]).to_f32());
            for [keys, vectors] in &written {
                for (rows, packed, turned) in
                    [(keys, packed_k, false), (vectors, packed_v, v.rotate || v.dtype == DType::T4)]
                {
                    for head in 0..if packed { 3 } else { 0 } {
                        let at = (33 * 3 + head) * d;
                        let found: Vec<f32> = values.by_ref().take(d).collect();
                        let expected: Vec<f32> =
                            rows[at..at + d].iter().map(|x| f16::from_f32(*x).to_f32()).collect();
                        if turned {
                            let length = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
                            let (a, b) = (length(&found), length(&expected));
                            assert!((a - b).abs() <= 1e-2 * b && found != expected, "{what}: {a} {b}");
                        } else {
                            assert_eq!(found, expected, "{what}");
                        }
                    }
                }
            }
            assert_eq!(values.next(), None, "{what}");
        }
    }
}

#[test]
fn recent_rows_that_do_not_fit_are_refused() {
    let q8 = Storage::Q8;
    let model = Model { k: q8, v: q8, ..Model::default() };
    let cache = model.cache("contiguous", 60);
    let spec = model.spec(cache.capacity_cells());
    let mut pools = Cpu::default().pools(&spec).unwrap();
    fill(&model, cache, &mut *pools);
    let len = spec.recent_row_bytes(GroupId(0)).unwrap();
    let token = |cell| CellPosition { cell, position: 33 };
    for (group, cell, len) in [(1, 33, len), (0, 60, len), (0, 33, len - 1), (0, 33, len + 1), (0, 33, 0)] {
        let mut rows = vec![0; len];
        assert!(pools.read_recent(GroupId(group), token(cell), &mut rows).is_err(), "{group} {cell} {len}");
        assert!(pools.write_recent(GroupId(group), token(cell), &rows).is_err(), "{group} {cell} {len}");
    }
    assert_eq!(spec.recent_row_bytes(GroupId(1)), None);
}

/// Writes 40 random tokens, and returns K and V of each layer: `[40, KV heads, head_dim]`.
fn fill(model: &Model, mut cache: Cache, pools: &mut dyn Pools) -> Vec<[Vec<f32>; 2]> {
    let (mut plan, mut random) = (StepPlan::default(), kvist_testing::SplitMix64(5));
    let spans = [Span::chain(A, 0, 40)];
    let mut step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
    let plan = step.with_reads();
    pools.begin(plan).unwrap();
    let (heads, kv_heads, d) = (model.heads.0 as usize, model.heads.1 as usize, model.head_dim as usize);
    let mut written = Vec::new();
    for layer in 0..model.n_layers {
        let mut rows = |heads: usize| -> Vec<f32> {
            (0..40 * heads * d).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect()
        };
        let (q, k, v) = (rows(heads), rows(kv_heads), rows(kv_heads));
        let mut out = vec![0.0; q.len()];
        let call = Attend {
            layer: LayerId(layer),
            q: Tensor::dense(&q, heads, d),
            kv: Some((Tensor::dense(&k, kv_heads, d), Tensor::dense(&v, kv_heads, d))),
            out: TensorMut::dense(&mut out, heads, d),
            scale: 1.0,
            softcap: None,
            sinks: None,
        };
        pools.attend(plan, call).unwrap();
        written.push([k, v]);
    }
    step.commit();
    written
}
