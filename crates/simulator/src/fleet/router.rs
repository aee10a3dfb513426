//! The router: what it knows, and the policy that decides.
use super::FleetOptions;
use super::routing::{self, Asked, Choice, Routing};
use super::worker::Ticket;
use kvist_cache::{GroupId, PrefixEvent};
use std::collections::VecDeque;

mod loads;
mod view;

pub(super) use loads::{LoadOf, Loads};
pub(super) use view::{HoldersOf, View};

pub(super) struct Router {
    policy: Box<dyn Routing>,
    name: &'static str,
    needs_view: bool,
    needs_hashes: bool,
    loads: Loads,
    view: View,
    view_delay_ns: u64,
    /// What the view does not show yet, in order of time.
    on_their_way: VecDeque<News>,
    /// How often each worker has joined. News of an earlier life are not for its view.
    lives: Vec<u32>,
}

/// Blocks that one worker stored or evicted in one step: hashes, and whether they are stored.
struct News {
    at_ns: u64,
    worker: u32,
    life: u32,
    blocks: Vec<(u64, bool)>,
}

impl Router {
    pub fn new(options: &FleetOptions, n_workers: u32, block_tokens: u32) -> Router {
        Router {
            policy: routing::build(options, n_workers, block_tokens),
            name: options.policy.name(),
            needs_view: options.policy.needs_view(),
            needs_hashes: options.policy.needs_hashes(),
            loads: Loads::new(n_workers),
            view: View::new(n_workers),
            view_delay_ns: options.view_delay_ns,
            on_their_way: VecDeque::new(),
            lives: vec![0; n_workers as usize],
        }
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether the policy asks what caches store.
    pub fn needs_view(&self) -> bool {
        self.needs_view
    }

    /// Whether the policy asks for the hashes of a prompt's blocks.
    pub fn needs_hashes(&self) -> bool {
        self.needs_hashes
    }

    /// Chooses a worker at `now`, and counts the request as sent to it. `None` if no worker is there.
    pub fn choose(&mut self, now: u64, session: u64, prompt_tokens: u32, hashes: &[u64]) -> Option<Choice> {
        self.learn(now);
        let asked = Asked { session, prompt_tokens, hashes };
        let choice = self.policy.choose(&asked, &self.loads, &self.view)?;
        let backlog_tokens = prompt_tokens - choice.credited_tokens;
        self.loads.sent(choice.worker, prompt_tokens.into(), backlog_tokens.into());
        Some(choice)
    }

    /// Notes the news that have arrived by `now`.
    fn learn(&mut self, now: u64) {
        while self.on_their_way.front().is_some_and(|news| news.at_ns <= now)
            && let Some(news) = self.on_their_way.pop_front()
        {
            if self.lives[news.worker as usize] == news.life {
                for (hash, is_stored) in news.blocks {
                    self.view.note(news.worker, hash, is_stored);
                }
            }
        }
    }

    /// A step that ended at `now` has changed a worker's cache.
    pub fn publish(&mut self, now: u64, worker: u32, events: impl Iterator<Item = PrefixEvent>) {
        let blocks: Vec<(u64, bool)> = events
            .filter_map(|event| match event {
                PrefixEvent::Stored { group: GroupId(0), hash, .. } => Some((hash, true)),
                PrefixEvent::Removed { group: GroupId(0), hash, .. } => Some((hash, false)),
                _ => None,
            })
            .collect();
        if !blocks.is_empty() {
            let at_ns = now.saturating_add(self.view_delay_ns);
            self.on_their_way.push_back(News { at_ns, worker, life: self.lives[worker as usize], blocks });
        }
        self.learn(now); // also when no request comes any more, so that news do not pile up
    }

    /// A request has its first token.
    pub fn prefilled(&mut self, worker: u32, ticket: &Ticket) {
        self.loads.prefilled(worker, ticket.backlog_tokens.into());
    }

    /// A request has ended.
    pub fn ended(&mut self, worker: u32, ticket: &Ticket, prompt_tokens: u32) {
        let backlog_tokens = if ticket.prefilled { 0 } else { ticket.backlog_tokens };
        self.loads.ended(worker, prompt_tokens.into(), backlog_tokens.into());
    }

    pub fn joined(&mut self, worker: u32) {
        self.lives[worker as usize] += 1;
        self.loads.joined(worker);
        self.policy.joined(worker);
    }

    /// The worker is gone, with what it stored and its requests.
    pub fn left(&mut self, worker: u32) {
        self.lives[worker as usize] += 1;
        self.loads.left(worker);
        self.view.forget(worker);
        self.policy.left(worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Policy;

    /// News once waited for the next request: after the last one they piled up.
    #[test]
    fn news_are_noted_without_requests() {
        let policy = Policy::PrefixAware;
        let options = FleetOptions { policy, workers: 1, view_delay_ns: 50, ..FleetOptions::default() };
        let mut router = Router::new(&options, 1, 16);
        router.joined(0);
        for step in 0..100 {
            let removed = PrefixEvent::Removed { group: GroupId(0), block: 0, hash: step };
            router.publish(step * 10, 0, [removed].into_iter());
            assert!(router.on_their_way.len() <= 5, "{}", router.on_their_way.len());
        }
    }
}
