//! Shortest job first, without preemption: L. E. Schrage and others call it SPT. Its mean response for M/G/1 is in
//! R. W. Conway, W. L. Maxwell, L. W. Miller, *Theory of Scheduling*, 1967, section 8-6.
use super::{Rank, SchedulingPolicy, View, rank_of};
use crate::config::TokenWork;

pub struct Sjf {
    pub work: TokenWork,
}

impl SchedulingPolicy for Sjf {
    fn name(&self) -> &'static str {
        "sjf"
    }
    /// Uses the work of the whole request, no matter how much of it is done.
    fn rank(&self, r: &View) -> Rank {
        rank_of(r.as_it_arrived().work_left_ns(self.work))
    }
}
