//! Shortest remaining processing time, preemptive. Optimal for the mean response time of one server: L. E. Schrage, "A
//! proof of the optimality of the shortest remaining processing time discipline", Operations Research 16 (1968). Its
//! mean for M/G/1: L. E. Schrage and L. W. Miller, Operations Research 14 (1966).
//!
//! Remaining work includes prefill and, after a preemption, the tokens to recompute.
use super::{Rank, SchedulingPolicy, View, rank_of};
use crate::config::TokenWork;

pub struct Srpt {
    pub work: TokenWork,
}

impl SchedulingPolicy for Srpt {
    fn name(&self) -> &'static str {
        "srpt"
    }
    fn rank(&self, r: &View) -> Rank {
        rank_of(r.work_left_ns(self.work))
    }
    fn preempts(&self) -> bool {
        true
    }
}
