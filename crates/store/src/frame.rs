//! The frame around every stored block: what proves that bytes are those that were put.
//!
//! ```text
//! bytes  0..4   "KVSB"
//!        4..8   version, u32           all numbers are little-endian
//!        8..16  length of the body, u64
//!       16..24  when it expires, u64: milliseconds since 1970, or 0 for never
//!       24..56  the block's key
//!       56..88  the hash of bytes 0..56 and the body: BLAKE3, or another Check
//!       88..    the body: the block's bytes
//! ```
use crate::BlockKey;
use bytes::Bytes;
use std::time::{Duration, SystemTime};
use twox_hash::{XxHash3_64, XxHash3_128};

const MAGIC: &[u8; 4] = b"KVSB";
const VERSION: u32 = 1;
const HASHED: usize = 56;

/// A block with its frame. Head and body are separate, so that framing copies no block; a store that reads them as
/// one run of bytes returns them by [`Frame::split`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub head: Bytes,
    pub body: Bytes,
}

/// The hash of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Check {
    /// Some GB/s per core. Of frames that leave the process.
    #[default]
    Blake3,
    /// 128 bits, several times as fast: of frames that stay in this process's memory, where a bit may flip but nothing else has
    /// written.
    Xxh3,
}

impl Check {
    fn hash(self, head: &[u8], body: &[u8]) -> [u8; 32] {
        match self {
            Check::Blake3 => *blake3::Hasher::new().update(head).update(body).finalize().as_bytes(),
            Check::Xxh3 => {
                let head = XxHash3_64::oneshot(head);
                let mut hash = [0; 32];
                hash[..16].copy_from_slice(&XxHash3_128::oneshot_with_seed(head, body).to_le_bytes());
                hash
            }
        }
    }
}

/// Why stored bytes are not the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Damage {
    /// Shorter or longer than the frame says, or too short for a frame.
    Length,
    /// The bytes do not begin as a frame does.
    Magic,
    /// A newer kvist wrote it.
    Version,
    /// A whole frame, of another key.
    Key,
    /// The hash does not match.
    Hash,
}

/// What a frame that is not damaged contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    Block(Bytes),
    /// Its time was over.
    Expired,
}

impl Frame {
    pub const HEAD_BYTES: usize = 88;

    /// Surrounds `body`, which is hashed: about 1 ms for 4 MB with BLAKE3.
    pub fn new(key: &BlockKey, body: Bytes, expires: Option<SystemTime>, check: Check) -> Self {
        let mut head = Vec::with_capacity(Self::HEAD_BYTES);
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&(body.len() as u64).to_le_bytes());
        head.extend_from_slice(&expires.map_or(0, milliseconds).to_le_bytes());
        head.extend_from_slice(key.as_bytes());
        let hash = check.hash(&head, &body);
        head.extend_from_slice(&hash);
        Frame { head: head.into(), body }
    }

    /// Takes stored bytes apart, whatever they are; [`open`](Self::open) judges them.
    pub fn split(mut stored: Bytes) -> Self {
        let head = stored.split_to(Self::HEAD_BYTES.min(stored.len()));
        Frame { head, body: stored }
    }

    /// Head and body together.
    pub fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Head and body in one run of bytes. Copies the block.
    pub fn to_bytes(&self) -> Bytes {
        [&self.head[..], &self.body[..]].concat().into()
    }

    /// When the block expires, if it is a frame and says so. Not checked: a flipped bit may have changed it.
    pub fn expires(&self) -> Option<SystemTime> {
        match u64::from_le_bytes(self.head.get(16..24)?.try_into().ok()?) {
            0 => None,
            at => SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(at)),
        }
    }

    /// Returns the block that was put under `key`, if these are its bytes to the bit.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn open(&self, key: &BlockKey, now: SystemTime, check: Check) -> Result<Opened, Damage> {
        let head: &[u8; Self::HEAD_BYTES] = self.head[..].try_into().map_err(|_| Damage::Length)?;
        if &head[..4] != MAGIC {
            return Err(Damage::Magic);
        }
        match u32::from_le_bytes([head[4], head[5], head[6], head[7]]) {
            VERSION => {}
            version if version > VERSION => return Err(Damage::Version),
            _ => return Err(Damage::Hash), // no such version was ever written
        }
        if head[8..16] != (self.body.len() as u64).to_le_bytes() {
            return Err(Damage::Length);
        }
        if &head[24..HASHED] != key.as_bytes() {
            return Err(Damage::Key);
        }
        if head[HASHED..] != check.hash(&head[..HASHED], &self.body) {
            return Err(Damage::Hash);
        }
        match self.expires() {
            Some(at) if at <= now => Ok(Opened::Expired),
            _ => Ok(Opened::Block(self.body.clone())),
        }
    }
}

/// Never 0, which means "never expires".
fn milliseconds(at: SystemTime) -> u64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1)
}
