//! Earliest deadline first, preemptive: C. L. Liu and J. W. Layland, "Scheduling algorithms for multiprogramming in
//! a hard-real-time environment", Journal of the ACM 20 (1973). Requests without a deadline come last.
use super::{Rank, SchedulingPolicy, View, rank_of};

pub struct Edf;

impl SchedulingPolicy for Edf {
    fn name(&self) -> &'static str {
        "edf"
    }
    fn rank(&self, r: &View) -> Rank {
        r.deadline_ns.map_or(Rank::MAX, rank_of)
    }
    fn preempts(&self) -> bool {
        true
    }
}
