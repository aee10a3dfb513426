//! Blocks between the host and cells of pools: the bytes, whatever the rows' length, the parts of a pool and the memory.
use crate::common::{Api, driver};
use kvist_device::DeviceError;
use kvist_gpu::{BufferCopy, Driver, HostMemory, Lane, Section};
use kvist_testing::SplitMix64;

const CELLS: u32 = 37;
const MEMORIES: [HostMemory; 3] = [HostMemory::Pageable, HostMemory::Pinned, HostMemory::Mapped];

/// One side of a layer: heads in two parts, and what the host thinks is in them.
struct Side {
    row_bytes: u32,
    words: u32,
    parts: Vec<(u32, u32, <Api as Driver>::Buffer)>,
    expected: Vec<Vec<u8>>, // [parts], each [heads, CELLS, words] as bytes
}

impl Side {
    fn new(gpu: &Api, heads: u32, row_bytes: u32) -> Side {
        let words = row_bytes.div_ceil(4);
        let first = heads / 2;
        let ranges = [(0, first), (first, heads - first)].into_iter().filter(|(_, heads)| *heads > 0);
        let bytes = |heads: u32| u64::from(heads * CELLS * words) * 4;
        let parts: Vec<_> =
            ranges.map(|(first, heads)| (first, heads, gpu.buffer("pool", bytes(heads)).unwrap())).collect();
        let expected = parts.iter().map(|(_, heads, _)| vec![0; bytes(*heads) as usize]).collect();
        Side { row_bytes, words, parts, expected }
    }
    fn sections(&self, first_byte: u32, block_heads: u32) -> Vec<Section<'_, Api>> {
        let section = |(first_head, heads, pool)| Section {
            first_byte,
            row_bytes: self.row_bytes,
            block_heads,
            first_head,
            heads,
            words: self.words,
            cells: CELLS,
            pool,
        };
        self.parts.iter().map(|(first, heads, pool)| section((*first, *heads, pool))).collect()
    }
    /// The same copy in plain loops.
    fn store(&mut self, block: &[u8], cells: &[u32], block_heads: u32) {
        let row = self.row_bytes as usize;
        for ((first, heads, _), expected) in self.parts.iter().zip(&mut self.expected) {
            for (i, cell) in cells.iter().enumerate() {
                for head in 0..*heads {
                    let from = (i * block_heads as usize + (first + head) as usize) * row;
                    let to = ((head * CELLS + cell) * self.words * 4) as usize;
                    expected[to..to + row].copy_from_slice(&block[from..from + row]);
                }
            }
        }
    }
    fn assert_same(&self, gpu: &Api) {
        for ((_, _, pool), expected) in self.parts.iter().zip(&self.expected) {
            gpu.read_back(&[(pool, 0, expected.len() as u64)], |bytes| assert_eq!(bytes, expected)).unwrap();
        }
    }
}

fn cells(random: &mut SplitMix64, n: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..CELLS).collect();
    (0..n).map(|_| all.swap_remove(random.below(all.len() as u32) as usize)).collect()
}

#[test]
fn blocks_reach_their_cells_and_come_back() {
    let Some(gpu) = driver() else { return };
    for memory in MEMORIES {
        let mut lane = match Lane::new(&gpu, memory, 2, 1 << 16, CELLS) {
            Ok(lane) => lane,
            Err(DeviceError::Unsupported(what)) => {
                println!("{memory:?}: {what}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let mut random = SplitMix64(7);
        // 1 and 3: several rows in a word; 34 and 66: q8 of 32 and 64; 6: f16 of 3; 64 and 256: whole pieces of sixteen bytes, of which the
        // second side begins at a word between them if the first one does not end with one.
        for (row_bytes, second) in [
            (1, 2),
            (2, 3),
            (3, 4),
            (4, 5),
            (6, 7),
            (34, 35),
            (64, 65),
            (66, 67),
            (64, 256),
            (256, 16),
            (6, 64),
            (20, 32),
        ] {
            let heads = 3;
            let mut sides = [Side::new(&gpu, heads, row_bytes), Side::new(&gpu, heads, second)];
            for n in [1, 5, 16, 2, CELLS as usize] {
                let cells = cells(&mut random, n);
                // Two sections; the second begins at the next word.
                let (mut block, mut firsts) = (Vec::new(), Vec::new());
                for side in &mut sides {
                    let len = n * (heads * side.row_bytes) as usize;
                    let bytes: Vec<u8> = (0..len).map(|_| random.below(256) as u8).collect();
                    side.store(&bytes, &cells, heads);
                    firsts.push(block.len() as u32);
                    block.extend(bytes);
                    block.resize(block.len().next_multiple_of(4), 0);
                }
                let sections: Vec<_> = sides
                    .iter()
                    .zip(&firsts)
                    .flat_map(|(side, first)| side.sections(*first, heads))
                    .collect();
                let mut pack = |to: &mut [u8]| to.copy_from_slice(&block);
                let upload = match n % 2 {
                    0 => lane.upload(&block, &cells, &sections, true),
                    _ => lane.upload_packed(block.len(), &mut pack, &cells, &sections, true),
                };
                let upload = upload.unwrap();
                let download = lane.download(block.len() as u64, &cells, &sections).unwrap();
                assert!(lane.wait(upload).unwrap().is_sorted(), "time goes on");
                lane.read(download, |bytes| {
                    // Bytes that pad a section to words mean nothing.
                    for (side, first) in sides.iter().zip(&firsts) {
                        let rows = *first as usize..*first as usize + n * (heads * side.row_bytes) as usize;
                        assert_eq!(bytes[rows.clone()], block[rows]);
                    }
                })
                .unwrap();
                sides.iter().for_each(|side| side.assert_same(&gpu));
            }
        }
    }
}

#[test]
fn uploads_reuse_slots_in_order() {
    let Some(gpu) = driver() else { return };
    let mut lane = Lane::new(&gpu, HostMemory::Pinned, 2, 256, 4).unwrap();
    let mut side = Side::new(&gpu, 2, 8);
    // Many more than slots, over the same cells: the last one wins. Which cells changes while others are on their way.
    for i in 0..50u8 {
        let block = [i; 2 * 2 * 8];
        let cells = [[3, 9], [9, 3], [3, 9], [5, 9], [4, 5]][usize::from(i % 5)];
        side.store(&block, &cells, 2);
        let _ = lane.upload(&block, &cells, &side.sections(0, 2), false).unwrap();
    }
    lane.wait_all().unwrap();
    side.assert_same(&gpu);
}

#[test]
fn refusals_change_nothing() {
    let Some(gpu) = driver() else { return };
    let mut lane = Lane::new(&gpu, HostMemory::Pinned, 1, 64, 4).unwrap();
    let mut side = Side::new(&gpu, 2, 8);
    side.store(&[9; 64], &[0, 1, 2, 3], 2);
    let sections = side.sections(0, 2);
    lane.upload(&[9; 64], &[0, 1, 2, 3], &sections, false).unwrap();
    assert!(matches!(lane.upload(&[7; 68], &[0], &sections, false), Err(DeviceError::BlockSize { .. })));
    assert!(matches!(lane.upload(&[7; 64], &[0; 5], &sections, false), Err(DeviceError::OutOfRange { .. })));
    let unread = lane.download(64, &[0, 1, 2, 3], &sections).unwrap();
    assert!(lane.upload(&[7; 64], &[0], &sections, false).is_err(), "the only slot has a download");
    lane.read(unread, |bytes| assert_eq!(bytes, [9; 64])).unwrap();
    assert!(matches!(lane.read(unread, |_| {}), Err(DeviceError::UnknownTransfer)));
    side.assert_same(&gpu);
}

/// A submission's dispatches and copies run in the order in which they were recorded.
#[test]
fn copies_are_in_order_with_dispatches() {
    let Some(gpu) = driver() else { return };
    let (a, b) = (gpu.filled("a", &[1; 16]).unwrap(), gpu.filled("b", &[2; 16]).unwrap());
    let mut recorder = Default::default();
    let copy = |from, to| BufferCopy { from, from_byte: 0, to, to_byte: 0, bytes: 16 };
    gpu.copy(&mut recorder, &copy(&a, &b));
    gpu.copy(&mut recorder, &copy(&b, &a));
    let submission = gpu.submit(&mut recorder, &[]);
    gpu.wait(&submission).unwrap();
    gpu.read_back(&[(&a, 0, 16), (&b, 0, 16)], |bytes| assert_eq!(bytes, [1; 32])).unwrap();
}
