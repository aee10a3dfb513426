//! One iteration: plan a batch, let the driver execute it, and record the outcome.
//!
//! [`Scheduler::plan`] builds the batch (`batch.rs`), places it in the cache, and evicts cached blocks or preempts
//! requests if memory is short (`preempt.rs`). [`Planned::complete`] commits the step and records the emitted tokens.
use crate::drafts::{BatchDrafts, Lookahead, is_chain};
use crate::executor::{Batch, Executor, Work};
use crate::log::Decision;
use crate::memory::StepTime;
use crate::outcome::{BadOutcome, Emitted, Outcome};
use crate::preempt::Freed;
use crate::request::{End, RefusalReason};
use crate::scheduler::Scheduler;
use kvist_cache::{Kept, Refused, Step};

/// The result of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Iteration {
    /// Steps were run.
    Ran {
        /// Number of steps. More than 1 in a run of several decode steps.
        steps: u32,
        /// Total time of all of them.
        elapsed_ns: u64,
    },
    /// There is nothing to do until a request arrives.
    NothingToDo,
}

/// A planned step, between [`Scheduler::plan`] and [`Planned::complete`]. It borrows the scheduler, so nothing can
/// arrive, be cancelled or change the cache while the step is executed.
///
/// A plan that is dropped is abandoned: nothing is committed, no request advances, and the next plan starts over.
/// Requests admitted for it stay in the batch, and the event log records that, so that a replay decides the same. (A
/// plan that is leaked with [`std::mem::forget`] is abandoned too, but not recorded.)
///
/// ```compile_fail,E0499
/// use kvist_scheduler::*;
/// fn f(scheduler: &mut Scheduler, outcome: &Outcome) {
///     let planned = scheduler.plan(0).unwrap();
///     scheduler.cancel(0, RequestId(0)); // the plan still borrows the scheduler
///     planned.complete(outcome).unwrap();
/// }
/// ```
///
/// ```compile_fail,E0505
/// use kvist_scheduler::*;
/// fn f(scheduler: &mut Scheduler, outcome: &Outcome) {
///     let mut planned = scheduler.plan(0).unwrap();
///     let (_, step) = planned.split();
///     planned.complete(outcome).unwrap();
///     drop(step); // the step in flight still borrows the plan
/// }
/// ```
#[must_use = "a plan that is dropped is abandoned"]
pub struct Planned<'s> {
    scheduler: &'s mut Scheduler,
    now: StepTime,
    steps: u32,
    completed: bool,
}

impl Planned<'_> {
    /// The batch.
    pub fn batch(&self) -> Batch<'_> {
        let Scheduler { batch, entries, drafts, drafts_dropped, .. } = &*self.scheduler;
        let drafts = if *drafts_dropped { BatchDrafts::NONE } else { drafts };
        Batch { work: batch, steps: self.steps, entries, drafts }
    }

    /// The batch, and the step that places it in the cache. The step may be dropped at any time, but must not be
    /// committed: [`complete`](Self::complete) does that.
    pub fn split(&mut self) -> (Batch<'_>, Step<'_>) {
        let Scheduler { batch, entries, memory, plan, drafts, drafts_dropped, .. } = &mut *self.scheduler;
        let step = Step::of_plan(&mut memory.cache, plan);
        let step = step.expect("a planned step is committed by `complete` alone");
        let drafts = if *drafts_dropped { BatchDrafts::NONE } else { drafts };
        (Batch { work: batch, steps: self.steps, entries, drafts }, step)
    }

    /// Commits what the outcome says is kept, and records the emitted tokens and the ended requests. After an outcome
    /// that has `failed`, nothing is committed, and every request of the batch tries again in the next step.
    ///
    /// # Errors
    /// The outcome does not fit the batch. The step is abandoned, as if the plan had been dropped.
    pub fn complete(mut self, outcome: &Outcome) -> Result<Iteration, BadOutcome> {
        let (scheduler, now, steps) = (&mut *self.scheduler, self.now, self.steps);
        if !outcome.failed {
            scheduler.check(outcome)?;
            scheduler.commit(outcome)?;
        }
        self.completed = true;
        scheduler.note_outcome(now, steps, outcome);
        let elapsed_ns = outcome.elapsed_ns;
        let end_ns = now.now_ns.saturating_add(elapsed_ns);
        if outcome.failed {
            scheduler.note_failure(now, end_ns);
        } else {
            scheduler.note_success(now, steps, end_ns, outcome);
        }
        Ok(Iteration::Ran { steps, elapsed_ns })
    }
}

impl Drop for Planned<'_> {
    fn drop(&mut self) {
        if !self.completed {
            self.scheduler.note_abandoned(self.now);
        }
    }
}

/// Asks an executor on behalf of [`Scheduler::iterate`].
struct OfExecutor<'e> {
    now_ns: u64,
    executor: &'e mut dyn Executor,
}

impl Lookahead for OfExecutor<'_> {
    fn max_fused_steps(&mut self, batch: Batch<'_>, limit: u32) -> u32 {
        self.executor.max_fused_steps(self.now_ns, batch, limit)
    }
    fn draft(&mut self, batch: Batch<'_>, limit: u32, drafts: &mut BatchDrafts) {
        self.executor.draft(self.now_ns, batch, limit, drafts);
    }
}

impl Scheduler {
    /// Builds one step at `now_ns`, executes it and records the result. If the executor allows it
    /// ([`Executor::max_fused_steps`]), several decode steps run as one.
    ///
    /// # Panics
    /// If the executor's outcome does not fit its batch, which is a bug in the executor.
    pub fn iterate(&mut self, now_ns: u64, executor: &mut dyn Executor) -> Iteration {
        let mut outcome = std::mem::take(&mut self.outcome);
        outcome.clear();
        let iteration = match self.plan_run(now_ns, &mut OfExecutor { now_ns, executor }) {
            None => Iteration::NothingToDo,
            Some(mut planned) => {
                if let Some(tiers) = &mut planned.scheduler.tiers {
                    executor.begin_transfers(now_ns, tiers.orders_mut());
                }
                let (batch, step) = planned.split();
                executor.execute(now_ns, step, batch, &mut outcome);
                planned.complete(&outcome).unwrap_or_else(|bad| panic!("{bad}"))
            }
        };
        self.outcome = outcome;
        iteration
    }

    /// Plans one step at `now_ns`. `None` if there is nothing to do until a request arrives, a transfer of a tier ends, or
    /// a request has [waited long enough](Self::next_tier_deadline_ns) for one.
    pub fn plan(&mut self, now_ns: u64) -> Option<Planned<'_>> {
        self.plan_run(now_ns, &mut |_: Batch<'_>, _| 1)
    }

    /// Like [`plan`](Self::plan), but several decode steps may be planned as one, or drafts may be verified: `lookahead`
    /// decides, as an [`Executor`] does.
    pub fn plan_run(&mut self, now_ns: u64, lookahead: &mut dyn Lookahead) -> Option<Planned<'_>> {
        let now = self.timestamp(now_ns);
        let n_ended = self.ended.len();
        self.batch_changed = false;
        self.prompt_limit = self.memory.chunk_limit();
        self.drafts.clear();
        self.drafts_dropped = false;
        if self.tiers.is_some() {
            self.plan_tiers(now);
        }
        let mut admit = true;
        // Drafts are asked for once: they are part of the log, and one answer per plan is enough to replay it.
        let mut may_draft = true;
        while self.build_batch(now, admit) {
            let steps = if self.batch_changed { 1 } else { self.max_fused_steps(lookahead) };
            if steps == 1 && std::mem::take(&mut may_draft) {
                self.add_drafts(lookahead);
                if !self.drafts.is_empty() && self.place_drafts(now) {
                    return Some(Planned { scheduler: self, now, steps, completed: false });
                }
            }
            match self.place() {
                Ok(()) => return Some(Planned { scheduler: self, now, steps, completed: false }),
                // A group other than the counted one is full: fall back to single steps.
                Err(Refused::NoSpace { .. }) if steps > 1 => self.batch_changed = true,
                Err(Refused::NoSpace { group, needed, free, reclaimable }) => {
                    // Batch membership and token counts do not depend on cached blocks that no sequence uses. As long
                    // as the membership has not changed, evicting such blocks leaves the batch as it is.
                    let unchanged = !self.batch_changed;
                    let freed = self.free_memory(now, group, needed, free.saturating_add(reclaimable));
                    if freed == Freed::Later {
                        break;
                    }
                    if unchanged && freed == Freed::Evicted && self.place().is_ok() {
                        return Some(Planned { scheduler: self, now, steps, completed: false });
                    }
                    // A request preempted for space must not return in the same iteration, unless the batch is now
                    // empty.
                    admit = self.running.is_empty();
                }
                Err(refused) => panic!("the cache refused a step of {} spans: {refused}", self.spans.len()),
            }
        }
        // Nothing may run, although something was decided: copies in flight take the memory, or all requests wait for them.
        let tiers_changed = self.tiers.as_ref().is_some_and(|tiers| tiers.changed || self.batch_changed);
        if self.ended.len() > n_ended || tiers_changed {
            let n = self.event();
            self.events.idle(n, now_ns, &self.drafts);
        }
        None
    }

    /// Checks that every request of the batch can continue after this outcome.
    fn check(&self, outcome: &Outcome) -> Result<(), BadOutcome> {
        let (requests, got) = (self.batch.len(), outcome.n_advances());
        if requests != got {
            return Err(BadOutcome::Count { requests, got });
        }
        for (i, (work, advance)) in self.batch.iter().zip(outcome.advances()).enumerate() {
            let entry = &self.entries[work.index as usize];
            let kept = match advance.kept {
                Kept::All => work.n_tokens,
                Kept::First(n) => n.min(work.n_tokens), // the cache refuses more
                Kept::Path(_) if is_chain(self.drafts.parents(i)) => continue, // the cache refuses paths of chains
                Kept::Path(path) => path.len() as u32,
            };
            let (end, emitted) = (u64::from(work.first + kept), u64::from(advance.emitted.n_tokens()));
            let known = u64::from(entry.known);
            if emitted > 0 && end < known {
                return Err(BadOutcome::EmitsEarly(work.request));
            }
            let generated = u64::from(entry.generated()) + emitted;
            if generated > entry.max_new.into() {
                return Err(BadOutcome::EmitsTooMany { id: work.request, generated, max_new: entry.max_new });
            }
            let finished = advance.finished || generated == u64::from(entry.max_new);
            if !finished && end >= known + emitted {
                return Err(BadOutcome::NothingToCompute(work.request));
            }
        }
        Ok(())
    }

    /// Commits the planned step in the cache.
    fn commit(&mut self, outcome: &Outcome) -> Result<(), BadOutcome> {
        let step = Step::of_plan(&mut self.memory.cache, &mut self.plan).ok_or(BadOutcome::CacheChanged)?;
        if outcome.keeps_all() {
            step.commit();
        } else {
            let kept: Vec<Kept<'_>> = outcome.advances().map(|advance| advance.kept).collect();
            step.commit_kept(&kept)?;
        }
        Ok(())
    }

    fn note_outcome(&mut self, now: StepTime, steps: u32, outcome: &Outcome) {
        let n = self.event();
        let drafts = if self.drafts_dropped { BatchDrafts::NONE } else { &self.drafts };
        let batch = Batch { work: &self.batch, steps, entries: &self.entries, drafts };
        self.events.outcome(n, now.now_ns, batch, &self.drafts, outcome);
    }

    fn note_abandoned(&mut self, now: StepTime) {
        let n = self.event();
        self.events.abandoned(n, now.now_ns, &self.drafts);
    }

    fn note_failure(&mut self, now: StepTime, end_ns: u64) {
        self.counters.failed_steps += 1;
        self.failures += 1;
        self.decide(now, Decision::Failed);
        if self.failures < self.config.max_failures {
            return;
        }
        self.failures = 0;
        let now = StepTime { now_ns: end_ns, ..now };
        for i in 0..self.batch.len() {
            self.end(now, self.batch[i].index, End::Refused(RefusalReason::StepsFailed));
        }
    }

    fn note_success(&mut self, now: StepTime, steps: u32, end_ns: u64, outcome: &Outcome) {
        self.failures = 0;
        self.counters.steps += u64::from(steps);
        if self.tiers.is_some() {
            self.observe_step(outcome.elapsed_ns);
        }
        let log_chunks = self.decisions.is_on();
        let block = self.memory.block_tokens();
        let end = StepTime { step: self.counters.steps - 1, now_ns: end_ns };
        for i in 0..self.batch.len() {
            let (work, advance) = (self.batch[i], outcome.nth(i));
            if log_chunks && !work.decodes {
                let Work { request: id, first, n_tokens: n, .. } = work;
                self.decide(now, Decision::Chunk { id, first, n });
            }
            let entry = &mut self.entries[work.index as usize];
            let kept = match advance.kept {
                Kept::All => work.n_tokens,
                Kept::First(n) => n,
                Kept::Path(path) => path.len() as u32,
            };
            entry.cached += kept;
            entry.computed += u64::from(work.n_tokens);
            self.counters.computed_tokens += u64::from(work.n_tokens);
            let drafted =
                if self.drafts_dropped { 0 } else { self.drafts.parents(i).len().saturating_sub(1) };
            if drafted > 0 {
                let (drafted, accepted) = (drafted as u64, u64::from(kept.saturating_sub(1)));
                entry.draft_tokens += drafted;
                entry.accepted_tokens += accepted;
                self.counters.drafts += 1;
                self.counters.draft_tokens += drafted;
                self.counters.accepted_tokens += accepted;
            }
            let n_emitted = advance.emitted.n_tokens();
            if n_emitted > 0 {
                entry.first_token_ns.get_or_insert(end_ns);
                self.counters.sampled_tokens += u64::from(n_emitted);
            }
            match advance.emitted {
                Emitted::Tokens(tokens) => tokens.iter().for_each(|&token| entry.append(token)),
                Emitted::Unknown(n) => entry.known += n,
            }
            let finished = advance.finished || entry.generated() >= entry.max_new;
            let full = entry.cached.min(entry.known_content());
            let full = full - full % block;
            if full > entry.stored {
                let stored = std::mem::replace(&mut entry.stored, full);
                let seq = entry.seq.expect("a running request has a sequence");
                if self.memory.store(seq, &entry.prompt, stored, full, end) > 0 {
                    self.blocked = None;
                }
                if self.tiers.is_some() {
                    self.note_cached(work.index, stored, true);
                }
            }
            if finished {
                self.end(end, work.index, End::Finished);
            }
        }
    }
}
