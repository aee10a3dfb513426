//! Prompts that are being computed, by salt: those whose first token has not come yet.
//!
//! A prompt is compared with those of its own salt alone, and with most of them in one block: to be worth waiting for,
//! another must have the block behind what was computed already. So branches that have their trunk part at once.
use super::SessionId;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// A prompt. `done` is dropped when it has been computed or will not be, and receivers that wait hear that.
struct Computing {
    prompt: Arc<[u32]>,
    done: watch::Sender<()>,
}

#[derive(Default)]
pub(super) struct Ahead {
    by_salt: BTreeMap<Arc<str>, BTreeMap<SessionId, Computing>>,
    /// Tokens that were compared.
    #[cfg(test)]
    n_compared: std::cell::Cell<usize>,
}

impl Ahead {
    /// `id` computes it now.
    pub fn begin(&mut self, salt: &Arc<str>, id: SessionId, prompt: Arc<[u32]>) {
        let computing = Computing { prompt, done: watch::Sender::new(()) };
        self.by_salt.entry(salt.clone()).or_default().insert(id, computing);
    }

    /// `id` computes nothing any more, if it did.
    pub fn done(&mut self, salt: &Arc<str>, id: SessionId) {
        let Some(those) = self.by_salt.get_mut(salt) else { return };
        those.remove(&id);
        if those.is_empty() {
            self.by_salt.remove(salt);
        }
    }

    /// The session that computes most of `prompt`, if that is more than its first `computed` tokens: how many tokens will be
    /// found, in whole blocks, and a receiver that fails when it is done.
    pub fn best(
        &self,
        salt: &str,
        prompt: &[u32],
        computed: usize,
        block: usize,
    ) -> Option<(usize, watch::Receiver<()>)> {
        let (mut most, mut best) = (computed, None);
        for other in self.by_salt.get(salt).into_iter().flat_map(BTreeMap::values) {
            if let Some(found) = self.found(&other.prompt, prompt, most, block) {
                (most, best) = (found, Some(&other.done));
            }
        }
        best.map(|done| (most, done.subscribe()))
    }

    /// Tokens in whole blocks that both begin with, if that is more than `most`.
    fn found(&self, a: &[u32], b: &[u32], most: usize, block: usize) -> Option<usize> {
        let next = most / block * block;
        let ends = next.checked_add(block)?;
        let same = |from: usize, to: usize| {
            #[cfg(test)]
            self.n_compared.update(|n| n + to - from);
            a.get(from..to).zip(b.get(from..to)).is_some_and(|(a, b)| a == b)
        };
        if !same(next, ends) || !same(0, next) {
            return None;
        }
        let mut found = ends;
        while same(found, found + block) {
            found += block;
        }
        Some(found)
    }

    #[cfg(test)]
    pub fn all(&self) -> impl Iterator<Item = (Arc<str>, SessionId)> + '_ {
        self.by_salt.iter().flat_map(|(salt, those)| those.keys().map(|id| (salt.clone(), *id)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Draw(u64);

    impl Draw {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as usize % n
        }
    }

    /// Token by token, with everybody.
    fn slowly(
        all: &[(usize, Vec<u32>)],
        salt: usize,
        prompt: &[u32],
        computed: usize,
        block: usize,
    ) -> Option<usize> {
        let found = all.iter().filter(|(of, _)| *of == salt).map(|(_, other)| {
            let same = other.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            same - same % block
        });
        found.max().filter(|found| *found > computed)
    }

    #[test]
    fn the_best_and_the_best_token_by_token() {
        let salts: [Arc<str>; 2] = ["a".into(), "b".into()];
        let mut waits = 0;
        for seed in 0..200 {
            let mut draw = Draw(seed);
            let block = [1, 3, 4, 16][draw.below(4)];
            let (mut ahead, mut all) = (Ahead::default(), Vec::new());
            // Few tokens, so that many beginnings are the same.
            let prompt = |draw: &mut Draw| -> Vec<u32> {
                let (n, parts) = (1 + draw.below(60), draw.below(50));
                (0..n).map(|i| if i < parts { 7 } else { draw.below(2) as u32 }).collect()
            };
            for step in 0..60 {
                let salt = draw.below(2);
                let tokens = prompt(&mut draw);
                let computed = draw.below(tokens.len() + 1);
                let found = ahead.best(&salts[salt], &tokens, computed, block).map(|(found, _)| found);
                assert_eq!(found, slowly(&all, salt, &tokens, computed, block), "seed {seed}, step {step}");
                waits += usize::from(found.is_some());
                match draw.below(3) {
                    0 if !all.is_empty() => {
                        let id = SessionId(draw.below(all.len()) as u128);
                        let (salt, tokens): &mut (usize, Vec<u32>) = &mut all[id.0 as usize];
                        ahead.done(&salts[*salt], id);
                        tokens.clear();
                    }
                    _ => {
                        ahead.begin(&salts[salt], SessionId(all.len() as u128), tokens.clone().into());
                        all.push((salt, tokens));
                    }
                }
            }
        }
        assert!(waits > 1000, "{waits}");
    }

    /// Many branches of a long trunk that is there, set going at once: each pair takes a block at most.
    #[test]
    fn branches_part_at_once() {
        const TRUNK: usize = 32 << 10;
        let (salt, other): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let mut ahead = Ahead::default();
        for id in 0..256 {
            let prompt: Arc<[u32]> = (0..TRUNK as u32).chain([1_000_000 + id; 20]).collect();
            assert!(ahead.best(&salt, &prompt, TRUNK, 16).is_none());
            ahead.begin(&salt, SessionId(id.into()), prompt.clone());
            ahead.begin(&other, SessionId(id.into()), prompt);
        }
        let compared = ahead.n_compared.get();
        assert!(compared <= 256 * 255 / 2 * 16, "{compared} tokens compared");
    }
}
