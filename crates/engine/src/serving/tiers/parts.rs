//! What the tiers store of a block: one object with the bytes of all layer groups that keep every token, and one object for each
//! group with a sliding window, because such a group has only some of the blocks.
use kvist_cache::GroupId;
use kvist_cache::kinds::Visibility;
use kvist_store::BlockKey;

/// The parts of a block, by layer group.
#[derive(Clone, Debug)]
pub struct BlockParts {
    pub block_tokens: u32,
    groups: Vec<Part>,
}

/// A block's part in one layer group.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub bytes: usize,
    pub visibility: Visibility,
}

impl Part {
    pub fn has_window(&self) -> bool {
        self.visibility.window.is_some()
    }
}

impl BlockParts {
    /// `bytes`: of a block in a layer group.
    pub fn new(block_tokens: u32, groups: &[Visibility], bytes: impl Fn(GroupId) -> usize) -> BlockParts {
        let part = |(group, &visibility)| Part { bytes: bytes(GroupId(group)), visibility };
        BlockParts { block_tokens: block_tokens.max(1), groups: (0..).zip(groups).map(part).collect() }
    }

    /// The group whose block numbers name blocks: the first one that keeps every token, as in the scheduler.
    pub fn naming_group(&self) -> GroupId {
        GroupId(self.groups.iter().position(|part| !part.has_window()).unwrap_or(0) as u16)
    }

    pub fn part(&self, group: usize) -> Option<&Part> {
        self.groups.get(group)
    }

    /// The groups that keep every token, in the order of their bytes in the object.
    pub fn whole(&self) -> impl Iterator<Item = (usize, &Part)> {
        self.groups.iter().enumerate().filter(|(_, part)| !part.has_window())
    }

    /// The groups with a window, each of which has an object of its own.
    pub fn windows(&self) -> impl Iterator<Item = (usize, &Part)> {
        self.groups.iter().enumerate().filter(|(_, part)| part.has_window())
    }

    pub fn has_windows(&self) -> bool {
        self.windows().next().is_some()
    }

    /// Of all groups.
    pub fn block_bytes(&self) -> usize {
        self.groups.iter().map(|part| part.bytes).sum()
    }

    /// Whether the token after the first `n_blocks` blocks sees something of block `block` in `group`.
    pub fn sees(&self, group: usize, n_blocks: u32, block: u32) -> bool {
        let (query, first) = (n_blocks * self.block_tokens, block * self.block_tokens);
        let sees = |part: &Part| {
            part.visibility.sees(query, first) || part.visibility.sees(query, first + self.block_tokens - 1)
        };
        block < n_blocks && self.groups.get(group).is_some_and(sees)
    }

    /// Blocks that a window covers at least, the smallest of all.
    pub fn shortest_window(&self) -> u32 {
        let windows = self.groups.iter().filter_map(|part| part.visibility.window);
        windows.min().map_or(1, |window| window / self.block_tokens).max(1)
    }
}

/// The key of a block's part in a group with a window.
pub fn window_key(key: &BlockKey, group: usize) -> BlockKey {
    key.part(u32::try_from(group).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_seen_if_one_of_its_tokens_is() {
        let groups = [(Some(6), 0), (None, 0), (Some(1), 2), (Some(5), 0)];
        let groups = groups.map(|(window, sinks)| Visibility { window, sinks });
        let parts = BlockParts::new(4, &groups, |_| 1);
        let seen = |group, n| (0..10).filter(|&block| parts.sees(group, n, block)).collect::<Vec<_>>();
        // The query at 12 sees 7 to 12, of which 7 is in block 1.
        assert_eq!(seen(0, 3), [1, 2]);
        assert_eq!(seen(1, 3), [0, 1, 2]);
        assert_eq!((seen(2, 3), seen(2, 1), seen(2, 0)), (vec![0], vec![0], vec![]));
        assert_eq!(seen(3, 3), [2]);
        assert_eq!((parts.naming_group(), parts.shortest_window()), (GroupId(1), 1));
        assert_eq!((parts.block_bytes(), parts.has_windows()), (4, true));
    }
}
