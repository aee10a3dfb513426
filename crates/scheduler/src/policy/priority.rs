//! Priority with ageing, without preemption: waiting `ageing_ns` is worth one level. Linear ageing is L. Kleinrock's
//! "A delay dependent queue discipline", Naval Research Logistics Quarterly 11 (1964), with one slope for all, so
//! that the order of two requests never changes, and nobody waits for more than what arrives within
//! `ageing_ns` · (difference in level).
use super::{Policy, Rank, View, rank_of};

pub struct Priority {
    pub ageing_ns: u64,
}

impl Policy for Priority {
    fn name(&self) -> &'static str {
        "priority"
    }
    fn rank(&self, r: &View) -> Rank {
        rank_of(r.arrival_ns).saturating_sub(rank_of(self.ageing_ns).saturating_mul(r.priority.into()))
    }
}
