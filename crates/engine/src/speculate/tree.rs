//! Draft trees and their verification.
use crate::executor::SampledToken;
use kvist_cache::NodeId;

/// Proposed continuations of a sequence, as a tree of tokens. Every path from a root on is one continuation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftTree {
    tokens: Vec<u32>,
    /// `None` continues the last known token.
    parents: Vec<Option<u32>>,
    probabilities: Vec<f32>,
}

impl DraftTree {
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.parents.clear();
        self.probabilities.clear();
    }
    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
    /// The token of each node.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
    /// The parent of each node, which precedes it; `None` for the last known token.
    pub fn parents(&self) -> &[Option<u32>] {
        &self.parents
    }
    /// The probability that the drafter gives each node once its parent is accepted, in 0 to 1.
    pub fn probabilities(&self) -> &[f32] {
        &self.probabilities
    }

    /// Makes room for `n` more nodes.
    pub(super) fn reserve(&mut self, n: usize) {
        self.tokens.reserve(n);
        self.parents.reserve(n);
        self.probabilities.reserve(n);
    }

    /// Adds a node and returns its number.
    ///
    /// # Panics
    /// The parent does not exist.
    pub fn push(&mut self, parent: Option<u32>, token: u32, probability: f32) -> u32 {
        assert!(parent.is_none_or(|parent| (parent as usize) < self.len()), "a node follows its parent");
        self.tokens.push(token);
        self.parents.push(parent);
        self.probabilities.push(probability);
        self.len() as u32 - 1
    }

    /// The first child of `parent` with this token.
    pub fn child(&self, parent: Option<u32>, token: u32) -> Option<u32> {
        let first = parent.map_or(0, |parent| parent + 1);
        (first..self.len() as u32)
            .find(|&node| self.parents[node as usize] == parent && self.tokens[node as usize] == token)
    }

    /// True if each node continues the one before it.
    pub fn is_chain(&self) -> bool {
        (0..).zip(&self.parents).all(|(i, parent): (u32, _)| *parent == i.checked_sub(1))
    }

    /// Number of tokens before node `node` on its path, the last known token not counted.
    pub fn depth(&self, node: u32) -> u32 {
        std::iter::successors(self.parents[node as usize], |parent| self.parents[*parent as usize]).count()
            as u32
    }

    /// [`depth`](Self::depth) of every node.
    pub fn depths(&self) -> Vec<u32> {
        let mut depths: Vec<u32> = Vec::with_capacity(self.len());
        for parent in &self.parents {
            depths.push(parent.map_or(0, |parent| depths[parent as usize] + 1));
        }
        depths
    }

    /// The probability of each node's path: the product of its nodes' probabilities.
    pub fn paths(&self) -> Vec<f64> {
        let mut paths: Vec<f64> = Vec::with_capacity(self.len());
        for (parent, probability) in self.parents.iter().zip(&self.probabilities) {
            let before = parent.map_or(1.0, |parent| paths[parent as usize]);
            paths.push(before * f64::from(*probability));
        }
        paths
    }

    /// Depth of the deepest node, counted from 1; 0 for an empty tree.
    pub fn max_depth(&self) -> u32 {
        self.depths().into_iter().max().map_or(0, |depth| depth + 1)
    }

    /// Keeps only the first continuation: from every node on, the first child. A cache without trees can verify
    /// that.
    pub fn keep_first_path(&mut self) {
        let mut chain = DraftTree::default();
        let mut at = None;
        while let Some(node) = self.parents.iter().position(|parent| *parent == at) {
            let parent = chain.len().checked_sub(1).map(|parent| parent as u32);
            chain.push(parent, self.tokens[node], self.probabilities[node]);
            at = Some(node as u32);
        }
        *self = chain;
    }

    /// Removes the nodes from number `n` on.
    pub fn truncate(&mut self, n: usize) {
        self.tokens.truncate(n);
        self.parents.truncate(n);
        self.probabilities.truncate(n);
    }

    /// Keeps these nodes, in ascending order. With a node, its parent must be kept.
    pub fn keep(&mut self, nodes: &[u32]) {
        let renamed = |node: u32| nodes.binary_search(&node).ok().map(|node| node as u32);
        for (to, &from) in nodes.iter().enumerate() {
            let from = from as usize;
            self.tokens[to] = self.tokens[from];
            self.probabilities[to] = self.probabilities[from];
            self.parents[to] = self.parents[from].and_then(renamed);
        }
        self.truncate(nodes.len());
    }

    /// The parents as a cache takes them: node 0 is the last known token, and the nodes of the tree follow.
    pub fn span_parents(&self, out: &mut Vec<Option<NodeId>>) {
        out.clear();
        out.push(None);
        out.extend(self.parents.iter().map(|parent| Some(NodeId(parent.map_or(0, |parent| parent + 1)))));
    }
}

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// The accepted nodes, from a root on.
    pub path: Vec<u32>,
    /// The new tokens: those of the path, and one more unless the text ended.
    pub tokens: Vec<u32>,
    /// True if the last token ended the text.
    pub finished: bool,
}

impl Verified {
    /// The rows of the pass that stay: that of the last known token, and those of the path.
    pub fn rows(&self) -> impl Iterator<Item = usize> + Clone {
        std::iter::once(0).chain(self.path.iter().map(|node| *node as usize + 1))
    }

    /// The path as the cache takes it, with the last known token as node 0.
    pub fn kept(&self, out: &mut Vec<NodeId>) {
        out.clear();
        out.push(NodeId(0));
        out.extend(self.path.iter().map(|node| NodeId(node + 1)));
    }
}

/// Walks `tree` from the last known token on. `choose` draws the token that follows a row: row 0 is the last known token,
/// row `n + 1` is node `n`. It is called once per new token, in text order, so a sampler sees what it would see without a
/// draft. `out` is overwritten.
pub fn verify<E>(
    tree: &DraftTree,
    mut choose: impl FnMut(usize) -> Result<SampledToken, E>,
    out: &mut Verified,
) -> Result<(), E> {
    out.path.clear();
    out.tokens.clear();
    let mut at = None;
    loop {
        let SampledToken { token, finished } = choose(at.map_or(0, |node: u32| node as usize + 1))?;
        out.tokens.push(token);
        out.finished = finished;
        match tree.child(at, token).filter(|_| !finished) {
            Some(node) => out.path.push(node),
            None => return Ok(()),
        }
        at = out.path.last().copied();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 7 ─┬─ 1 ─┬─ 2 ── 3
    ///    │     └─ 4
    ///    └─ 5
    fn tree() -> DraftTree {
        let mut tree = DraftTree::default();
        let one = tree.push(None, 1, 0.6);
        let two = tree.push(Some(one), 2, 0.5);
        tree.push(Some(two), 3, 0.9);
        tree.push(Some(one), 4, 0.4);
        tree.push(None, 5, 0.3);
        tree
    }

    fn walk(tree: &DraftTree, text: &[u32], end: usize) -> Verified {
        let (mut out, mut drawn) = (Verified::default(), 0);
        let mut rows = Vec::new();
        let choose = |row| {
            rows.push(row);
            drawn += 1;
            Ok::<_, ()>(SampledToken { token: text[drawn - 1], finished: drawn == end })
        };
        verify(tree, choose, &mut out).unwrap();
        let expected: Vec<usize> =
            std::iter::once(0).chain(out.path.iter().map(|node| *node as usize + 1)).collect();
        assert_eq!(rows[..], expected[..rows.len()], "a row per drawn token, along the path");
        out
    }

    #[test]
    fn the_path_is_what_the_sampler_draws() {
        let tree = tree();
        let check = |text: &[u32], end, path: &[u32], tokens: &[u32], finished| {
            let expected = Verified { path: path.into(), tokens: tokens.into(), finished };
            assert_eq!(walk(&tree, text, end), expected, "{text:?}");
        };
        check(&[9], 0, &[], &[9], false);
        check(&[5, 1], 0, &[4], &[5, 1], false);
        check(&[1, 4, 4], 0, &[0, 3], &[1, 4, 4], false);
        check(&[1, 2, 3, 8], 0, &[0, 1, 2], &[1, 2, 3, 8], false);
        // The text ends with a token that the tree proposes: nothing is drawn after it, and the node is not needed.
        check(&[1, 2, 3], 2, &[0], &[1, 2], true);
    }

    #[test]
    fn shapes() {
        let mut tree = tree();
        assert_eq!((tree.len(), tree.max_depth(), tree.depth(3), tree.is_chain()), (5, 3, 1, false));
        let mut parents = Vec::new();
        tree.span_parents(&mut parents);
        let ids = |list: &[i64]| list.iter().map(|n| u32::try_from(*n).ok().map(NodeId)).collect::<Vec<_>>();
        assert_eq!(parents, ids(&[-1, 0, 1, 2, 1, 0]));
        tree.keep_first_path();
        assert_eq!((tree.tokens(), tree.is_chain()), (&[1, 2, 3][..], true));
        tree.truncate(1);
        assert_eq!((tree.len(), tree.probabilities()), (1, &[0.6][..]));
        tree.clear();
        assert!(tree.is_empty() && tree.is_chain() && tree.max_depth() == 0);
    }
}
