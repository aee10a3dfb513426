//! Names of blocks by their content.
use std::fmt;

// Different contexts make BLAKE3 different functions, so a root is never the key of a block. They contain the
// version of the frame: versions that write other frames do not share keys, and so do not remove each other's.
const ROOT: &str = "kvist block store, version 1, root of a chain";
const PART: &str = "kvist block store, version 1, part of a block";
const BLOCK: &str = "kvist block store, version 1, key of a block";
const NOTE: &str = "kvist block store, version 1, note of a salt";

/// The content key of a block: a BLAKE3 hash of what its K and V depend on. These are the model, the storage, the
/// layout, the salt and all tokens up to the block's end. It is the same in every process and after every restart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey([u8; 32]);

impl BlockKey {
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        BlockKey(bytes)
    }

    /// The key of an object that is no block, by what it belongs to. `context` names the kind of object and the version of its format:
    /// BLAKE3 makes another function of each, so objects of different kinds never share a key.
    pub fn of_object(context: &str, parts: &[&[u8]]) -> BlockKey {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        for part in parts {
            // Lengths in front, so that no two lists have the same bytes.
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        BlockKey(*hasher.finalize().as_bytes())
    }

    /// The key of a part of the block that is stored on its own: that of a layer group with a sliding window.
    pub fn part(&self, part: u32) -> BlockKey {
        let mut hasher = blake3::Hasher::new_derive_key(PART);
        hasher.update(&self.0).update(&part.to_le_bytes());
        BlockKey(*hasher.finalize().as_bytes())
    }
}

impl fmt::Display for BlockKey {
    /// 64 hexadecimal digits: a name for a file, or for an entry of a server.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({self})")
    }
}

/// The keys of a text's blocks, one after the other: each covers its block's tokens and, through its parent, all
/// tokens before.
///
/// ```
/// use kvist_store::KeyChain;
/// let mut chain = KeyChain::root(b"model, storage and layout", "");
/// let first = chain.next(&[1, 2, 3, 4]);
/// let mut other = KeyChain::root(b"model, storage and layout", "");
/// assert_eq!(other.next(&[1, 2, 3, 4]), first);
/// assert_ne!(other.next(&[1, 2, 3, 4]), first); // the same tokens, further on in a text
/// ```
#[derive(Clone, Debug)]
pub struct KeyChain {
    parent: BlockKey,
}

impl KeyChain {
    /// The start of every text. `fingerprint` identifies whatever else K and V depend on: weights, architecture,
    /// storage of K and V, layout of a block's bytes, instruction set. Texts with different salts share no block.
    pub fn root(fingerprint: &[u8], salt: &str) -> Self {
        Self::root_of(fingerprint, salt, 0)
    }

    /// The same for a generation of the salt, of which 0 is the first: texts of different generations share no block. To begin a
    /// new one hides all blocks of a salt, also from stores that cannot list them.
    pub fn root_of(fingerprint: &[u8], salt: &str, generation: u64) -> Self {
        let mut hasher = of_salt(ROOT, fingerprint, salt);
        if generation > 0 {
            hasher.update(&generation.to_le_bytes());
        }
        KeyChain { parent: BlockKey(*hasher.finalize().as_bytes()) }
    }

    /// Where the generation of a salt is noted: the key of no block.
    pub fn note(fingerprint: &[u8], salt: &str) -> BlockKey {
        BlockKey(*of_salt(NOTE, fingerprint, salt).finalize().as_bytes())
    }

    /// Goes on after the block `parent`.
    pub fn after(parent: BlockKey) -> Self {
        KeyChain { parent }
    }

    /// The key of the next block, which holds `tokens`.
    pub fn next(&mut self, tokens: &[u32]) -> BlockKey {
        let mut hasher = blake3::Hasher::new_derive_key(BLOCK);
        hasher.update(&self.parent.0);
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        self.parent = BlockKey(*hasher.finalize().as_bytes());
        self.parent
    }

    /// The keys of all full blocks of `tokens`. A rest that does not fill a block has none.
    pub fn keys(&mut self, tokens: &[u32], block_tokens: usize) -> Vec<BlockKey> {
        tokens.chunks_exact(block_tokens.max(1)).map(|block| self.next(block)).collect()
    }
}

fn of_salt(context: &str, fingerprint: &[u8], salt: &str) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new_derive_key(context);
    // Lengths in front, so that no two pairs have the same bytes.
    hasher.update(&(fingerprint.len() as u64).to_le_bytes()).update(fingerprint);
    hasher.update(&(salt.len() as u64).to_le_bytes()).update(salt.as_bytes());
    hasher
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn keys_are_those_of_every_other_build() {
        // A change here loses every stored block: change the contexts above too.
        let mut chain = KeyChain::root(b"fingerprint", "salt");
        let keys = chain.keys(&[1, 2, 3, 4, 5], 2);
        assert_eq!(keys.len(), 2);
        // By the Python package blake3, from the description of the keys.
        assert_eq!(keys[1].to_string(), "217d9bfce54da32336d5f5ff91ed18cb5e1b5b615d309fe8d2ea7bdd4a846a2f");
    }

    #[test]
    fn parts_of_blocks_have_keys_of_their_own() {
        let keys = KeyChain::root(b"", "").keys(&[1, 2], 1);
        let all = keys.iter().flat_map(|key| [*key, key.part(0), key.part(1)]);
        assert_eq!(all.collect::<HashSet<_>>().len(), 6);
    }

    #[test]
    fn every_part_counts() {
        let key = |fingerprint: &str, salt: &str, blocks: &[&[u32]]| {
            let mut chain = KeyChain::root(fingerprint.as_bytes(), salt);
            blocks.iter().fold(chain.parent, |_, tokens| chain.next(tokens))
        };
        let keys = [
            key("m", "", &[]),
            key("m", "", &[&[]]),
            key("m", "", &[&[1, 2]]),
            key("m", "", &[&[1], &[2]]),
            key("m", "", &[&[2, 1]]),
            key("m", "", &[&[0], &[1, 2]]),
            key("n", "", &[&[1, 2]]),
            key("m", "s", &[&[1, 2]]),
            key("ms", "", &[&[1, 2]]),
            key("", "ms", &[&[1, 2]]),
        ];
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len(), "{keys:?}");
    }

    #[test]
    fn generations_and_notes_have_keys_of_their_own() {
        let mut keys: Vec<BlockKey> = [0, 1, 2].map(|n| KeyChain::root_of(b"m", "s", n).next(&[1])).into();
        assert_eq!(keys[0], KeyChain::root(b"m", "s").next(&[1]));
        keys.extend([0, 1, 2].map(|n| KeyChain::root_of(b"m", "s", n).parent));
        keys.extend(["", "s"].map(|salt| KeyChain::note(b"m", salt)));
        keys.push(KeyChain::note(b"n", "s"));
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len(), "{keys:?}");
    }

    #[test]
    fn objects_have_keys_by_kind_and_by_every_part() {
        let lists: [&[&[u8]]; 5] = [&[], &[b""], &[b"ab"], &[b"a", b"b"], &[b"", b"ab"]];
        let keys = ["one", "two"].iter().flat_map(|kind| lists.map(|parts| BlockKey::of_object(kind, parts)));
        assert_eq!(keys.collect::<HashSet<_>>().len(), 10);
    }

    #[test]
    fn a_chain_goes_on_after_any_of_its_keys() {
        let mut chain = KeyChain::root(b"m", "");
        let keys = chain.keys(&[1, 2, 3, 4, 5, 6], 2);
        assert_eq!(KeyChain::after(keys[0]).keys(&[3, 4, 5, 6], 2), keys[1..]);
    }
}
