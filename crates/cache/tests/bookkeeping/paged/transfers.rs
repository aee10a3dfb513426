//! Exports and imports that run while steps do.
use super::drive::{Drive, Export, GARBAGE, Import};
use kvist_cache::*;
use kvist_testing::reference::Choices;
use std::collections::BTreeSet;

impl Drive {
    /// Pins some blocks, most of them readable.
    pub(super) fn pin(&mut self, choices: &mut Choices<'_>) {
        let (mut ids, mut is_readable) = (Vec::new(), true);
        for _ in 0..choices.below(4) {
            let g = choices.below(self.spec.groups.len() as u32) as usize;
            let used: BTreeSet<u32> = self.in_use(g).keys().chain(self.known[g].keys()).copied().collect();
            let block = match used.iter().nth(choices.below(used.len() as u32 + 1) as usize) {
                Some(&block) => block,
                None if choices.one_in(4) => choices.below(30),
                None => continue,
            };
            is_readable &= used.contains(&block) && !self.loading(g).any(|loading| loading == block);
            ids.push(BlockId { group: GroupId(g as u16), block });
        }
        self.log.push(format!("pin {ids:?}"));
        let before = self.cache.report();
        match self.cache.pin(&ids) {
            Ok(pin) => {
                assert!(is_readable, "{ids:?}");
                let bytes = ids.iter().map(|id| (*id, self.bytes(*id))).collect();
                self.exports.push(Export { pin, bytes });
            }
            Err(refused) => {
                assert!(!is_readable && matches!(refused, Refused::NoSuchBlock(_)), "{refused:?} of {ids:?}");
                assert_eq!(self.cache.report(), before, "a refusal changed something");
            }
        }
    }

    /// Ends an export.
    pub(super) fn unpin(&mut self, choices: &mut Choices<'_>) {
        let n = self.exports.len() as u32;
        if n > 0 {
            let Export { pin, .. } = self.exports.swap_remove(choices.below(n) as usize);
            self.log.push(format!("unpin {:?}", pin.blocks()));
            self.cache.unpin(pin);
        }
    }

    /// Begins an import of a few tokens for `seq`.
    pub(super) fn load(&mut self, choices: &mut Choices<'_>, seq: SeqId) {
        let block = self.block();
        let n_tokens = match choices.below(3) {
            0 => block * choices.below(4),
            _ => choices.below(4 * block),
        };
        self.log.push(format!("load {n_tokens} tokens of {seq}"));
        let sequence = self.sequences.get(&seq).cloned();
        let start = sequence.as_ref().map_or(0, |sequence| sequence.tokens.len() as u32);
        let end = start + n_tokens;
        // Blocks with a position that the next query sees.
        let wanted = |g: usize| {
            let see = self.spec.groups[g].visibility;
            let blocks = start / block..end.div_ceil(block);
            blocks.map(move |i| (i * block..(i + 1) * block).any(|p| see.sees(end, p)))
        };
        let short = (0..self.spec.groups.len()).find_map(|g| {
            let needed = wanted(g).filter(|&wanted| wanted).count() as u32;
            let (in_use, total) = (self.in_use(g), self.spec.groups[g].capacity_tokens / block);
            let evictable = self.known[g].keys().filter(|at| !in_use.contains_key(at)).count() as u32;
            let free = total - in_use.len() as u32 - evictable;
            let (needed, free, reclaimable) = (needed * block, free * block, evictable * block);
            (needed > free).then_some(Refused::NoSpace {
                group: GroupId(g as u16),
                needed,
                free,
                reclaimable,
            })
        });
        let before = self.cache.report();
        match (self.cache.load(seq, n_tokens), sequence) {
            (Ok(loading), Some(sequence)) => {
                assert!(n_tokens > 0 && start.is_multiple_of(block) && short.is_none(), "{short:?}");
                assert_eq!((loading.seq(), loading.positions()), (seq, start..end));
                for g in 0..self.spec.groups.len() {
                    let blocks: Vec<_> = loading.blocks(GroupId(g as u16)).collect();
                    assert!(blocks.iter().map(|block| block.is_some()).eq(wanted(g)), "{blocks:?}");
                    let in_use = self.in_use(g);
                    let is_free = |at: &u32| !in_use.contains_key(at) && !self.known[g].contains_key(at);
                    assert!(blocks.iter().flatten().all(is_free), "{blocks:?} were in use");
                }
                let mut whole = sequence;
                whole.tokens.extend((0..n_tokens).map(|_| choices.below(3)));
                self.imports.push(Import { loading, whole, start: start as usize });
            }
            (Err(refused), sequence) => {
                match refused {
                    Refused::UnknownSequence(_) => assert!(sequence.is_none()),
                    Refused::Empty => assert_eq!(n_tokens, 0),
                    Refused::Unsupported(_) => assert!(!start.is_multiple_of(block)),
                    refused => assert_eq!(Some(refused), short),
                }
                assert_eq!(self.cache.report(), before, "a refusal changed something");
            }
            (Ok(loading), None) => panic!("{loading:?} of no sequence"),
        }
    }

    /// Ends an import, which may have failed.
    pub(super) fn arrive(&mut self, choices: &mut Choices<'_>) {
        let n = self.imports.len() as u32;
        if n == 0 {
            return;
        }
        let Import { loading, whole, start } = self.imports.swap_remove(choices.below(n) as usize);
        let (seq, block) = (loading.seq(), self.block() as usize);
        let fails = choices.one_in(4);
        // Sometimes only some tokens arrive. All of them stand where they belong, and the others are garbage.
        let n_tokens = loading.positions().len();
        let part = (!fails && choices.one_in(3)).then(|| match choices.below(3) {
            0 => choices.below(n_tokens as u32 + 2),
            _ => choices.below((n_tokens / block) as u32 + 2) * block as u32,
        });
        self.log
            .push(format!("import of {seq} from {start}: {n_tokens} tokens, fails {fails}, part {part:?}"));
        let arrived = start + part.map_or(n_tokens, |part| part as usize);
        for (g, memory) in self.memories.iter_mut().enumerate() {
            for (i, at) in (start / block..).zip(loading.blocks(GroupId(g as u16))) {
                let positions = i * block..((i + 1) * block).min(whole.tokens.len());
                for (p, cell) in positions.zip(at.into_iter().flat_map(|at| at as usize * block..)) {
                    memory[cell] = match fails || p >= arrived {
                        true => GARBAGE,
                        false => self.prefixes.number(whole.salt, &whole.tokens[..=p]),
                    };
                }
            }
        }
        let blocks: Vec<Vec<Option<u32>>> =
            (0..self.memories.len()).map(|g| loading.blocks(GroupId(g as u16)).collect()).collect();
        let done = match part {
            Some(part) => self.cache.arrived_in_part(loading, part),
            None => self.cache.arrived(loading, if fails { Err("the link is down") } else { Ok(()) }),
        };
        match self.sequences.get_mut(&seq) {
            _ if fails => assert_eq!(done, Ok(())),
            None => assert_eq!(done, Err(Refused::UnknownSequence(seq))),
            Some(there) if there.born == whole.born && there.tokens.len() == start => {
                // A part ends where a block does, and with all blocks that the next query sees.
                let has_seen = |g: usize| {
                    let see = self.spec.groups[g].visibility;
                    let seen =
                        |i: usize| (i * block..(i + 1) * block).any(|p| see.sees(arrived as u32, p as u32));
                    (start / block..arrived / block).zip(&blocks[g]).all(|(i, at)| at.is_some() || !seen(i))
                };
                let is_whole = arrived == start + n_tokens;
                let is_part =
                    (start + 1..start + n_tokens).contains(&arrived) && arrived.is_multiple_of(block);
                match is_whole || is_part && (0..blocks.len()).all(has_seen) {
                    true => {
                        assert_eq!(done, Ok(()));
                        there.tokens = whole.tokens[..arrived].to_vec();
                        self.n_imported += 1;
                        self.n_imported_parts += u32::from(!is_whole);
                    }
                    false => assert!(matches!(done, Err(Refused::Unsupported(_))), "{done:?}"),
                }
            }
            Some(there) => {
                let (expected, got) = (there.tokens.len() as u32, start as u32);
                assert_eq!(done, Err(Refused::NotAtEnd { seq, expected, got }));
            }
        }
    }
}
