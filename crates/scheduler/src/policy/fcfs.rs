//! First come, first served. A preempted request returns to its original place, by arrival time.
use super::{Rank, SchedulingPolicy, View, rank_of};

pub struct Fcfs;

impl SchedulingPolicy for Fcfs {
    fn name(&self) -> &'static str {
        "fcfs"
    }
    fn rank(&self, r: &View) -> Rank {
        rank_of(r.arrival_ns)
    }
}
