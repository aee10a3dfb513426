//! What the tiers have of a prompt.
use super::{FindOrder, Order, Run};
use crate::entry::Lower;
use crate::request::RequestId;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Until when a request waits for its lookup.
    pub(super) fn asked_until(&self, index: u32) -> Option<u64> {
        match self.entries[index as usize].lower {
            Lower::Asked { until_ns } => Some(until_ns),
            _ => None,
        }
    }

    /// Asks for what the tiers have of a prompt, when its request arrives, and when it loses its cells. `of_all`: also if the KV
    /// cache has everything now.
    pub(crate) fn ask_tiers(&mut self, now_ns: u64, index: u32, of_all: bool) {
        if self.tiers.is_none() {
            return;
        }
        let hit_tokens = self.lookup(&self.entries[index as usize]).hit_tokens;
        let Some(tiers) = &mut self.tiers else { return };
        let entry = &mut self.entries[index as usize];
        // The last token is computed in any case.
        let n_tokens = entry.wanted_content().min(entry.known - 1);
        let n_tokens = n_tokens - n_tokens % tiers.block_tokens;
        let wanted = if of_all { n_tokens > 0 } else { n_tokens > hit_tokens };
        if wanted && entry.prompt.vocabulary().is_some() {
            tiers.n_asked += 1;
            entry.lower = Lower::Asked { until_ns: now_ns.saturating_add(tiers.config.grace_ns) };
            tiers.orders.push(Order::Find(FindOrder {
                request: entry.id,
                salt: entry.salt.clone(),
                prompt: entry.prompt.clone(),
                n_tokens,
                hit_tokens,
            }));
        }
    }

    /// What the tiers have of the prompt of `request`: the answer to [`Order::Find`]. Call it between iterations. Ignored
    /// if the request is not live or waits no more for it.
    pub fn found(&mut self, now_ns: u64, request: RequestId, runs: Vec<Run>) {
        if self.tiers.is_none() {
            return;
        }
        let n = self.event();
        self.events.found(n, now_ns, request, &runs);
        let Some(&index) = self.by_id.get(&request) else { return };
        if self.asked_until(index).is_none() {
            return;
        }
        let n_tiers = self.tiers.as_ref().map_or(0, |tiers| tiers.config.list.len());
        let is_sound = |run: &Run| run.tier.is_none_or(|tier| usize::from(tier) < n_tiers);
        let sound = runs.iter().all(is_sound) && runs.is_sorted_by(|a, b| a.until < b.until);
        let found = sound && runs.iter().any(|run| run.tier.is_some());
        let lower = if found { Lower::Found { runs } } else { Lower::Done };
        self.set_lower(index, lower);
    }

    /// Changes what a request knows of the tiers.
    pub(crate) fn set_lower(&mut self, index: u32, lower: Lower) {
        let before = std::mem::replace(&mut self.entries[index as usize].lower, lower);
        if let (Lower::Asked { .. }, Some(tiers)) = (before, &mut self.tiers) {
            tiers.n_asked -= 1;
            self.blocked = None;
        }
    }
}
