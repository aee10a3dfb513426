//! The tree of indexed blocks: one node per full block, whose parent is the node of the block before it.
//!
//! Along a prompt that was seen before, almost every node has exactly one child. The node stores that child directly,
//! so no hash is computed. Only where prompts diverge does a map find the other children ("siblings"). The map's hash
//! only selects a bucket; keys are always compared. (Radix trees over tokens: Zheng et al., "SGLang: Efficient
//! Execution of Structured Language Model Programs", NeurIPS 2024; hashes per block: vLLM's automatic prefix
//! caching.)
use super::as_is::AsIs;
use super::content::{Content, Keying};
use crate::kinds::NONE;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, BuildHasherDefault, RandomState};

/// A node number. Numbers are reused.
pub(super) type Node = u32;

#[derive(Clone, Copy)]
struct Links {
    parent: Node,
    /// The first child; the others follow as a list of its siblings.
    child: Node,
    previous_sibling: Node,
    next_sibling: Node,
}

/// 24 bytes and a key per node. The map contains only siblings.
pub(super) struct Tree<S = RandomState> {
    keying: Keying,
    links: Vec<Links>,
    hashes: Vec<u64>, // of the whole prefix up to and including the node
    keys: Vec<u32>,   // [nodes, n_words]
    free: Vec<Node>,
    /// Every child except first children, under a hash that users cannot predict.
    siblings: HashMap<u64, Node, BuildHasherDefault<AsIs>>,
    hasher: S,
    /// True once a sibling found its bucket taken. Such siblings are found by a linear search.
    collided: bool,
    buffer: Vec<u32>,
}

impl<S: BuildHasher + Default> Tree<S> {
    pub fn new(keying: Keying) -> Self {
        Tree {
            keying,
            links: Vec::new(),
            hashes: Vec::new(),
            keys: Vec::new(),
            free: Vec::new(),
            siblings: HashMap::default(),
            hasher: S::default(),
            collided: false,
            buffer: Vec::new(),
        }
    }
    pub fn keying(&self) -> Keying {
        self.keying
    }
    /// One past the highest node number.
    pub fn n_nodes(&self) -> usize {
        self.links.len()
    }
    pub fn parent(&self, node: Node) -> Node {
        self.links[node as usize].parent
    }
    pub fn is_leaf(&self, node: Node) -> bool {
        self.links[node as usize].child == NONE
    }
    /// Hash of the prefix that ends with `node`, salt included. The same in every run and on every machine.
    pub fn hash(&self, node: Node) -> u64 {
        self.hashes[node as usize]
    }
    #[inline]
    pub fn key(&self, node: Node) -> &[u32] {
        let at = node as usize * self.keying.n_words;
        &self.keys[at..at + self.keying.n_words]
    }
    /// The first child, then its siblings, newest first.
    pub fn children(&self, node: Node) -> impl Iterator<Item = Node> {
        let some = |node: Node| (node != NONE).then_some(node);
        std::iter::successors(some(self.links[node as usize].child), move |&node| {
            some(self.links[node as usize].next_sibling)
        })
    }

    /// Makes a root, for prompts under a salt with this hash.
    pub fn new_root(&mut self, hash: u64) -> Node {
        self.push(Links { parent: NONE, child: NONE, previous_sibling: NONE, next_sibling: NONE }, hash, &[])
    }

    /// The child of `node` with this key.
    #[inline]
    pub fn child(&self, node: Node, key: &[u32]) -> Option<Node> {
        let first = self.links[node as usize].child;
        if first == NONE {
            return None;
        }
        if self.key(first) == key {
            return Some(first);
        }
        if self.links[first as usize].next_sibling == NONE { None } else { self.sibling(node, key) }
    }

    fn sibling(&self, node: Node, key: &[u32]) -> Option<Node> {
        match self.siblings.get(&self.bucket(node, key)).copied() {
            Some(found) if self.parent(found) == node && self.key(found) == key => Some(found),
            _ if self.collided => self.children(node).find(|&child| self.key(child) == key),
            _ => None,
        }
    }
    fn bucket(&self, node: Node, key: &[u32]) -> u64 {
        self.hasher.hash_one((node, key))
    }

    /// The child of `node` for block `i` of `content`, made if missing. Returns the child, and whether it was made.
    pub fn child_or_new(&mut self, node: Node, content: &Content<'_>, i: u32) -> (Node, bool) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let key = self.keying.key(content, i, &mut buffer);
        let child = match self.child(node, key) {
            Some(child) => (child, false),
            None => (self.insert(node, key), true),
        };
        self.buffer = buffer;
        child
    }

    fn insert(&mut self, parent: Node, key: &[u32]) -> Node {
        let hash = chain(self.hashes[parent as usize], key);
        let first = self.links[parent as usize].child;
        if first == NONE {
            let node = self.push(
                Links { parent, child: NONE, previous_sibling: NONE, next_sibling: NONE },
                hash,
                key,
            );
            self.links[parent as usize].child = node;
            return node;
        }
        // Insert after the first child, which stays the one stored in the parent.
        let second = self.links[first as usize].next_sibling;
        let node = self.push(
            Links { parent, child: NONE, previous_sibling: first, next_sibling: second },
            hash,
            key,
        );
        self.links[first as usize].next_sibling = node;
        if second != NONE {
            self.links[second as usize].previous_sibling = node;
        }
        match self.siblings.entry(self.hasher.hash_one((parent, key))) {
            Entry::Vacant(bucket) => {
                bucket.insert(node);
            }
            Entry::Occupied(_) => self.collided = true,
        }
        node
    }

    fn leave_map(&mut self, parent: Node, node: Node) {
        let bucket = self.bucket(parent, self.key(node));
        if self.siblings.get(&bucket) == Some(&node) {
            self.siblings.remove(&bucket);
        }
    }

    /// Removes a leaf.
    pub fn remove(&mut self, node: Node) {
        let Links { parent, child, previous_sibling, next_sibling } = self.links[node as usize];
        assert!(child == NONE, "node {node} has children and cannot go");
        if previous_sibling != NONE {
            self.leave_map(parent, node);
            self.links[previous_sibling as usize].next_sibling = next_sibling;
        } else if parent != NONE {
            self.links[parent as usize].child = next_sibling;
            if next_sibling != NONE {
                self.leave_map(parent, next_sibling); // it is now the child stored in the parent
            }
        }
        if next_sibling != NONE {
            self.links[next_sibling as usize].previous_sibling = previous_sibling;
        }
        self.free.push(node);
    }

    /// Adds a node. Roots have no key, and no memory is allocated for one until a later node needs it.
    fn push(&mut self, links: Links, hash: u64, key: &[u32]) -> Node {
        let node = match self.free.pop() {
            Some(node) => {
                self.links[node as usize] = links;
                self.hashes[node as usize] = hash;
                node
            }
            None => {
                assert!(self.links.len() < NONE as usize, "an index holds fewer than 2^32 nodes");
                self.links.push(links);
                self.hashes.push(hash);
                self.links.len() as u32 - 1
            }
        };
        if !key.is_empty() {
            let at = node as usize * self.keying.n_words;
            if self.keys.len() < at + key.len() {
                self.keys.resize(at + key.len(), 0);
            }
            self.keys[at..at + key.len()].copy_from_slice(key);
        }
        node
    }

    pub fn clear(&mut self) {
        self.links.clear();
        self.hashes.clear();
        self.keys.clear();
        self.free.clear();
        self.siblings.clear();
        self.collided = false;
    }
}

/// The hash of a prefix, computed from the hash of the prefix without its last block. Not secret: events and ghosts
/// name prefixes by it, and no decision depends on it.
pub(super) fn chain(parent: u64, key: &[u32]) -> u64 {
    let mut hash = parent ^ 0x9E37_79B9_7F4A_7C15;
    for pair in key.chunks(2) {
        let word = u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32;
        let product = u128::from(hash ^ word) * 0xD6E8_FEB8_6659_FD93;
        hash = (product as u64) ^ (product >> 64) as u64 ^ hash.rotate_left(23);
    }
    // The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    hash ^ (hash >> 31)
}

/// The hash of a salt's name.
pub(super) fn salt_hash(salt: &str) -> u64 {
    let bytes: Vec<u32> = salt.bytes().map(u32::from).collect();
    chain(bytes.len() as u64, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::Vocabulary;
    use std::collections::BTreeMap;
    use std::hash::Hasher;

    /// A hasher with only four different hashes.
    #[derive(Default)]
    struct Bad;
    struct BadHasher(u64);
    impl BuildHasher for Bad {
        type Hasher = BadHasher;
        fn build_hasher(&self) -> BadHasher {
            BadHasher(0)
        }
    }
    impl Hasher for BadHasher {
        fn finish(&self) -> u64 {
            self.0 % 4
        }
        fn write(&mut self, bytes: &[u8]) {
            self.0 = bytes.iter().fold(self.0, |sum, byte| sum + u64::from(*byte));
        }
    }

    /// The hash only selects a bucket: with a very poor hash, children are still found and removed as in a reference
    /// model that maps (parent, key) to the child.
    #[test]
    fn a_bad_hash_costs_time_and_nothing_else() {
        let keying = Keying::new(2, Vocabulary::Tokens).expect("tokens always fit");
        let mut tree: Tree<Bad> = Tree::new(keying);
        let root = tree.new_root(1);
        let mut model: BTreeMap<(Node, [u32; 2]), Node> = BTreeMap::new();
        let mut random = kvist_testing::SplitMix64(1);
        let mut below = |n: usize| random.index(n);
        for _ in 0..20_000 {
            let parents: Vec<Node> = std::iter::once(root).chain(model.values().copied()).collect();
            let parent = parents[below(parents.len().min(6))];
            let key = [below(5) as u32, below(5) as u32];
            if below(5) < 3 {
                let (node, is_new) = tree.child_or_new(parent, &Content::Tokens(&key), 0);
                assert_eq!(is_new, !model.contains_key(&(parent, key)), "{parent} {key:?}");
                assert_eq!(*model.entry((parent, key)).or_insert(node), node);
            } else if let Some((&place, &node)) = model.iter().nth(below(model.len().max(1)))
                && tree.is_leaf(node)
            {
                tree.remove(node);
                model.remove(&place);
            }
            let known = model.get(&(parent, key)).copied();
            if parent == root || model.values().any(|&node| node == parent) {
                assert_eq!(tree.child(parent, &key), known, "{parent} {key:?}");
            }
        }
        assert!(tree.collided && model.len() > 20, "{} nodes", model.len());
    }
}
