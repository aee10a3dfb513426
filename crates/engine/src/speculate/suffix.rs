//! Suffix decoding: proposes what followed the same tokens earlier, in this text and in finished answers (Oliaro et al.,
//! "SuffixDecoding", arXiv 2411.04975).
//!
//! The paper keeps suffix trees. Here occurrences are found as zlib finds them: a hash of the last tokens leads to a chain
//! of earlier positions, newest first. Each position gives a match length and a continuation. Frequencies among the
//! continuations of equally good matches are the probabilities of the nodes. A token costs eight bytes, an entry of
//! a hash table for each new pair of tokens, and constant time to add; a proposal examines a bounded number of positions.
use super::{Bounds, DraftRequest, DraftTree, Drafter};
use kvist_model::Error;
use std::collections::{HashMap, VecDeque};

/// Settings of [`Suffix`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SuffixConfig {
    /// Tokens of finished answers that are kept, over all salts. The answers of the least recently used salt are dropped first.
    pub max_tokens: usize,
    /// Draft tokens per matched token: a match of `n` tokens is worth at most `factor · n` draft tokens.
    pub factor: f32,
    /// A path with a lower probability is not followed.
    pub min_probability: f32,
}

impl Default for SuffixConfig {
    fn default() -> Self {
        SuffixConfig { max_tokens: 1 << 18, factor: 2.0, min_probability: 0.1 }
    }
}

/// Tokens that must match for an occurrence to be found.
const KEY: usize = 2;
/// Longer matches count as this long.
const MAX_MATCH: usize = 32;
/// Most positions that are examined in a store for one proposal.
const MAX_POSITIONS: usize = 64;
/// Separates answers. No vocabulary has this token.
const SEPARATOR: u32 = u32::MAX;
const NONE: u32 = u32::MAX;

/// Tokens with an index of where each pair of tokens ends.
#[derive(Debug, Default)]
struct Store {
    tokens: Vec<u32>,
    /// By pair of tokens: the newest position at which it ends.
    heads: HashMap<[u32; KEY], u32>,
    /// By position: the previous position at which the same pair ends.
    previous: Vec<u32>,
}

/// An earlier occurrence of the last tokens: what followed it, and how many tokens match.
#[derive(Clone, Copy, Debug)]
struct Occurrence<'s> {
    continuation: &'s [u32],
    agreeing: usize,
}

impl Store {
    fn push(&mut self, token: u32) {
        let position = self.tokens.len() as u32;
        self.tokens.push(token);
        let mut previous = NONE;
        if let Some(&key) = self.tokens.last_chunk::<KEY>()
            && !key.contains(&SEPARATOR)
        {
            previous = self.heads.insert(key, position).unwrap_or(NONE);
        }
        self.previous.push(previous);
    }

    /// Makes the store end with `tokens`, of which it may have a beginning already.
    fn follow(&mut self, tokens: &[u32]) {
        let stored = self.tokens.len();
        if tokens.get(..stored) != Some(&self.tokens[..]) {
            *self = Store::default();
        }
        tokens[self.tokens.len()..].iter().for_each(|&token| self.push(token));
    }

    /// Adds the newest occurrences of the end of `text` that are not at the end of the store.
    fn occurrences<'s>(&'s self, text: &[u32], out: &mut Vec<Occurrence<'s>>) {
        let Some(key) = text.last_chunk::<KEY>() else { return };
        let mut at = self.heads.get(key).copied().unwrap_or(NONE);
        for _ in 0..MAX_POSITIONS {
            let Some(end) = (at != NONE).then_some(at as usize + 1) else { return };
            let rest = &self.tokens[end..];
            let rest =
                &rest[..rest.iter().take(2 * MAX_MATCH).take_while(|token| **token != SEPARATOR).count()];
            if !rest.is_empty() {
                let same = self.tokens[..end].iter().rev().zip(text.iter().rev());
                let agreeing = same.take(MAX_MATCH).take_while(|(a, b)| a == b).count();
                out.push(Occurrence { continuation: rest, agreeing });
            }
            at = self.previous[at as usize];
        }
    }
}

/// Finished answers of one salt.
#[derive(Debug, Default)]
struct Answers {
    store: Store,
    lengths: VecDeque<usize>,
    used: u64,
}

impl Answers {
    fn add(&mut self, answer: &[u32]) {
        answer.iter().for_each(|&token| self.store.push(token));
        self.store.push(SEPARATOR);
        self.lengths.push_back(answer.len() + 1);
    }
    /// Drops the older half of the answers, and builds the index of the others anew: constant time per token in the long
    /// run.
    fn drop_older_half(&mut self) {
        let (half, mut cut) = (self.store.tokens.len() / 2, 0);
        while cut < half
            && let Some(length) = self.lengths.pop_front()
        {
            cut += length;
        }
        let kept = self.store.tokens.split_off(cut);
        self.store = Store::default();
        kept.into_iter().for_each(|token| self.store.push(token));
    }
}

/// Proposes trees from repetitions: of the text itself, and of finished answers with the same salt.
#[derive(Debug, Default)]
pub struct Suffix {
    config: SuffixConfig,
    texts: HashMap<u64, Store>,
    answers: HashMap<String, Answers>,
    clock: u64,
}

impl Suffix {
    pub fn new(config: SuffixConfig) -> Self {
        Suffix { config, ..Suffix::default() }
    }

    fn answer_tokens(&self) -> usize {
        self.answers.values().map(|answers| answers.store.tokens.len()).sum()
    }
}

impl Drafter for Suffix {
    fn prepare(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        for DraftRequest { id, tokens, .. } in requests {
            self.texts.entry(*id).or_default().follow(tokens);
        }
        Ok(())
    }

    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        for DraftRequest { id, salt, tokens, bounds, tree } in requests {
            let text = self.texts.entry(*id).or_default();
            text.follow(tokens);
            self.clock += 1;
            let mut own = Vec::new();
            text.occurrences(tokens, &mut own);
            let mut others = Vec::new();
            if let Some(answers) = self.answers.get_mut(*salt) {
                answers.used = self.clock;
                answers.store.occurrences(tokens, &mut others);
            }
            let mut best = best_tree(&own, &self.config, *bounds);
            let other = best_tree(&others, &self.config, *bounds);
            if other.1 > best.1 {
                best = other;
            }
            **tree = best.0;
        }
        Ok(())
    }

    fn removed(&mut self, _id: u64, salt: &str, tokens: &[u32], kept: usize) {
        self.learn(salt, tokens.get(kept..).unwrap_or_default());
    }

    fn end(&mut self, id: u64, salt: &str, tokens: &[u32], prompt: usize) {
        self.texts.remove(&id);
        self.learn(salt, tokens.get(prompt..).unwrap_or_default());
    }
}

impl Suffix {
    /// Keeps an answer for later texts with the same salt.
    fn learn(&mut self, salt: &str, answer: &[u32]) {
        if answer.len() <= KEY || answer.len() >= self.config.max_tokens {
            return;
        }
        self.clock += 1;
        let answers = self.answers.entry(salt.to_string()).or_default();
        answers.used = self.clock;
        answers.add(answer);
        while self.answer_tokens() > self.config.max_tokens {
            // Each salt has its own moment of use, so the choice does not depend on the order of the map.
            let oldest = self.answers.iter().min_by_key(|(_, answers)| answers.used);
            let Some(oldest) = oldest.map(|(salt, _)| salt.clone()) else { return };
            if self.answers.len() == 1 {
                self.answers.values_mut().for_each(Answers::drop_older_half);
            } else {
                self.answers.remove(&oldest);
            }
        }
    }
}

/// The best tree and its score, the number of nodes that it expects to be accepted. The occurrences that agree in at
/// least `n` tokens give a tree for each `n`: a larger `n` follows a better match, a smaller one counts more often.
fn best_tree(occurrences: &[Occurrence<'_>], config: &SuffixConfig, bounds: Bounds) -> (DraftTree, f32) {
    let mut lengths: Vec<usize> = occurrences.iter().map(|occurrence| occurrence.agreeing).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let mut best = (DraftTree::default(), 0.0);
    for &agreeing in lengths.iter().rev() {
        let matching =
            occurrences.iter().filter(|o| o.agreeing >= agreeing).map(|o| o.continuation).collect();
        let max = (agreeing as f32 * config.factor) as u32;
        let bounds = Bounds { tokens: bounds.tokens.min(max), ..bounds };
        let tree = frequency_tree(matching, config.min_probability, bounds);
        if tree.1 > best.1 {
            best = tree;
        }
    }
    best
}

/// Merges continuations into a tree. A node's probability is its share among the continuations through its parent; nodes
/// are added in the order of the probability of their path.
fn frequency_tree(continuations: Vec<&[u32]>, min: f32, bounds: Bounds) -> (DraftTree, f32) {
    /// A node that may be added next.
    struct Candidate<'c> {
        parent: Option<u32>,
        depth: u32,
        token: u32,
        share: f32,
        path: f32,
        continuations: Vec<&'c [u32]>,
    }
    fn children<'c>(
        parent: Option<u32>,
        depth: u32,
        path: f32,
        through: &[&'c [u32]],
        width: u32,
    ) -> Vec<Candidate<'c>> {
        let mut groups: Vec<(u32, Vec<&'c [u32]>)> = Vec::new();
        for (token, rest) in through.iter().filter_map(|c| c.split_first()) {
            match groups.iter_mut().find(|(other, _)| other == token) {
                Some((_, group)) => group.push(rest),
                None => groups.push((*token, vec![rest])),
            }
        }
        let total = through.len() as f32;
        // Stable: of equally frequent ones the newest first.
        groups.sort_by_key(|(_, group)| std::cmp::Reverse(group.len()));
        groups.truncate(width as usize);
        let candidate = |(token, continuations): (u32, Vec<&'c [u32]>)| {
            let share = continuations.len() as f32 / total;
            Candidate { parent, depth, token, share, path: path * share, continuations }
        };
        groups.into_iter().map(candidate).collect()
    }
    let (mut tree, mut score) = (DraftTree::default(), 0.0);
    let mut open = children(None, 1, 1.0, &continuations, bounds.width);
    while tree.len() < bounds.tokens as usize {
        let mut best: Option<usize> = None;
        for (i, candidate) in open.iter().enumerate() {
            if best.is_none_or(|best| candidate.path > open[best].path) {
                best = Some(i);
            }
        }
        let Some(best) = best.filter(|&best| open[best].path >= min) else { break };
        let Candidate { parent, depth, token, share, path, continuations } = open.remove(best);
        let node = tree.push(parent, token, share);
        score += path;
        if depth < bounds.depth {
            open.extend(children(Some(node), depth + 1, path, &continuations, bounds.width));
        }
    }
    (tree, score)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDE: Bounds = Bounds { tokens: 16, depth: 8, width: 4 };

    fn propose(drafter: &mut Suffix, id: u64, salt: &str, tokens: &[u32], bounds: Bounds) -> DraftTree {
        let mut tree = DraftTree::default();
        drafter.propose(&mut [DraftRequest { id, salt, tokens, bounds, tree: &mut tree }]).unwrap();
        assert!(tree.len() <= bounds.tokens as usize && tree.max_depth() <= bounds.depth);
        tree
    }

    #[test]
    fn continues_what_the_text_repeats() {
        let mut drafter = Suffix::default();
        assert!(propose(&mut drafter, 0, "", &[1, 2, 3], WIDE).is_empty());
        // Six tokens agree, so up to twelve may follow; the text has four.
        let text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6];
        assert_eq!(propose(&mut drafter, 0, "", &text, WIDE).tokens(), [7, 8, 9, 10, 0, 1, 2, 3]);
        let short = Bounds { depth: 2, ..WIDE };
        assert_eq!(propose(&mut drafter, 0, "", &text, short).tokens(), [7, 8]);
        // The text was rewritten: what was indexed of it does not count.
        assert!(propose(&mut drafter, 0, "", &[4, 5, 1, 5, 6], WIDE).is_empty());
    }

    #[test]
    fn frequencies_become_probabilities() {
        let text = [1, 2, 8, 0, 1, 2, 9, 0, 1, 2, 8, 0, 3, 1, 2];
        let tree = propose(&mut Suffix::default(), 0, "", &text, Bounds { depth: 1, ..WIDE });
        assert_eq!((tree.tokens(), tree.parents()), (&[8, 9][..], &[None, None][..]));
        assert!((tree.probabilities()[0] - 2.0 / 3.0).abs() < 1e-6, "{:?}", tree.probabilities());
        let tree = propose(&mut Suffix::default(), 0, "", &text, Bounds { width: 1, ..WIDE });
        assert!(tree.is_chain(), "{tree:?}");
    }

    #[test]
    fn finished_answers_serve_their_salt_alone() {
        let mut drafter = Suffix::default();
        drafter.end(0, "a", &[90, 91, 1, 2, 3, 4, 5], 2);
        let text = [50, 51, 1, 2, 3];
        assert_eq!(propose(&mut drafter, 1, "a", &text, WIDE).tokens(), [4, 5]);
        assert!(propose(&mut drafter, 2, "b", &text, WIDE).is_empty());
        assert!(propose(&mut drafter, 3, "a", &[90, 91], WIDE).is_empty(), "the prompt is not kept");
    }

    /// The store never exceeds its bound, and loses the salts that were used longest ago.
    #[test]
    fn the_store_is_bounded() {
        let mut drafter = Suffix::new(SuffixConfig { max_tokens: 100, ..SuffixConfig::default() });
        for n in 0..50 {
            let salt = if n % 10 == 0 { "rare" } else { "often" };
            let answer: Vec<u32> = (0..10).map(|i| 100 * n + i).collect();
            drafter.end(u64::from(n), salt, &answer, 0);
            assert!(drafter.answer_tokens() <= 100);
        }
        let newest: Vec<u32> = (0..4).map(|i| 4900 + i).collect();
        assert!(!propose(&mut drafter, 99, "often", &newest, WIDE).is_empty());
        assert!(propose(&mut drafter, 99, "rare", &[4000, 4001, 4002], WIDE).is_empty());
    }

    /// Chains of occurrences against a search over all positions.
    #[test]
    fn occurrences_are_all_there_are() {
        let mut random = kvist_testing::SplitMix64(7);
        for _ in 0..200 {
            let text: Vec<u32> = (0..60).map(|_| random.below(4)).collect();
            let mut store = Store::default();
            store.follow(&text[..30]);
            store.follow(&text);
            let mut found = Vec::new();
            store.occurrences(&text, &mut found);
            let ends =
                (KEY..text.len()).rev().filter(|&end| text[end - KEY..end] == text[text.len() - KEY..]);
            let agreeing = |end: usize| {
                (1..=end).take_while(|i| text[end - i] == text[text.len() - i]).count().min(MAX_MATCH)
            };
            let expected: Vec<_> =
                ends.take(MAX_POSITIONS).map(|end| (&text[end..], agreeing(end))).collect();
            let found: Vec<_> = found.iter().map(|o| (o.continuation, o.agreeing)).collect();
            assert_eq!(found, expected, "{text:?}");
        }
    }
}
