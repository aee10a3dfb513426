//! One worker of a fleet, as its loop drives it.
//!
//! A step is computed when it begins, and its results wait until it is over: if the worker fails before, they are lost.
//! Several decode steps that may run as one are only planned when they begin. If a request arrives in between, they are
//! computed up to the first step by whose end it is there, as a single run would have done, which knows the time of the next
//! arrival; otherwise all of them when they are over. So a worker is not interrupted by arrivals at others.
use super::event::{Kind, Stamp};
use super::load::Load;
use crate::cost::StepCost;
use crate::run::Options;
use crate::run::tiers::{Contents, Shared};
use crate::run::worker::{Begun, Worker};
use kvist_cache::{Cache, PrefixEvent};
use kvist_scheduler::{BadConfig, Ended};

/// A request on its way: what the router notes about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    /// See [`Load`].
    pub number: usize,
    /// When it arrived first. A retry does not change that.
    pub at_ns: u64,
    /// Prompt tokens that the router expects in the worker's cache.
    pub credited_tokens: u32,
    /// The others, which count as work to come until the first token.
    pub backlog_tokens: u32,
    /// Whether the first token was generated.
    pub prefilled: bool,
}

impl Ticket {
    pub fn new(number: usize, at_ns: u64) -> Ticket {
        Ticket { number, at_ns, credited_tokens: 0, backlog_tokens: 0, prefilled: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// There is nothing to run until a request arrives, or at the latest at this time: a transfer of one of its tiers ends then, or a
    /// request has waited long enough for one.
    Sleeping { until_ns: Option<u64> },
    /// It begins its next step at this time: now, or when it has waited for its tiers.
    Ready { at_ns: u64 },
    /// A step that was computed is over at this time.
    Step { end_ns: u64 },
    /// Decode steps that were planned as one, and not computed.
    Planned { begin_ns: u64, end_ns: u64 },
}

pub(super) struct Member<'a> {
    pub worker: Worker<'a>,
    /// Changes when an event that was entered for it becomes void.
    stamp: Stamp,
    doing: Doing,
    /// Requests that its scheduler does not know yet.
    inbox: Vec<Ticket>,
    /// Live requests by their id in the scheduler; `None` where the id is free.
    live: Vec<Option<Ticket>>,
    vacant: Vec<u32>,
    ended: Vec<Ended>,
    cache_events: Vec<PrefixEvent>,
    watches_cache: bool,
}

/// The same, for one of several calls.
fn reborrow<'s>(shared: &'s mut Option<Shared<'_>>) -> Option<Shared<'s>> {
    shared.as_mut().map(|(store, worker)| (&mut **store, *worker))
}

impl<'a> Member<'a> {
    /// `watches_cache`: whether the router wants to know what the cache stores. `life`: a number that no other member of the
    /// fleet has or had.
    /// `shares_store`: whether the last of its tiers is shared.
    pub fn new(
        mut cache: Cache,
        cost: &'a dyn StepCost,
        options: &Options,
        watches_cache: bool,
        shares_store: bool,
        life: u64,
    ) -> Result<Self, BadConfig> {
        cache.watch_prefixes(watches_cache);
        let mut worker = Worker::new(cache, cost, options, None, options.one_by_one, shares_store)?;
        worker.executor.first_tokens = Some(Vec::new());
        Ok(Member {
            worker,
            stamp: Stamp { life, change: 0 },
            doing: Doing::Sleeping { until_ns: None },
            inbox: Vec::new(),
            live: Vec::new(),
            vacant: Vec::new(),
            ended: Vec::new(),
            cache_events: Vec::new(),
            watches_cache,
        })
    }

    /// What an event must bear to be one of this worker, as it is now.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// Whether it has no requests, and no ends that were not taken.
    pub fn is_idle(&self) -> bool {
        self.inbox.is_empty() && self.ended.is_empty() && self.live.iter().all(Option::is_none)
    }

    /// Whether it waits, without a step.
    pub fn is_asleep(&self) -> bool {
        matches!(self.doing, Doing::Sleeping { .. })
    }

    /// How much longer the step that it computed takes.
    pub fn left_of_step_ns(&self, now: u64) -> u64 {
        match self.doing {
            Doing::Step { end_ns } => end_ns.saturating_sub(now),
            _ => 0,
        }
    }

    /// The time and kind of its next event.
    pub fn next(&self) -> Option<(u64, Kind)> {
        match self.doing {
            Doing::Sleeping { until_ns } => until_ns.map(|at_ns| (at_ns, Kind::Begin)),
            Doing::Ready { at_ns } => Some((at_ns, Kind::Begin)),
            Doing::Step { end_ns } | Doing::Planned { end_ns, .. } => Some((end_ns, Kind::StepEnd)),
        }
    }

    fn set(&mut self, doing: Doing) {
        self.doing = doing;
        self.stamp.change += 1;
    }

    /// A request arrives at `now`. Returns the kind of the worker's next event if that changed: a step end if planned steps
    /// were computed.
    pub fn arrive(&mut self, now: u64, ticket: Ticket, shared: Option<Shared<'_>>) -> Option<Kind> {
        self.inbox.push(ticket);
        match self.doing {
            Doing::Sleeping { .. } => {
                self.set(Doing::Ready { at_ns: now });
                Some(Kind::Begin)
            }
            _ => self.interrupt(now, shared),
        }
    }

    /// Ends at `now` what need not go on as planned, because something has come. Returns the kind of the next event if that changed.
    fn interrupt(&mut self, now: u64, shared: Option<Shared<'_>>) -> Option<Kind> {
        match self.doing {
            Doing::Planned { .. } => {
                self.cut(now, shared);
                Some(Kind::StepEnd)
            }
            // It waits for its tiers, and looks at what else has come.
            Doing::Ready { at_ns } if at_ns > now => {
                self.set(Doing::Ready { at_ns: now });
                Some(Kind::Begin)
            }
            Doing::Sleeping { .. } | Doing::Ready { .. } | Doing::Step { .. } => None,
        }
    }

    /// The shared store is done with a transfer at `now`. Returns what [`arrive`](Self::arrive) returns.
    pub fn landed(&mut self, now: u64, transfer: u64, shared: Option<Shared<'_>>) -> Option<Kind> {
        self.worker.tiers.as_mut()?.landed(now, transfer);
        match self.doing {
            Doing::Sleeping { .. } => {
                let until_ns = self.worker.next_transfer_ns().map(|at_ns| at_ns.max(now));
                self.set(Doing::Sleeping { until_ns });
                Some(Kind::Begin)
            }
            _ => self.interrupt(now, shared),
        }
    }

    /// Computes steps that were planned as one, up to the first that ends at `now` or later. Returns whether there were any.
    pub fn cut(&mut self, now: u64, shared: Option<Shared<'_>>) -> bool {
        let Doing::Planned { begin_ns, .. } = self.doing else { return false };
        let end_ns = begin_ns.saturating_add(self.worker.run_planned(begin_ns, now));
        self.worker.carry_out(begin_ns, end_ns, shared);
        self.collect();
        self.set(Doing::Step { end_ns });
        true
    }

    /// Begins the next step at `now`, with all that has arrived. Returns whether a step was computed.
    pub fn begin(
        &mut self,
        now: u64,
        load: &Load<'_>,
        options: &Options,
        mut shared: Option<Shared<'_>>,
    ) -> bool {
        self.worker.report_transfers(now);
        for ticket in std::mem::take(&mut self.inbox) {
            let id = self.vacant.pop().unwrap_or_else(|| {
                self.live.push(None);
                (self.live.len() - 1) as u32
            });
            self.live[id as usize] = Some(ticket);
            self.worker.submit(now, id.into(), &load.request(ticket.number), ticket.at_ns, options);
        }
        self.worker.carry_out(now, now, reborrow(&mut shared));
        if let Some(at_ns) = self.worker.waits_until(now) {
            self.set(Doing::Ready { at_ns });
            return false;
        }
        let begun = self.worker.begin(now);
        let elapsed_ns = if let Begun::Ran { elapsed_ns } = begun { elapsed_ns } else { 0 };
        self.worker.carry_out(now, now.saturating_add(elapsed_ns), shared);
        self.collect();
        self.set(match begun {
            Begun::Nothing => {
                let until_ns = self.worker.next_transfer_ns().map(|at_ns| at_ns.max(now));
                Doing::Sleeping { until_ns }
            }
            Begun::Ran { elapsed_ns } => Doing::Step { end_ns: now.saturating_add(elapsed_ns) },
            Begun::Planned { ns } => Doing::Planned { begin_ns: now, end_ns: now.saturating_add(ns) },
        });
        matches!(begun, Begun::Ran { .. })
    }

    /// The step is over at `now`. Returns whether steps that were planned as one were computed.
    pub fn end_step(&mut self, now: u64, shared: Option<Shared<'_>>) -> bool {
        let computed = self.cut(u64::MAX, shared);
        self.set(Doing::Ready { at_ns: now });
        computed
    }

    /// Takes what the scheduler and the cache have to tell.
    fn collect(&mut self) {
        for ended in self.worker.scheduler.drain_ended() {
            if let Some(tiers) = &mut self.worker.tiers {
                tiers.forget(ended.id);
            }
            self.ended.push(ended);
        }
        if self.watches_cache {
            self.worker.scheduler.cache_mut().drain_prefix_events(&mut self.cache_events);
        }
    }

    /// The requests that generated their first token in the step that is over.
    pub fn take_first_tokens(&mut self) -> Vec<Ticket> {
        let Some(first) = &mut self.worker.executor.first_tokens else { return Vec::new() };
        let tickets = first.drain(..).filter_map(|id| {
            let ticket = self.live[id.0 as usize].as_mut()?;
            ticket.prefilled = true;
            Some(*ticket)
        });
        tickets.collect()
    }

    /// The requests that have ended by `now`, in the order in which they ended.
    pub fn take_ended(&mut self, now: u64) -> Vec<(Ticket, Ended)> {
        let mut taken = Vec::new();
        let (live, vacant) = (&mut self.live, &mut self.vacant);
        self.ended.retain(|ended| {
            let is_later = ended.ended_ns > now;
            if !is_later && let Some(ticket) = live[ended.id.0 as usize].take() {
                vacant.push(ended.id.0 as u32);
                taken.push((ticket, *ended));
            }
            is_later
        });
        taken
    }

    /// Takes what its durable tiers have, with their numbers.
    pub fn take_durable(&mut self, is_durable: &[bool]) -> Vec<(usize, Contents)> {
        let Some(tiers) = &mut self.worker.tiers else { return Vec::new() };
        let durable = is_durable.iter().enumerate().filter(|(_, is_durable)| **is_durable);
        durable.filter_map(|(tier, _)| Some((tier, tiers.take_contents(tier)?))).collect()
    }

    /// Gives it what its durable tiers had in an earlier life. Their counts begin anew.
    pub fn put_durable(&mut self, durable: Vec<(usize, Contents)>) {
        let Some(tiers) = &mut self.worker.tiers else { return };
        for (tier, mut contents) in durable {
            contents.restart_counts();
            tiers.put_contents(tier, contents);
        }
    }

    pub fn take_cache_events(&mut self) -> std::vec::Drain<'_, PrefixEvent> {
        self.cache_events.drain(..)
    }

    /// All its requests, in order of arrival, as they were before they were sent here.
    pub fn into_tickets(self) -> Vec<Ticket> {
        let tickets = self.live.into_iter().flatten().chain(self.inbox);
        let mut tickets: Vec<Ticket> =
            tickets.map(|ticket| Ticket::new(ticket.number, ticket.at_ns)).collect();
        tickets.sort_unstable_by_key(|ticket| (ticket.at_ns, ticket.number));
        tickets
    }
}
