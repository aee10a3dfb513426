//! The operations between steps, chosen at random.
use super::drive::{Drive, Known, Prefix, SALTS, Sequence};
use kvist_cache::*;
use kvist_testing::reference::Choices;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

impl Drive {
    pub(super) fn operate(&mut self, choices: &mut Choices<'_>) {
        self.now_ns += u64::from(choices.below(20));
        self.n_born += 1;
        let at = Moment { now_ns: self.now_ns };
        let seq = SeqId(choices.below(6));
        let other = SeqId(choices.below(6));
        match choices.below(21) {
            20 if choices.one_in(3) => self.resize(choices),
            16 => self.pin(choices),
            17 => self.unpin(choices),
            18 => self.load(choices, seq),
            19 => self.arrive(choices),
            0..=5 | 20 => self.write(choices),
            6 | 7 => self.open(choices, seq, at),
            8 | 9 => self.store(choices, seq, at),
            10 | 11 => self.fork(choices, seq, other),
            12 => self.accept(choices, seq),
            13 => self.roll_back(choices, seq),
            14 if choices.one_in(24) => {
                self.log.push("clear".to_owned());
                self.cache.clear();
                self.sequences.clear();
            }
            14 => {
                self.log.push(format!("remove {seq}"));
                let done = self.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX);
                assert_eq!(done.is_ok(), self.sequences.remove(&seq).is_some());
            }
            _ if choices.one_in(6) => self.forget(choices, at),
            _ => self.make_room(choices, at),
        }
        let removed = self.follow();
        assert!(removed.is_empty(), "{removed:?} were evicted, and no eviction was asked for");
        self.compare();
    }

    fn prompt(&self, choices: &mut Choices<'_>) -> Vec<u32> {
        let mut tokens = Vec::new();
        let n = self.sequences.len() as u32;
        if let Some(like) = self.sequences.values().nth(choices.below(n.max(1)) as usize)
            && !choices.one_in(3)
        {
            let keep = choices.below(like.tokens.len() as u32 + 1);
            tokens.extend_from_slice(&like.tokens[..keep as usize]);
        }
        tokens.extend((0..choices.below(12)).map(|_| choices.below(3)));
        tokens
    }

    /// Opens a sequence for a prompt, and compares the hit with the rule.
    fn open(&mut self, choices: &mut Choices<'_>, seq: SeqId, at: Moment) {
        let (salt, tokens) = (SALTS[choices.below(2) as usize], self.prompt(choices));
        self.log.push(format!("open {seq} {salt:?} {tokens:?}"));
        let hit = self.hit(salt, &tokens);
        let content = Content::Tokens(&tokens);
        let found = self.cache.lookup(salt, &content);
        assert_eq!(found.hit_tokens, hit);
        let groups = || (0..self.cache.n_groups() as u16).map(GroupId);
        let blocks: Vec<_> = groups().map(|group| self.cache.lookup_blocks(group, salt, &content)).collect();
        let (before, evictable) = (self.cache.report(), found.evictable_tokens);
        let reason = self.cache.explain(salt, &content, Viewer::Tenant);
        assert!(reason.position() >= hit, "{reason:?} of a hit of {hit}");
        let opened = self.cache.prefixes().expect("an index").open(seq, salt, &content, at);
        if let Entry::Vacant(vacant) = self.sequences.entry(seq) {
            assert_eq!(opened, Ok(Lookup { hit_tokens: hit, evictable_tokens: evictable }));
            let evictable_of = |report: &Report| report.blocks.map_or(0, |blocks| blocks.evictable);
            let taken =
                before.iter().zip(&self.cache.report()).map(|(a, b)| evictable_of(a) - evictable_of(b)).max();
            assert_eq!(
                taken.map(|n| n * self.spec.block_tokens),
                Some(evictable),
                "what the hit takes from the room"
            );
            let tables = (0..self.cache.n_groups() as u16)
                .map(|group| self.cache.block_table(GroupId(group), seq).expect("it was opened"));
            assert_eq!(tables.collect::<Vec<_>>(), blocks, "it holds what the lookup said");
            let stored = (hit / self.spec.block_tokens) as usize;
            let tokens = tokens[..hit as usize].to_vec();
            vacant.insert(Sequence { salt, tokens, stored, born: self.n_born });
        } else {
            assert_eq!(opened, Err(Refused::SequenceExists(seq)));
        }
    }

    /// Stores the blocks of a sequence, sometimes with content that contradicts what is stored.
    fn store(&mut self, choices: &mut Choices<'_>, seq: SeqId, at: Moment) {
        let Some(sequence) = self.sequences.get(&seq).cloned() else { return };
        self.log.push(format!("store {seq} {:?}", sequence.tokens));
        let block = self.block() as usize;
        for n in 1..=sequence.tokens.len() / block {
            let prefix = self.prefixes.number(sequence.salt, &sequence.tokens[..n * block]);
            let parent = self.prefixes.number(sequence.salt, &sequence.tokens[..(n - 1) * block]);
            let hash = self.cache.prefix_hash(sequence.salt, &sequence.tokens[..n * block]);
            let whole = Prefix { number: prefix, parent, n_blocks: n as u32 };
            self.by_hash.insert(hash, whole);
        }
        // A caller that passes wrong content for stored blocks is refused, unless it passes only what follows
        // them.
        let from = if choices.one_in(2) { 0 } else { choices.below(sequence.tokens.len() as u32 + 9) };
        let n_blocks = sequence.tokens.len() / block;
        let mut told = sequence.tokens.clone();
        let lies_in = match sequence.stored {
            n if n > 0 && choices.one_in(4) => {
                let place = choices.below((n * block) as u32) as usize;
                told[place] += 1;
                Some(place / block).filter(|&i| i >= (from as usize / block).min(n_blocks))
            }
            _ => None,
        };
        let content = Content::Tokens(&told);
        let done = self.cache.prefixes().expect("an index").store_from(seq, from, &content, at);
        if let Some(i) = lies_in {
            assert_eq!(done, Err(Refused::OtherContent { seq, position: (i * block) as u32 }));
        } else {
            let done = done.expect("it is open");
            let given = n_blocks - (from as usize / block).min(sequence.stored);
            assert_eq!((done.n_new + done.n_known) as usize, given, "{done:?}");
            self.sequences.get_mut(&seq).expect("it is open").stored = n_blocks;
        }
    }

    /// Forks a sequence.
    fn fork(&mut self, choices: &mut Choices<'_>, seq: SeqId, other: SeqId) {
        self.log.push(format!("fork {seq} {other}"));
        let born = self.n_born;
        let until = if choices.one_in(2) { u32::MAX } else { choices.below(30) };
        let done = self.cache.sequences().expect("many").seq_cp(seq, other, 0, until);
        match (self.sequences.get(&seq).cloned(), self.sequences.get(&other)) {
            (None, _) => assert_eq!(done, Err(Refused::UnknownSequence(seq))),
            (Some(source), there) => {
                let until = until.min(source.tokens.len() as u32) as usize;
                let occupied = there.is_some_and(|there| !there.tokens.is_empty());
                if occupied {
                    assert!(
                        matches!(done, Err(Refused::Occupied { .. } | Refused::WindowGone { .. })),
                        "{done:?}"
                    );
                } else if done.is_ok() && until == 0 {
                    let empty = Sequence { salt: source.salt, tokens: vec![], stored: 0, born };
                    self.sequences.entry(other).or_insert(empty);
                } else if done.is_ok() {
                    let tokens = source.tokens[..until].to_vec();
                    let stored = source.stored.min(until / self.spec.block_tokens as usize);
                    self.sequences.insert(other, Sequence { salt: source.salt, tokens, stored, born });
                } else {
                    assert!(matches!(done, Err(Refused::WindowGone { .. })), "{done:?}");
                    assert!((0..self.spec.groups.len()).any(|g| self.is_windowed(g)));
                }
            }
        }
    }

    /// Settles drafts.
    fn accept(&mut self, choices: &mut Choices<'_>, seq: SeqId) {
        let Some(sequence) = self.sequences.get(&seq) else { return };
        let len = sequence.tokens.len() as u32;
        let drafted = choices.below(len.min(self.spec.rollback_tokens) + 1);
        let accepted = choices.below(drafted + 2);
        self.log.push(format!("accept {accepted} of {drafted} of {seq}"));
        let done = self.cache.sequences().expect("many").accept(seq, drafted, accepted);
        if accepted > drafted {
            assert_eq!(done, Err(Refused::AcceptsMore { seq, drafted, accepted }));
        } else {
            // The number of drafts is within what can always be rolled back.
            let hit_needed = matches!(done, Err(Refused::WindowGone { .. }));
            assert!(done.is_ok() || hit_needed, "{done:?}");
            if done.is_ok() {
                self.shorten(seq, len - (drafted - accepted), false);
            }
        }
    }

    /// Shortens a sequence.
    fn roll_back(&mut self, choices: &mut Choices<'_>, seq: SeqId) {
        let Some(sequence) = self.sequences.get(&seq) else { return };
        let len = sequence.tokens.len() as u32;
        let to = choices.below(len + 1);
        self.log.push(format!("roll {seq} back to {to}"));
        let done = self.cache.sequences().expect("many").seq_rm(seq, to, u32::MAX);
        if done.is_ok() {
            self.shorten(seq, to, true);
        } else {
            assert_eq!(done, Err(Refused::WindowGone { seq, position: to }));
            assert!((0..self.spec.groups.len()).any(|g| self.is_windowed(g)));
        }
    }

    /// Evicts until some cells are free.
    fn make_room(&mut self, choices: &mut Choices<'_>, at: Moment) {
        let n_tokens = choices.below(40);
        self.log.push(format!("evict until {n_tokens} are free"));
        self.cache.prefixes().expect("an index").evict_until_free(n_tokens, at);
        let removed = self.follow();
        self.evict_until_free(n_tokens, &removed);
        for (g, report) in self.cache.report().iter().enumerate() {
            let blocks = report.blocks.expect("a paged group");
            let enough = blocks.free * self.block() >= n_tokens;
            assert!(enough || blocks.evictable == 0, "group {g} kept evictable blocks: {blocks:?}");
        }
    }

    /// Drops what is cached under a salt: nothing in use, and everything else that no block in use follows.
    fn forget(&mut self, choices: &mut Choices<'_>, at: Moment) {
        let salt = choices.of(&SALTS);
        self.log.push(format!("forget {salt:?}"));
        let is_of = |drive: &Drive, known: &Known| drive.prefixes.list[known.prefix as usize].0 == salt;
        let in_use: Vec<_> = (0..self.known.len()).map(|g| self.in_use(g)).collect();
        let dropped = self.cache.prefixes().expect("an index").forget(salt, at);
        let removed = self.follow();
        let n_dropped: usize = dropped.iter().map(|cached| cached.blocks.len()).sum();
        assert_eq!(removed.len(), n_dropped, "{dropped:?}");
        for &(g, block) in &removed {
            let is_dropped =
                |cached: &CachedBlock| cached.blocks.contains(&BlockId { group: GroupId(g as u16), block });
            assert!(dropped.iter().any(is_dropped), "{block} of group {g}");
            let known = self.known[g].remove(&block).expect("it was cached");
            assert!(is_of(self, &known) && !in_use[g].contains_key(&block), "{known:?} in group {g}");
        }
        let is_used = |(g, block): (usize, &u32)| in_use[g].contains_key(block);
        let used = self.known.iter().enumerate().flat_map(|(g, known)| {
            known.iter().filter(move |(block, _)| is_used((g, *block))).map(|(_, known)| known.prefix)
        });
        let used: Vec<u64> = used.collect();
        for known in self.known.iter().flat_map(BTreeMap::values).filter(|known| is_of(self, known)) {
            let leads_to_used = used.iter().any(|whole| self.prefixes.begins(*whole, known.prefix));
            assert!(leads_to_used, "{known:?} is still cached");
        }
    }

    fn shorten(&mut self, seq: SeqId, to: u32, forgets: bool) {
        let block = self.block();
        let sequence = self.sequences.get_mut(&seq).expect("it is open");
        if (to as usize) < sequence.tokens.len() {
            sequence.born = self.n_born;
        }
        sequence.tokens.truncate(to as usize);
        sequence.stored = sequence.stored.min((to / block) as usize);
        if to == 0 && forgets {
            self.sequences.remove(&seq);
        }
    }
}
