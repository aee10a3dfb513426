//! Each worker in turn, as `round_robin` of vllm-router 0.1.17: the n-th request goes to worker n modulo those that are
//! there.
use super::{Asked, Choice, Loads, Routing, View};

#[derive(Default)]
pub(super) struct RoundRobin {
    n_requests: usize,
}

impl Routing for RoundRobin {
    fn choose(&mut self, _: &Asked<'_>, loads: &Loads, _: &View) -> Option<Choice> {
        let alive = loads.alive();
        let at = self.n_requests.checked_rem(alive.len())?;
        self.n_requests += 1;
        Some(Choice::without_credit(alive[at]))
    }
}
