//! The state of every block at some moments.
use serde::Serialize;

/// One block at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    Free,
    /// In the prefix index and not used by any request; can be hit.
    Cached,
    /// Used by one request, with this id.
    Held(u64),
    /// Used by several requests.
    Shared,
}

/// All blocks at one moment, run-length encoded by state in the order of block numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockFrame {
    pub at_ns: u64,
    /// (blocks, state)
    pub runs: Vec<(u32, BlockState)>,
}

/// Frames in time order. At most [`BlockMap::MOST_FRAMES`] are kept; when full, every second frame is dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockMap {
    pub n_blocks: u32,
    frames: Vec<BlockFrame>,
    keep_one_of: u64,
    noted: u64,
}

impl BlockMap {
    pub const MOST_FRAMES: usize = 240;

    pub fn new(n_blocks: u32) -> BlockMap {
        BlockMap { n_blocks, frames: Vec::new(), keep_one_of: 1, noted: 0 }
    }

    /// Returns whether the next moment will be kept. Checking first avoids scanning all blocks for nothing.
    pub fn wants(&self) -> bool {
        self.noted.is_multiple_of(self.keep_one_of)
    }

    /// Counts a moment without keeping it.
    pub fn pass(&mut self) {
        self.noted += 1;
    }

    /// Records a moment. `states` has one entry per block; missing blocks at the end count as free.
    pub fn note(&mut self, at_ns: u64, states: impl IntoIterator<Item = BlockState>) {
        if self.wants() {
            if self.frames.len() == Self::MOST_FRAMES {
                let mut keep = false;
                self.frames.retain(|_| {
                    keep = !keep;
                    keep
                });
                self.keep_one_of *= 2;
            }
            if self.wants() {
                self.frames.push(BlockFrame { at_ns, runs: runs(self.n_blocks, states) });
            }
        }
        self.noted += 1;
    }

    pub fn frames(&self) -> &[BlockFrame] {
        &self.frames
    }
}

fn runs(n_blocks: u32, states: impl IntoIterator<Item = BlockState>) -> Vec<(u32, BlockState)> {
    let mut runs: Vec<(u32, BlockState)> = Vec::new();
    let states = states.into_iter().chain(std::iter::repeat(BlockState::Free));
    for state in states.take(n_blocks as usize) {
        match runs.last_mut() {
            Some((n, last)) if *last == state => *n += 1,
            _ => runs.push((1, state)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_cover_all_blocks_and_stay_few() {
        let mut map = BlockMap::new(10);
        for at in 0..2000u64 {
            let held = (0..at % 11).map(|block| BlockState::Held(block / 3));
            map.note(at, held);
        }
        assert!((BlockMap::MOST_FRAMES / 2..=BlockMap::MOST_FRAMES).contains(&map.frames().len()));
        for frame in map.frames() {
            assert_eq!(frame.runs.iter().map(|run| run.0).sum::<u32>(), 10, "{frame:?}");
            let held: u32 =
                frame.runs.iter().filter(|run| matches!(run.1, BlockState::Held(_))).map(|run| run.0).sum();
            assert_eq!(u64::from(held), frame.at_ns % 11);
        }
        let mut twin = BlockMap::new(10);
        for at in 0..2000u64 {
            if twin.wants() {
                twin.note(at, (0..at % 11).map(|b| BlockState::Held(b / 3)))
            } else {
                twin.pass()
            }
        }
        assert_eq!(twin, map);
    }
}
