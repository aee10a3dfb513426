//! Priority with ageing, without preemption: waiting `ageing_ns` is worth one level. Linear ageing is L. Kleinrock's
//! "A delay dependent queue discipline", Naval Research Logistics Quarterly 11 (1964), here with the same slope for
//! all requests. The order of two requests therefore never changes, and a request waits only for requests that arrive
//! within `ageing_ns` · (difference in level).
use super::{Rank, SchedulingPolicy, View, rank_of};

pub struct Priority {
    pub ageing_ns: u64,
}

impl SchedulingPolicy for Priority {
    fn name(&self) -> &'static str {
        "priority"
    }
    fn rank(&self, r: &View) -> Rank {
        rank_of(r.arrival_ns).saturating_sub(rank_of(self.ageing_ns).saturating_mul(r.priority.into()))
    }
}
