//! The blocks that one worker was sent, up to a bound; those that were sent least recently are forgotten first.
use ahash::HashMap;

/// 16 bytes per block in a list, and 34 in a table that is half full: 13 MB for 2^22 tokens in blocks of 16.
#[derive(Default)]
pub(super) struct History {
    /// A ring: after the newest comes the oldest.
    nodes: Vec<Node>,
    /// Place in `nodes`.
    oldest: u32,
    /// The place of each hash. Used for lookups only.
    places: HashMap<u64, u32>,
}

#[derive(Clone, Copy)]
struct Node {
    hash: u64,
    older: u32,
    newer: u32,
}

impl History {
    /// A block is sent. It is the newest from now on. Returns whether it was not remembered, and which block is forgotten
    /// for it, as no more than `most` (at least 1) are remembered.
    pub fn sent(&mut self, hash: u64, most: usize) -> (bool, Option<u64>) {
        if let Some(&place) = self.places.get(&hash) {
            self.renew(place);
            return (false, None);
        }
        if self.nodes.len() < most {
            let place = self.nodes.len() as u32;
            self.nodes.push(Node { hash, older: place, newer: place });
            self.places.insert(hash, place);
            self.make_newest(place);
            return (true, None);
        }
        // The oldest block's node becomes the new block's, and the ring turns by one.
        let place = self.oldest;
        let node = &mut self.nodes[place as usize];
        let forgotten = std::mem::replace(&mut node.hash, hash);
        self.oldest = node.newer;
        self.places.remove(&forgotten);
        self.places.insert(hash, place);
        (true, Some(forgotten))
    }

    fn renew(&mut self, place: u32) {
        let Node { older, newer, .. } = self.nodes[place as usize];
        if place == self.oldest {
            self.oldest = newer;
            return;
        }
        self.nodes[older as usize].newer = newer;
        self.nodes[newer as usize].older = older;
        self.make_newest(place);
    }

    /// Puts a node that is in no ring, or alone in one, between the newest and the oldest.
    fn make_newest(&mut self, place: u32) {
        let oldest = self.oldest;
        let newest = self.nodes[oldest as usize].older;
        (self.nodes[place as usize].older, self.nodes[place as usize].newer) = (newest, oldest);
        self.nodes[newest as usize].newer = place;
        self.nodes[oldest as usize].older = place;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;

    /// Compared with a list, the oldest first.
    #[test]
    fn the_oldest_is_forgotten() {
        let mut random = SplitMix64(12);
        let mut forgotten = 0;
        for most in [1, 2, 3, 10, 50] {
            let (mut history, mut list) = (History::default(), Vec::new());
            for _ in 0..5000 {
                let hash = u64::from(random.below(60));
                let is_new = !list.contains(&hash);
                list.retain(|other| *other != hash);
                list.push(hash);
                let oldest = (list.len() > most).then(|| list.remove(0));
                assert_eq!(history.sent(hash, most), (is_new, oldest), "of {most}: {list:?}");
                forgotten += u32::from(oldest.is_some());
            }
        }
        assert!(forgotten > 1000, "{forgotten}");
    }
}
