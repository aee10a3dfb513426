//! The fleet, compared with a single run, with a simple fleet that looks at everything, and with what must hold.
mod laws;
mod loads;
mod policies;
mod single;
mod tiers;
mod twin;

use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{PagedSpec, PrefixSpec, Vocabulary};
use kvist_simulator::cost::{BatchShape, StepCost};
use kvist_simulator::fleet::{FleetOptions, FleetRun, run};
use kvist_simulator::request::Request;

/// A cache of blocks of 4 tokens, for content given as ids of 8.
fn cache(capacity_tokens: u32) -> PagedSpec {
    let group = GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens };
    let vocabulary = Vocabulary::Ids { tokens_per_id: 8 };
    let prefix = Some(PrefixSpec { vocabulary, ..PrefixSpec::default() });
    PagedSpec { block_tokens: 4, groups: vec![group], rollback_tokens: 0, prefix }
}

/// Step costs that depend on every field of a shape.
struct Uneven;

impl StepCost for Uneven {
    fn step_ns(&self, b: &BatchShape) -> u64 {
        1000 + 7 * b.prefill_tokens
            + 90 * b.decode_sequences
            + b.context_tokens() / 3
            + b.attention_pairs / 11
    }
    fn name(&self) -> String {
        "uneven".into()
    }
}

fn fleet(requests: &[Request], cache: &PagedSpec, cost: &dyn StepCost, options: &FleetOptions) -> FleetRun {
    run(requests, cache, cost, options, &mut |_| ()).unwrap()
}
