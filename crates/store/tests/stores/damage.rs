//! Damaged bytes are misses: nothing of them is reused.
use crate::reference::{self, block};
use kvist_store::{
    BlockKey, BlockStore, BoxFuture, Bytes, Check, Damage, Frame, FrameStore, Framed, Opened, Ram, RamFrames,
    StoreError, Usage,
};
use kvist_testing::SplitMix64;
use pollster::block_on;
use std::time::{Duration, SystemTime};

/// One way to damage stored bytes. `other` is a whole frame of another key.
fn damage(random: &mut SplitMix64, stored: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = stored.to_vec();
    match random.below(8) {
        0..3 => bytes[random.index(stored.len())] ^= 1 << random.below(8),
        3 => bytes.truncate(random.index(stored.len())),
        4 => bytes.extend((0..1 + random.below(40)).map(|_| random.below(256) as u8)),
        5 => {
            // A run of zeros, as a file has it whose blocks were never written.
            let from = random.index(stored.len());
            let to = from + 1 + random.index(stored.len() - from);
            bytes[from..to].fill(0);
        }
        6 => bytes = other.to_vec(),
        _ => {
            // Torn: the front of this frame, the back of the other.
            let at = random.index(stored.len().min(other.len()));
            bytes.truncate(at);
            bytes.extend_from_slice(&other[at..]);
        }
    }
    bytes
}

/// Frames in RAM, checked as those on a disk are.
struct Blake3Frames(RamFrames);

impl FrameStore for Blake3Frames {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        self.0.lookup(keys, within)
    }
    fn read<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Frame>, StoreError>> {
        self.0.read(key)
    }
    fn write<'a>(
        &'a self,
        key: BlockKey,
        frame: Frame,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.0.write(key, frame, ttl)
    }
    fn delete<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        self.0.delete(key)
    }
    fn usage(&self) -> Usage {
        self.0.usage()
    }
}

#[test]
fn no_damaged_block_is_returned() {
    damaged_blocks_are_removed(&Ram::new(1 << 20));
    damaged_blocks_are_removed(&Framed::over(Blake3Frames(Ram::new(1 << 20).into_frames())));
}

fn damaged_blocks_are_removed<S: FrameStore>(store: &Framed<S>) {
    let mut random = SplitMix64(7);
    let keys = reference::keys(2);
    let check = store.frames().check();
    let mut unchanged = 0;
    for case in 0..100_000 {
        let body = block(&mut random, 200);
        let stored = Frame::new(&keys[0], body.clone(), None, check).to_bytes();
        let other = Frame::new(&keys[1], block(&mut random, 200), None, check).to_bytes();
        let bytes = damage(&mut random, &stored, &other);
        let same = bytes == stored[..];
        unchanged += u64::from(same);
        block_on(store.frames().write(keys[0], Frame::split(bytes.into()), None)).unwrap();
        let found = block_on(store.get(&keys[0])).unwrap();
        assert_eq!(found, same.then_some(body), "{check:?}, case {case}");
        assert_eq!(store.usage().entries, Some(same.into()), "case {case}: a damaged block is removed");
    }
    assert!(unchanged < 5_000, "{unchanged}");
    assert_eq!(store.counts().damaged, 100_000 - unchanged);
    assert_eq!(store.counts().misses, 100_000 - unchanged);
}

/// A frame that ends early is refused, also if zeros or an older frame of the same length follow there, as in a file of which not all
/// was written. `KVIST_FLIPS=100000` cuts more.
#[test]
fn cut_frames_are_refused() {
    let cuts = std::env::var("KVIST_FLIPS").map_or(2_000, |n| n.parse().expect("KVIST_FLIPS is a number"));
    let (mut random, keys) = (SplitMix64(17), reference::keys(1));
    let (now, mut n_refused) = (SystemTime::now(), 0);
    for cut in 0..cuts {
        let body = block(&mut random, if cut % 10 == 0 { 20_000 } else { 300 });
        // The older frame has the same key: only the hash tells them apart.
        let old: Bytes = body.iter().map(|byte| byte.wrapping_add(1)).collect::<Vec<u8>>().into();
        for check in [Check::Blake3, Check::Xxh3] {
            let stored = Frame::new(&keys[0], body.clone(), None, check).to_bytes();
            let old = Frame::new(&keys[0], old.clone(), None, check).to_bytes();
            // A third of the cuts is in the head, which is short.
            let at = random.index(if cut % 3 == 0 { Frame::HEAD_BYTES } else { stored.len() });
            let front = &stored[..at];
            let zeros = vec![0; stored.len() - at];
            for bytes in [front.to_vec(), [front, &zeros[..]].concat(), [front, &old[at..]].concat()] {
                if bytes[..] == stored[..] {
                    continue; // what is missing were zeros
                }
                let is_old = bytes[..] == old[..];
                let opened = Frame::split(bytes.into()).open(&keys[0], now, check);
                // The cut is before all that differs: this is the older frame, whole.
                match is_old {
                    true => assert!(
                        matches!(opened, Ok(Opened::Block(found)) if found[..] == old[Frame::HEAD_BYTES..])
                    ),
                    false => drop(opened.expect_err("a cut frame")),
                }
                n_refused += usize::from(!is_old);
            }
        }
    }
    println!("{cuts} cuts: {n_refused} frames refused");
    assert!(n_refused > cuts * 4, "{n_refused}");
}

/// Every bit of a frame is checked, and every length.
#[test]
fn every_bit_counts() {
    let keys = reference::keys(2);
    let (body, then) = (Bytes::from_static(b"K and V"), SystemTime::UNIX_EPOCH);
    for check in [Check::Blake3, Check::Xxh3] {
        let stored = Frame::new(&keys[0], body.clone(), Some(SystemTime::now()), check).to_bytes();
        for bit in 0..stored.len() * 8 {
            let mut bytes = stored.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            Frame::split(bytes.into()).open(&keys[0], then, check).unwrap_err();
        }
        for length in 0..stored.len() {
            Frame::split(stored.slice(..length)).open(&keys[0], then, check).unwrap_err();
        }
        Frame::split(stored.clone()).open(&keys[0], then, check).unwrap();
        let others = [Check::Blake3, Check::Xxh3].into_iter().filter(|other| *other != check);
        others.for_each(|other| {
            Frame::split(stored.clone()).open(&keys[0], then, other).unwrap_err();
        });
    }
}

#[test]
fn the_reason_is_named() {
    let keys = reference::keys(2);
    let stored = Frame::new(&keys[0], Bytes::from_static(b"K and V"), None, Check::Blake3).to_bytes();
    let with = |at: usize, byte: u8| {
        let mut bytes = stored.to_vec();
        bytes[at] = byte;
        bytes
    };
    let cases = [
        (stored[..40].to_vec(), Damage::Length),
        (stored[..stored.len() - 1].to_vec(), Damage::Length),
        ([&stored[..], b"."].concat(), Damage::Length),
        (with(0, b'k'), Damage::Magic),
        (vec![0; stored.len()], Damage::Magic),
        (with(4, 2), Damage::Version),
        (with(4, 0), Damage::Hash),
        (with(30, stored[30] ^ 1), Damage::Key),
        (with(stored.len() - 1, b'v'), Damage::Hash),
        (with(60, stored[60] ^ 1), Damage::Hash),
        (with(16, 1), Damage::Hash),
    ];
    for (bytes, damage) in cases {
        let frame = Frame::split(bytes.clone().into());
        assert_eq!(frame.open(&keys[0], SystemTime::now(), Check::Blake3), Err(damage), "{bytes:?}");
    }
    assert_eq!(Frame::split(stored).open(&keys[1], SystemTime::now(), Check::Blake3), Err(Damage::Key));
}
