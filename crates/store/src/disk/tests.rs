//! Which blocks a disk store has, and which it writes again when they are read: [`Regions`] says so, for the simulator too.
use super::*;
use crate::KeyChain;
use kvist_testing::SplitMix64;
use std::collections::BTreeMap;
use std::time::Instant;

const BODY_BYTES: u64 = 8_000;

/// Of regions so small that a test can fill many of them.
async fn open(dir: &Path, n: u64) -> (DiskFrames, Regions) {
    let options = DiskOptions {
        dir: dir.into(),
        capacity_bytes: 8 * REGION_BYTES,
        largest_block_bytes: BODY_BYTES,
        limits: Limits::default(),
    };
    let mut prepared = prepare(&options).unwrap();
    prepared.layout = Layout { regions: n, region_bytes: 16 * PAGE, buffer_bytes: 16 * PAGE };
    let regions = Regions { n, bytes: 16 * PAGE };
    (DiskFrames::open_prepared(options, prepared).await.unwrap(), regions)
}

/// A list of what was written where.
struct Twin {
    regions: Regions,
    /// The place of each block, among all that were written.
    places: BTreeMap<usize, u64>,
    n_written: u64,
}

impl Twin {
    fn region(&self, place: u64) -> u64 {
        place / self.regions.blocks_each(BODY_BYTES)
    }

    fn current(&self) -> u64 {
        self.region(self.n_written.saturating_sub(1))
    }

    fn write(&mut self, block: usize) {
        self.places.insert(block, self.n_written);
        self.n_written += 1;
    }

    fn has(&self, block: usize) -> bool {
        let first = self.regions.first(self.current());
        self.places.get(&block).is_some_and(|place| self.region(*place) >= first)
    }

    fn is_old(&self, block: usize) -> bool {
        self.has(block) && self.regions.is_old(self.region(self.places[&block]), self.current())
    }
}

/// foyer counts the region that it empties as one of those that are old. So with its default of a tenth, no region of a disk of less than
/// 20 was old, and what was used went with all else.
#[tokio::test]
async fn what_is_read_from_the_next_regions_to_go_is_written_again() {
    let mut chain = KeyChain::root(b"regions", "");
    let keys: Vec<BlockKey> = (0..10_000).map(|token| chain.next(&[token])).collect();
    let frame = |block: usize| Frame {
        head: vec![1; Frame::HEAD_BYTES].into(),
        body: vec![block as u8; BODY_BYTES as usize].into(),
    };
    for (n, seed) in [(8, 1), (11, 2), (19, 3), (20, 4), (31, 5), (50, 6)] {
        let dir = tempfile::tempdir().unwrap();
        let (store, regions) = open(dir.path(), n).await;
        let mut twin = Twin { regions, places: BTreeMap::new(), n_written: 0 };
        let mut random = SplitMix64(seed);
        let (mut n_new, mut n_again, mut n_gone) = (0, 0, 0);
        // They are read more often than two regions are written. They are not in the first region of all, which goes when foyer marks for
        // the first time.
        let each = regions.blocks_each(BODY_BYTES) as usize;
        let hot = each..each + 3;
        let mut hot_at = hot.end as u64;
        while n_new < 2 * n as usize * each + 200 {
            let reads = if twin.n_written >= hot_at + 5 {
                hot.clone().collect()
            } else if n_new > 0 && random.below(4) == 0 {
                vec![random.index(n_new)]
            } else {
                store.write(keys[n_new], frame(n_new)).await.unwrap();
                twin.write(n_new);
                n_new += 1;
                Vec::new()
            };
            // A region is emptied when the next one begins, by a task of its own.
            let until = Instant::now() + Duration::from_secs(120);
            while (0..n_new).any(|block| store.is_in_regions(&keys[block]) && !twin.has(block)) {
                assert!(Instant::now() < until, "{n} regions: blocks stay that should be gone");
                tokio::task::yield_now().await;
            }
            for block in reads {
                assert_eq!(
                    store.is_in_regions(&keys[block]),
                    twin.has(block),
                    "{n} regions, block {block} of {n_new}"
                );
                let load = store.cache.storage().load(&Key(*keys[block].as_bytes())).await.unwrap();
                let age = match load {
                    Load::Entry { populated, .. } => Some(populated.age),
                    _ => None,
                };
                let expected = twin.has(block).then_some(match twin.is_old(block) {
                    true => Age::Old,
                    false => Age::Young,
                });
                assert_eq!(age, expected, "{n} regions, block {block} of {n_new}");
                let read = store.read(&keys[block]).await.unwrap();
                assert_eq!(read, twin.has(block).then(|| frame(block)));
                store.cache.storage().wait().await;
                match twin.is_old(block) {
                    true => {
                        twin.write(block);
                        n_again += 1;
                    }
                    false => n_gone += usize::from(!twin.has(block)),
                }
                if hot.contains(&block) {
                    hot_at = twin.n_written;
                }
            }
        }
        assert!(n_again > 10 && n_gone > 10, "{n} regions: {n_again} written again, {n_gone} gone");
        for block in hot {
            assert!(store.is_in_regions(&keys[block]), "{n} regions: {block} was used, and is gone");
        }
    }
}

/// A read may take its block from the files, then a put writes a newer one, and then the read writes its own again: what was put was
/// lost.
#[tokio::test]
async fn what_is_put_while_a_block_is_read_stays() {
    let key = KeyChain::root(b"reads", "").next(&[1]);
    let frame =
        |n: u8| Frame { head: vec![1; Frame::HEAD_BYTES].into(), body: vec![n; BODY_BYTES as usize].into() };
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path(), 8).await;
    let again = async |reading: &Reading<'_>, n: u8| {
        store.enqueue_again(reading, frame(n));
        store.cache.storage().wait().await;
    };
    store.write(key, frame(1)).await.unwrap();

    let reading = store.reads.begin(&key);
    store.write(key, frame(2)).await.unwrap();
    again(&reading, 1).await;
    assert_eq!(store.read(&key).await.unwrap(), Some(frame(2)));
    drop(reading);

    // Where nothing changes, it is written again.
    let reading = store.reads.begin(&key);
    again(&reading, 3).await;
    assert_eq!(store.read(&key).await.unwrap(), Some(frame(3)));

    // A removal is seen even if the block has been put again meanwhile, so that it is not among those that were removed.
    store.delete(&key).await.unwrap();
    store.write(key, frame(4)).await.unwrap();
    again(&reading, 3).await;
    assert_eq!(store.read(&key).await.unwrap(), Some(frame(4)));
}
