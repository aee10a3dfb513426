//! Speculative decoding in a simulation: how many draft tokens a decoding request verifies in a step, and how many of
//! them are accepted.
//!
//! Drafts are chains: a tree with as many nodes takes as many cells and costs as many rows. Each draw belongs to a
//! request and a position of its text, and not to the step that asks for it. So two runs with one seed accept the same
//! tokens in the same places, whatever they schedule.
use crate::cost::LONGEST_STEP_NS;
use crate::workload::{BadSpec, Spec};
use kvist_cache::Kept;
use kvist_scheduler::Replayed;
use serde::Serialize;
use std::collections::BTreeMap;
use std::str::FromStr;

/// How a simulated run speculates.
#[derive(Clone, Debug, PartialEq)]
pub struct Speculation {
    pub acceptance: Acceptance,
    /// Time for proposing drafts, added to every step for which drafts are proposed.
    pub draft_ns: u64,
    pub seed: u64,
}

/// How many draft tokens are proposed and accepted.
#[derive(Clone, Debug, PartialEq)]
pub enum Acceptance {
    /// Every draft has `tokens` tokens. The one at depth `i`, from 0, is accepted with probability `accept[i]` if all
    /// before it are; the last probability is that of all deeper ones too.
    PerDepth { tokens: u32, accept: Vec<f64> },
    /// Drafts as they were observed.
    Observed(Observed),
}

impl Acceptance {
    /// The largest draft.
    pub fn max_tokens(&self) -> u32 {
        match self {
            Acceptance::PerDepth { tokens, .. } => *tokens,
            Acceptance::Observed(observed) => {
                observed.counts.last_key_value().map_or(0, |((drafted, _), _)| *drafted)
            }
        }
    }
}

/// Decode steps of single requests that were observed: how many draft tokens each verified, and how many it accepted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observed {
    /// Number of observations by draft tokens and accepted tokens. Steps without a draft count as (0, 0).
    counts: BTreeMap<(u32, u32), u64>,
    steps: u64,
}

impl Observed {
    /// Adds the decoding requests of a replayed step, except those that end with it: the end of an answer cuts what it
    /// accepts, in a simulation too.
    pub fn add(&mut self, replayed: &Replayed<'_>) {
        let batch = replayed.batch;
        if batch.steps != 1 || replayed.outcome.failed {
            return;
        }
        for (i, (work, advance)) in batch.work.iter().zip(replayed.outcome.advances()).enumerate() {
            if !work.decodes || advance.finished {
                continue;
            }
            let drafted = batch.draft(i).len().saturating_sub(1) as u32;
            let accepted = match advance.kept {
                Kept::All => drafted,
                Kept::First(n) => n.saturating_sub(1),
                Kept::Path(path) => path.len().saturating_sub(1) as u32,
            };
            *self.counts.entry((drafted, accepted.min(drafted))).or_default() += 1;
            self.steps += 1;
        }
    }

    /// True if no step had a draft.
    pub fn is_empty(&self) -> bool {
        self.counts.keys().all(|(drafted, _)| *drafted == 0)
    }

    /// The observation at `share` of all of them, from 0 to below 1, in order.
    fn at(&self, share: f64) -> (u32, u32) {
        let mut left = (share * self.steps as f64) as u64;
        for (observation, n) in &self.counts {
            match left.checked_sub(*n) {
                Some(rest) => left = rest,
                None => return *observation,
            }
        }
        (0, 0)
    }
}

impl Speculation {
    /// In words, for reports.
    pub(crate) fn name(&self) -> String {
        let name = match &self.acceptance {
            Acceptance::PerDepth { tokens, accept } => {
                let accept: Vec<String> = accept.iter().map(f64::to_string).collect();
                format!("{tokens} draft tokens, accepted with probability {}", accept.join("/"))
            }
            Acceptance::Observed(observed) => format!("as in {} recorded decode steps", observed.steps),
        };
        match self.draft_ns {
            0 => name,
            ns => format!("{name}; {} ms to draft", ns as f64 / 1e6),
        }
    }

    /// Draft tokens that request `request` wants to verify when its last known token is at `position`.
    pub(crate) fn drafted(&self, request: u64, position: u32) -> u32 {
        match &self.acceptance {
            Acceptance::PerDepth { tokens, .. } => *tokens,
            Acceptance::Observed(observed) => observed.at(self.draw(request, position)).0,
        }
    }

    /// How many of `n` draft tokens after `position` are accepted.
    pub(crate) fn accepted(&self, request: u64, position: u32, n: u32) -> u32 {
        match &self.acceptance {
            Acceptance::PerDepth { accept, .. } => {
                let probability =
                    |depth: u32| accept.get(depth as usize).or(accept.last()).copied().unwrap_or(0.0);
                let is_accepted =
                    |depth: &u32| self.draw(request, position.wrapping_add(*depth)) < probability(*depth);
                (0..n).take_while(is_accepted).count() as u32
            }
            Acceptance::Observed(observed) => observed.at(self.draw(request, position)).1.min(n),
        }
    }

    /// A number from 0 to below 1 that belongs to this place of the text.
    fn draw(&self, request: u64, position: u32) -> f64 {
        let number = mix(mix(mix(self.seed) ^ request) ^ u64::from(position));
        (number >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// One step of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The drafts of a simulation that has no recording of them: `tokens=4,accept=0.8/0.6,draft_ms=0.3`.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftSpec {
    /// `None` if neither tokens nor probabilities are given.
    pub acceptance: Option<Acceptance>,
    pub draft_ns: u64,
}

/// Most tokens of a draft.
const MAX_TOKENS: u32 = 1024;

impl FromStr for DraftSpec {
    type Err = BadSpec;
    fn from_str(text: &str) -> Result<DraftSpec, BadSpec> {
        let mut spec = Spec::of_values(text, "drafts", "tokens=4,accept=0.8/0.6,draft_ms=0.3")?;
        let draft_ms = if spec.has("draft_ms") { spec.number("draft_ms")? } else { 0.0 };
        if !(0.0..=LONGEST_STEP_NS as f64).contains(&(draft_ms * 1e6)) {
            let expected = "milliseconds, from 0 to 9007199254";
            return Err(BadSpec::BadValue { name: "draft_ms", found: draft_ms.to_string(), expected });
        }
        let acceptance =
            if spec.has("tokens") || spec.has("accept") { Some(per_depth(&mut spec)?) } else { None };
        spec.end()?;
        Ok(DraftSpec { acceptance, draft_ns: (draft_ms * 1e6).round() as u64 })
    }
}

fn per_depth(spec: &mut Spec<'_>) -> Result<Acceptance, BadSpec> {
    let tokens = spec.count("tokens")?;
    if !(1..=MAX_TOKENS).contains(&tokens) {
        let expected = "a whole number from 1 to 1024";
        return Err(BadSpec::BadValue { name: "tokens", found: tokens.to_string(), expected });
    }
    let expected = "probabilities from 0 to 1, one for each depth, as in 0.8/0.6, and no more than tokens";
    let found: String = spec.take("accept", expected)?;
    let accept: Option<Vec<f64>> =
        found.split('/').map(|p| p.trim().parse().ok().filter(|p| (0.0..=1.0).contains(p))).collect();
    match accept.filter(|accept| accept.len() <= tokens as usize) {
        Some(accept) => Ok(Acceptance::PerDepth { tokens, accept }),
        None => Err(BadSpec::BadValue { name: "accept", found, expected }),
    }
}

/// What speculation achieved in a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SpeculationCounts {
    /// Decode steps of single requests, with or without a draft.
    pub decodes: u64,
    /// Tokens that these steps generated.
    pub generated_tokens: u64,
    /// Those steps that verified a draft.
    pub drafts: u64,
    pub draft_tokens: u64,
    pub accepted_tokens: u64,
    /// How many drafts were accepted at each depth; the first element is the first draft token.
    pub accepted_per_position: Vec<u64>,
}

impl SpeculationCounts {
    /// Adds a decode step of a request that verified `drafted` tokens and generated `generated`.
    pub(crate) fn add(&mut self, drafted: u32, generated: u32) {
        self.decodes += 1;
        self.generated_tokens += u64::from(generated);
        if drafted == 0 {
            return;
        }
        let accepted = generated.saturating_sub(1);
        self.drafts += 1;
        self.draft_tokens += u64::from(drafted);
        self.accepted_tokens += u64::from(accepted);
        let depth = self.accepted_per_position.len().max(drafted as usize);
        self.accepted_per_position.resize(depth, 0);
        self.accepted_per_position[..accepted as usize].iter_mut().for_each(|n| *n += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speculation(text: &str, seed: u64) -> Speculation {
        let DraftSpec { acceptance, draft_ns } = text.parse().unwrap();
        Speculation { acceptance: acceptance.unwrap(), draft_ns, seed }
    }

    #[test]
    fn texts_that_are_no_drafts() {
        for (text, says) in [
            ("tokens=4", "`drafts` lacks `accept`"),
            ("accept=0.5", "`drafts` lacks `tokens`"),
            ("tokens=0,accept=1", "`tokens=0`: expected a whole number from 1"),
            ("tokens=2,accept=1/1/1", "`accept=1/1/1`: expected probabilities"),
            ("tokens=4,accept=1.5", "`accept=1.5`"),
            ("tokens=4,accept=NaN", "`accept=NaN`"),
            ("tokens=4,accept=", "`accept=`"),
            ("tokens=4,accept=0.5,draft_ms=-1", "`draft_ms=-1`: expected milliseconds"),
            ("tokens=4,accept=0.5,draft_ms=inf", "`draft_ms=inf`"),
            ("tokens=4,accept=0.5,width=2", "`drafts` does not read `width`"),
            ("4", "expected name=value, as in `tokens=4"),
        ] {
            let error = text.parse::<DraftSpec>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
        assert_eq!("draft_ms=0.3".parse(), Ok(DraftSpec { acceptance: None, draft_ns: 300_000 }));
    }

    /// Each depth is accepted as often as its probability says, whatever the others do.
    #[test]
    fn acceptance_by_depth() {
        let speculation = speculation("tokens=4,accept=0.8/0.5", 7);
        let n = 100_000;
        let mut reached = [0u32; 5];
        for request in 0..n {
            let accepted = speculation.accepted(request / 10, 100 * (request % 10) as u32, 4);
            reached[..=accepted as usize].iter_mut().for_each(|n| *n += 1);
        }
        for (depth, probability) in [0.8, 0.5, 0.5, 0.5].into_iter().enumerate() {
            let share = f64::from(reached[depth + 1]) / f64::from(reached[depth]);
            assert!((share - probability).abs() < 0.01, "{depth}: {share}");
        }
    }

    #[test]
    fn draws_belong_to_a_seed_and_a_place() {
        let accepted = |seed, request| {
            let speculation = speculation("tokens=8,accept=0.5", seed);
            (0..100).map(|position| speculation.accepted(request, 10 * position, 8)).collect::<Vec<_>>()
        };
        assert_eq!(accepted(1, 3), accepted(1, 3));
        assert!(accepted(1, 3) != accepted(2, 3) && accepted(1, 3) != accepted(1, 4));
        // A shorter draft accepts the beginning of what a longer one does.
        let one = speculation("tokens=8,accept=0.5", 1);
        for position in 0..100 {
            assert_eq!(one.accepted(5, position, 3), one.accepted(5, position, 8).min(3));
        }
    }

    #[test]
    fn observations_come_as_often_as_observed() {
        let counts = BTreeMap::from([((0, 0), 10), ((4, 0), 30), ((4, 3), 60)]);
        let observed = Observed { counts, steps: 100 };
        let drawn = [0.0, 0.0999, 0.1, 0.399, 0.4, 0.9999].map(|share| observed.at(share));
        assert_eq!(drawn, [(0, 0), (0, 0), (4, 0), (4, 0), (4, 3), (4, 3)]);
        assert!(!observed.is_empty() && Observed::default().is_empty());
        assert_eq!(Observed::default().at(0.5), (0, 0));
    }
}
