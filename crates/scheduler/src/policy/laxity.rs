//! Least laxity first, preemptive: A. K. Mok, *Fundamental design problems of distributed systems for the
//! hard-real-time environment*, PhD thesis, MIT 1983. Laxity is deadline − now − remaining work; `now` is the same for
//! all requests and cancels out. Textbook laxity thrashes: a request that is served gains laxity and is preempted at
//! once. To prevent that, a preemption victim is judged by its laxity on arrival, which is lower, so progress never
//! makes a request easier to preempt. Requests without a deadline come last.
use super::{Rank, SchedulingPolicy, View, rank_of};
use crate::config::TokenWork;

pub struct Laxity {
    pub work: TokenWork,
}

impl SchedulingPolicy for Laxity {
    fn name(&self) -> &'static str {
        "laxity"
    }
    fn rank(&self, r: &View) -> Rank {
        match r.deadline_ns {
            Some(at) => rank_of(at).saturating_sub(rank_of(r.work_left_ns(self.work))),
            None => Rank::MAX,
        }
    }
    fn preempts(&self) -> bool {
        true
    }
}
