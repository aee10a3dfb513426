//! What the prefix index must find and evict, by ranking and comparing all blocks again.
use super::drive::{COST, Drive, HALF_LIFE_NS, Known};
use std::collections::BTreeSet;

impl Drive {
    /// What this drive's policy prefers to keep: its value, and the tie-breaker.
    pub(super) fn worth(&self, known: &Known) -> (f64, u64) {
        let policy = &self.spec.prefix.as_ref().expect("an index").policy;
        let (last_use, block) = (known.uses.last().expect("it was stored").1, f64::from(self.block()));
        let decayed = || -> f64 {
            let age = |&(at, _): &(u64, u64)| (self.now_ns - at) as f64 / HALF_LIFE_NS as f64;
            known.uses.iter().map(|at| 0.5_f64.powf(age(at))).sum()
        };
        // Token by token: position p sees p + 1 positions.
        let cost = || -> f64 {
            let first = f64::from(known.n_blocks - 1) * block;
            (0..self.block()).map(|i| COST.per_token + COST.per_pair * (first + f64::from(i) + 1.0)).sum()
        };
        match &**policy {
            "lru" => (known.evictable_since as f64, 0),
            "fifo" => (known.uses[0].1 as f64, 0),
            "lfu" => (known.uses.len() as f64, last_use),
            "lfu_decay" => (decayed(), last_use),
            "cost" => (cost() * decayed(), last_use),
            _ => panic!("no model of {policy}: add one"),
        }
    }

    /// Checks an eviction for `n_tokens`, by ranking every block again before each eviction. `removed` is what was
    /// really evicted.
    pub(super) fn evict_until_free(&mut self, n_tokens: u32, removed: &[(usize, u32)]) {
        let mut removed = removed.iter().copied().peekable();
        for g in 0..self.spec.groups.len() {
            let (in_use, mut round) = (self.in_use(g), BTreeSet::new());
            loop {
                let used: BTreeSet<u32> = in_use.keys().chain(self.known[g].keys()).copied().collect();
                let free = self.spec.groups[g].capacity_tokens / self.block() - used.len() as u32;
                let evictable: Vec<&Known> =
                    self.known[g].iter().filter(|(at, _)| !in_use.contains_key(at)).map(|(_, k)| k).collect();
                if free * self.block() >= n_tokens || evictable.is_empty() {
                    break;
                }
                let is_leaf = |known: &&&Known| self.known[g].values().all(|k| k.parent != known.prefix);
                let lowest = |known: &&&Known| {
                    evictable.iter().all(|other| {
                        other.prefix == known.prefix || !self.prefixes.begins(other.prefix, known.prefix)
                    })
                };
                let mut candidates: Vec<&Known> = match self.is_windowed(g) {
                    true => evictable.clone(),
                    false => evictable.iter().filter(is_leaf).copied().collect(),
                };
                // All evictable blocks have blocks below them that sequences use as their own copies, or exports. The
                // lowest ones go in rounds: those that become the lowest wait for the next round.
                if candidates.is_empty() {
                    round.retain(|prefix| evictable.iter().any(|known| known.prefix == *prefix));
                    if round.is_empty() {
                        round.extend(evictable.iter().filter(lowest).map(|known| known.prefix));
                    }
                    candidates =
                        evictable.iter().filter(|known| round.contains(&known.prefix)).copied().collect();
                }
                let worths = candidates.iter().map(|known| self.worth(known));
                let min =
                    worths.min_by(|a, b| a.partial_cmp(b).expect("no NaN")).expect("some are evictable");
                // The first removed block is the victim, or lies below it, or is the same prefix in an earlier group.
                let &(first_g, first_at) =
                    removed.peek().expect("evictable blocks are kept, and space is needed");
                let first = &self.known[first_g][&first_at];
                let is_it = |known: &&&Known| match self.is_windowed(g) {
                    true => first_g == g && first.prefix == known.prefix,
                    false => self.prefixes.begins(first.prefix, known.prefix),
                };
                let victim = candidates.iter().find(is_it);
                let victim = victim.unwrap_or_else(|| panic!("{first:?} is none of {candidates:?}"));
                let (worth, tie) = self.worth(victim);
                // Computations by logarithms and by powers differ in their last digits.
                let decays = self.spec.prefix.as_ref().is_some_and(|p| p.parameters.half_life.is_some());
                let close = decays && worth <= min.0 * (1.0 + 1e-9);
                assert!((worth, tie) == min || close, "{victim:?} of {worth} goes before {min:?}");
                // What is dropped with it: all blocks of the prefix and below it, in every group.
                let prefix = victim.prefix;
                let goes = |h: usize, known: &Known| match self.is_windowed(g) {
                    true => h == g && known.prefix == prefix,
                    false => self.prefixes.begins(known.prefix, prefix),
                };
                let all = self.known.iter().enumerate().flat_map(|(h, known)| {
                    let gone = known.iter().filter(move |(_, known)| goes(h, known));
                    gone.map(move |(&at, _)| (h, at))
                });
                let all: BTreeSet<(usize, u32)> = all.collect();
                let went: Vec<(usize, u32)> = removed.by_ref().take(all.len()).collect();
                assert_eq!(went.iter().copied().collect::<BTreeSet<_>>(), all, "what goes with {prefix}");
                for (h, at) in went {
                    let gone = self.known[h].remove(&at).expect("it was known");
                    let child = self.known[h].values().find(|known| known.parent == gone.prefix);
                    assert!(
                        self.is_windowed(h) || child.is_none(),
                        "{gone:?} is evicted before its child {child:?}"
                    );
                }
            }
        }
        assert_eq!(removed.next(), None, "more was evicted than space was needed");
    }

    pub(super) fn knows(&self, g: usize, prefix: u64) -> bool {
        self.known[g].values().any(|known| known.prefix == prefix)
    }

    /// The largest hit, found by checking every length against the rule.
    pub(super) fn hit(&mut self, salt: &'static str, tokens: &[u32]) -> u32 {
        let block = self.block();
        let prefix_at: Vec<u64> = (1..=tokens.len() as u32 / block)
            .map(|n| self.prefixes.number(salt, &tokens[..(n * block) as usize]))
            .collect();
        let last = (tokens.len() as u32).saturating_sub(1) / block;
        let fits = |n: u32| {
            (0..self.spec.groups.len()).all(|g| {
                let see = self.spec.groups[g].visibility;
                // Blocks with a position that the next query sees.
                (0..n).all(|i| {
                    let seen = (i * block..(i + 1) * block).any(|p| see.sees(n * block, p));
                    !seen || self.knows(g, prefix_at[i as usize])
                })
            })
        };
        // Groups with a window of 1 need no blocks, but a hit needs a block in at least one group.
        let lies_somewhere =
            |n: u32| (0..self.spec.groups.len()).any(|g| self.knows(g, prefix_at[n as usize - 1]));
        (1..=last).rev().find(|&n| fits(n) && lies_somewhere(n)).unwrap_or(0) * block
    }
}
