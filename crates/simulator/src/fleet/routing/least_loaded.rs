//! The worker with the fewest requests in flight, counted by the router; of several, the first. This is what the policies
//! of vllm-router 0.1.17 and smg 1.13.0 fall back to when prefixes do not decide.
use super::{Asked, Choice, Loads, Routing, View};

pub(super) struct LeastLoaded;

impl Routing for LeastLoaded {
    fn choose(&mut self, _: &Asked<'_>, loads: &Loads, _: &View) -> Option<Choice> {
        loads.fewest_requests().map(|(_, worker)| Choice::without_credit(worker))
    }
}
