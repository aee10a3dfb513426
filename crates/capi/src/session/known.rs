//! The tokens of sequences: the cache has their K and V, and a file needs both.
use kvist_engine::kvist_cache::{NodeId, SeqId};
use std::collections::HashMap;

/// Follows what calls add to sequences and take from them. [`of`](Self::of) says so where that is not what the cache has.
#[derive(Default)]
pub(super) struct KnownTokens {
    sequences: HashMap<u32, Tokens>,
}

#[derive(Clone, Default)]
struct Tokens {
    stored: Vec<u32>,
    /// Nodes of a draft tree, by id.
    nodes: Vec<u32>,
}

impl KnownTokens {
    pub fn add(&mut self, seq: SeqId, tokens: &[u32]) {
        self.sequences.entry(seq.0).or_default().stored.extend_from_slice(tokens);
    }
    pub fn draft(&mut self, seq: SeqId, tokens: &[u32]) {
        self.sequences.entry(seq.0).or_default().nodes.extend_from_slice(tokens);
    }
    /// The nodes of a path become part of the sequence, the others are gone.
    pub fn accept(&mut self, seq: SeqId, path: &[NodeId]) {
        let of = self.sequences.entry(seq.0).or_default();
        let nodes = std::mem::take(&mut of.nodes);
        of.stored.extend(path.iter().filter_map(|node| nodes.get(node.0 as usize)));
    }
    pub fn fork(&mut self, from: SeqId, to: SeqId) {
        if let Some(tokens) = self.sequences.get(&from.0).cloned() {
            self.sequences.insert(to.0, Tokens { nodes: Vec::new(), ..tokens });
        }
    }
    pub fn truncate(&mut self, seq: SeqId, n_tokens: u32) {
        let of = self.sequences.entry(seq.0).or_default();
        of.stored.truncate(n_tokens as usize);
        of.nodes.clear();
        if of.stored.is_empty() {
            self.sequences.remove(&seq.0);
        }
    }

    /// What is known of a sequence.
    pub fn stored(&self, seq: SeqId) -> &[u32] {
        self.sequences.get(&seq.0).map_or(&[][..], |tokens| &tokens.stored)
    }

    /// The tokens of a sequence that stores `n`, if they are known.
    pub fn of(&self, seq: SeqId, n: u32) -> Option<&[u32]> {
        let stored = self.stored(seq);
        (stored.len() == n as usize).then_some(stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_follow_their_sequence() {
        let (a, b, mut known) = (SeqId(0), SeqId(1), KnownTokens::default());
        assert_eq!(known.of(a, 0), Some(&[][..]));
        known.add(a, &[1, 2, 3]);
        known.draft(a, &[7, 8, 9]);
        assert_eq!(known.of(a, 3), Some(&[1, 2, 3][..]));
        assert_eq!(known.of(a, 4), None, "not what the cache has");
        known.fork(a, b);
        known.accept(a, &[NodeId(0), NodeId(2)]);
        known.truncate(b, 1);
        assert_eq!((known.of(a, 5), known.of(b, 1)), (Some(&[1, 2, 3, 7, 9][..]), Some(&[1][..])));
        known.truncate(a, 0);
        known.add(a, &[5]);
        assert_eq!(known.of(a, 1), Some(&[5][..]));
    }
}
