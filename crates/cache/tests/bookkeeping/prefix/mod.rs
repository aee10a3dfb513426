//! The prefix index by example: hits, and why they are not longer.
mod hits;
mod limits;
mod sequences;
mod stored;

use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;

const AT: Moment = Moment { now_ns: 0 };

struct Rig {
    cache: Cache,
    plan: StepPlan,
    next: u32,
}

fn spec(block_tokens: u32, capacity_tokens: u32) -> PagedSpec {
    PagedSpec {
        block_tokens,
        groups: vec![GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: 1 }],
        rollback_tokens: 0,
        prefix: Some(PrefixSpec::default()),
    }
}

impl Rig {
    fn new(spec: &PagedSpec) -> Rig {
        Rig { cache: Cache::paged(spec).expect("it can be built"), plan: StepPlan::default(), next: 0 }
    }
    fn prefixes(&mut self) -> Prefixes<'_> {
        self.cache.prefixes().expect("an index")
    }
    /// Opens a prompt, computes all of it, stores it and removes the sequence. Returns the tokens that were hit.
    fn serve(&mut self, salt: &str, content: &Content<'_>) -> u32 {
        let seq = SeqId(self.next);
        self.next += 1;
        let hit = self.prefixes().open(seq, salt, content, AT).expect("it is new").hit_tokens;
        let rest = content.n_tokens() - hit;
        for n_tokens in [rest.min(3), rest.saturating_sub(3)] {
            if n_tokens > 0 {
                self.grow(seq, n_tokens);
            }
        }
        self.prefixes().store(seq, content, AT).expect("it is open");
        self.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX).expect("it is open");
        hit
    }
    fn grow(&mut self, seq: SeqId, n_tokens: u32) {
        let start = self.cache.next_position(seq).expect("it is open");
        let spans = [Span::chain(seq, start, n_tokens)];
        let request = StepRequest { spans: &spans };
        Step::begin(&mut self.cache, &request, &mut self.plan).expect("there is room").commit();
    }
    fn why(&self, salt: &str, tokens: &[u32], viewer: Viewer) -> MissReason {
        self.cache.explain(salt, &Content::Tokens(tokens), viewer)
    }
}

fn count(n: u32) -> Vec<u32> {
    (0..n).collect()
}
