//! What the tiers have of a prompt.
use super::{FindOrder, Order, Run, TierState, Write};
use crate::entry::{Entry, Lower, State};
use crate::request::RequestId;
use crate::scheduler::Scheduler;

/// A waiting request is looked up again after so many times [`Tiers::grace_ns`](super::Tiers::grace_ns).
const ASK_AGAIN: u64 = 4;
/// So many waiting requests are looked up again: those that run next. In an overloaded server the queue is long, and a lookup
/// of every prompt in it each second would be work for nothing.
const FIRST_WAITING: usize = 16;

/// Whether another answer of the tiers is of use to a request that has one: it waits, without cells.
pub(super) fn may_learn(entry: &Entry) -> bool {
    matches!(entry.state, State::Waiting(_))
        && entry.seq.is_none()
        && !matches!(entry.lower, Lower::Asked { .. })
}

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
        let waits = self.push_find(now_ns, index, of_all);
        let Some(tiers) = &mut self.tiers else { return };
        if !waits {
            // Nothing is to be loaded. The tiers hear all the same that the prompt is used, and say what they lack of it.
            if tiers.config.write == Write::Through {
                self.push_find(now_ns, index, true);
            }
        } else {
            tiers.n_asked += 1;
            tiers.just_asked = Some(tiers.just_asked.map_or((now_ns, 1), |(first_ns, n)| (first_ns, n + 1)));
            let entry = &mut self.entries[index as usize];
            entry.lower = Lower::Asked { until_ns: now_ns.saturating_add(tiers.config.grace_ns) };
            entry.found_until = 0;
        }
    }

    /// Returns whether there is anything to ask for.
    fn push_find(&mut self, now_ns: u64, index: u32, of_all: bool) -> bool {
        if self.tiers.is_none() {
            return false;
        }
        let hit_tokens = self.lookup(&self.entries[index as usize]).hit_tokens;
        let Some(tiers) = &mut self.tiers else { return false };
        let entry = &mut self.entries[index as usize];
        // The last token is computed in any case.
        let n_tokens = entry.wanted_content().min(entry.known - 1);
        let n_tokens = n_tokens - n_tokens % tiers.block_tokens;
        entry.asked_ns = now_ns;
        let wanted = if of_all { n_tokens > 0 } else { n_tokens > hit_tokens };
        let asks = wanted && entry.prompt.vocabulary().is_some();
        if asks {
            let (request, salt, prompt) = (entry.id, entry.salt.clone(), entry.prompt.clone());
            tiers.orders.push(Order::Find(FindOrder { request, salt, prompt, n_tokens, hit_tokens }));
        }
        asks
    }

    /// Looks the first waiting requests up again if they have waited for long: the tiers may have more by now, from an earlier turn
    /// of the same chat for example. They do not wait for the answer.
    pub(super) fn look_again(&mut self, now_ns: u64) {
        let Some(tiers) = &self.tiers else { return };
        let is_stale = |index: &u32| {
            may_learn(&self.entries[*index as usize])
                && self.looked_up_again_ns(tiers, *index).is_some_and(|at_ns| at_ns <= now_ns)
        };
        let stale: Vec<u32> = self.first_waiting().filter(is_stale).collect();
        for index in stale {
            self.push_find(now_ns, index, false);
            self.batch_changed = true; // several steps at once could last longer than the lookup
        }
    }

    /// The waiting requests that are looked up again.
    pub(super) fn first_waiting(&self) -> impl Iterator<Item = u32> {
        self.waiting.iter().take(FIRST_WAITING).map(|key| key.index)
    }

    /// `None` if the configuration says that no request waits for a tier.
    pub(super) fn looked_up_again_ns(&self, tiers: &TierState, index: u32) -> Option<u64> {
        let every_ns = tiers.config.grace_ns.saturating_mul(ASK_AGAIN);
        (every_ns > 0).then(|| self.entries[index as usize].asked_ns.saturating_add(every_ns))
    }

    /// What the tiers have of the prompt of `request`: the answer to [`Order::Find`]. Call it between iterations. Ignored
    /// if the request is not live, has cells, or has heard of as much before.
    pub fn found(&mut self, now_ns: u64, request: RequestId, runs: Vec<Run>) {
        if self.tiers.is_none() {
            return;
        }
        let n = self.event();
        self.events.found(n, now_ns, request, &runs);
        let Some(&index) = self.by_id.get(&request) else { return };
        let n_tiers = self.tiers.as_ref().map_or(0, |tiers| tiers.config.list.len());
        let is_sound = |run: &Run| run.tier.is_none_or(|tier| usize::from(tier) < n_tiers);
        let sound = runs.iter().all(is_sound) && runs.is_sorted_by(|a, b| a.until < b.until);
        let has_any = sound && runs.iter().any(|run| run.tier.is_some() && run.until > 0);
        // The last end of a load: of a model with windows the tiers may have more of its blocks before they have what the windows see.
        let may_end = |run: &&Run| run.tier.is_some() && run.may_end_at(run.until);
        let until = runs.iter().rfind(may_end).filter(|_| sound).map_or(0, |run| run.until);
        if sound {
            self.copy_again(index, &runs);
        }
        let entry = &mut self.entries[index as usize];
        let is_asked = matches!(entry.lower, Lower::Asked { .. });
        let learns = may_learn(entry) && until > entry.found_until;
        if !is_asked && !learns {
            return;
        }
        entry.found_until = until;
        self.blocked = None;
        self.set_lower(index, if has_any { Lower::Found { runs } } else { Lower::Done });
    }

    /// Changes what a request knows of the tiers.
    pub(crate) fn set_lower(&mut self, index: u32, lower: Lower) {
        let before = std::mem::replace(&mut self.entries[index as usize].lower, lower);
        if let (Lower::Asked { until_ns }, Some(tiers)) = (before, &mut self.tiers) {
            tiers.n_asked -= 1;
            let is_of_now = |first_ns: u64| until_ns >= first_ns.saturating_add(tiers.config.grace_ns);
            tiers.just_asked = match tiers.just_asked {
                Some((first_ns, n)) if is_of_now(first_ns) => (n > 1).then_some((first_ns, n - 1)),
                other => other,
            };
            self.blocked = None;
        }
    }
}
