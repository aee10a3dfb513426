//! Prompts in prefill, by salt: those whose first token has not been generated yet.
//!
//! A prompt is only compared with prompts of the same salt, and with most of them only in one block: another
//! prompt is worth waiting for only if it has the same first block after the part that is already computed. So
//! branches whose trunk is already computed differ in the first comparison.
use crate::sessions::id::SessionId;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// A prompt in prefill. `done` is dropped when the prefill has ended, which wakes waiting receivers.
struct Computing {
    prompt: Arc<[u32]>,
    done: watch::Sender<()>,
}

#[derive(Default)]
pub(super) struct PrefillsInProgress {
    by_salt: BTreeMap<Arc<str>, BTreeMap<SessionId, Computing>>,
    /// Number of tokens compared.
    #[cfg(test)]
    n_compared: std::cell::Cell<usize>,
}

impl PrefillsInProgress {
    /// Registers that `id` is computing `prompt`.
    pub fn begin(&mut self, salt: &Arc<str>, id: SessionId, prompt: Arc<[u32]>) {
        let computing = Computing { prompt, done: watch::Sender::new(()) };
        self.by_salt.entry(salt.clone()).or_default().insert(id, computing);
    }

    /// Removes the entry of `id`, if it has one.
    pub fn done(&mut self, salt: &Arc<str>, id: SessionId) {
        let Some(those) = self.by_salt.get_mut(salt) else { return };
        those.remove(&id);
        if those.is_empty() {
            self.by_salt.remove(salt);
        }
    }

    /// Finds the session that computes the longest prefix of `prompt`, if it is longer than `computed` tokens.
    /// Returns the length of that prefix in tokens (whole blocks), and a receiver that fails when the prefill
    /// has ended.
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

    /// Length in tokens of the common prefix in whole blocks, if it is more than `most`.
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

    /// Naive version: compares with every prompt, token by token.
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
            let (mut prefills, mut all) = (PrefillsInProgress::default(), Vec::new());
            // A small vocabulary, so that many prefixes are equal.
            let prompt = |draw: &mut Draw| -> Vec<u32> {
                let (n, parts) = (1 + draw.below(60), draw.below(50));
                (0..n).map(|i| if i < parts { 7 } else { draw.below(2) as u32 }).collect()
            };
            for step in 0..60 {
                let salt = draw.below(2);
                let tokens = prompt(&mut draw);
                let computed = draw.below(tokens.len() + 1);
                let found = prefills.best(&salts[salt], &tokens, computed, block).map(|(found, _)| found);
                assert_eq!(found, slowly(&all, salt, &tokens, computed, block), "seed {seed}, step {step}");
                waits += usize::from(found.is_some());
                match draw.below(3) {
                    0 if !all.is_empty() => {
                        let id = SessionId(draw.below(all.len()) as u128);
                        let (salt, tokens): &mut (usize, Vec<u32>) = &mut all[id.0 as usize];
                        prefills.done(&salts[*salt], id);
                        tokens.clear();
                    }
                    _ => {
                        prefills.begin(&salts[salt], SessionId(all.len() as u128), tokens.clone().into());
                        all.push((salt, tokens));
                    }
                }
            }
        }
        assert!(waits > 1000, "{waits}");
    }

    /// Starts many branches of a long, already computed trunk at once: each pair compares at most one block.
    #[test]
    fn branches_part_at_once() {
        const TRUNK: usize = 32 << 10;
        let (salt, other): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let mut prefills = PrefillsInProgress::default();
        for id in 0..256 {
            let prompt: Arc<[u32]> = (0..TRUNK as u32).chain([1_000_000 + id; 20]).collect();
            assert!(prefills.best(&salt, &prompt, TRUNK, 16).is_none());
            prefills.begin(&salt, SessionId(id.into()), prompt.clone());
            prefills.begin(&other, SessionId(id.into()), prompt);
        }
        let compared = prefills.n_compared.get();
        assert!(compared <= 256 * 255 / 2 * 16, "{compared} tokens compared");
    }
}
