//! Replays an event log and reproduces its decision log byte for byte.
use crate::config::{BadConfig, Config};
use crate::drafts::{BatchDrafts, LoggedDraft, Lookahead};
use crate::executor::Batch;
use crate::lengths::Truth;
use crate::log::CacheShape;
use crate::log::{LOG_VERSION, LoggedAdvance};
use crate::outcome::{Outcome, Sampled};
use crate::request::{Request, RequestId};
use crate::scheduler::Scheduler;
use crate::tiers::{NamedBlock, Run, TransferId};
use kvist_cache::Cache;
use serde::Deserialize;
use std::io::BufRead;

/// Why an event log cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The log could not be read.
    #[error("line {line} of the event log: {source}")]
    Read {
        /// Line number, from 1.
        line: usize,
        /// The I/O error.
        source: std::io::Error,
    },
    /// A line is malformed or does not match the replay.
    #[error("line {line} of the event log: {what}")]
    Line {
        /// Line number, from 1, counting only lines of the event log.
        line: usize,
        /// What was found, and what was expected.
        what: String,
    },
    /// The scheduler rejects the recorded configuration.
    #[error(transparent)]
    Config(#[from] BadConfig),
}

#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
    config: Config,
    cache: Option<CacheShape>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Event {
    n: u64,
    at: u64,
    arrive: Option<Request>,
    cancel: Option<RequestId>,
    forget: Option<String>,
    resize: Option<Vec<u32>>,
    resized: Option<bool>,
    #[serde(default)]
    idle: bool,
    #[serde(default)]
    abandoned: bool,
    steps: Option<u32>,
    #[serde(default)]
    elapsed: u64,
    #[serde(default)]
    failed: bool,
    #[serde(default)]
    sampled: Vec<Option<u32>>,
    #[serde(default)]
    finished: Vec<usize>,
    #[serde(default)]
    drafts: Vec<LoggedDraft>,
    /// Given instead of `sampled` and `finished` where they do not say enough.
    advances: Option<Vec<LoggedAdvance>>,
    /// What tiers have of this request's prompt.
    found: Option<RequestId>,
    #[serde(default)]
    runs: Vec<Run>,
    /// This load has ended.
    loaded: Option<TransferId>,
    /// This copy to a tier has ended.
    stored: Option<TransferId>,
    /// These blocks were not written to a tier.
    unsaved: Option<Vec<NamedBlock>>,
    #[serde(default)]
    ok: bool,
    /// Of a load that has failed, those that arrived before it did.
    #[serde(default)]
    tokens: u32,
    #[serde(default)]
    took: u64,
}

impl Event {
    /// The recorded outcome of `batch`. `Err` has what does not match.
    fn outcome(&self, batch: Batch<'_>, steps: u32) -> Result<Outcome, String> {
        let mut outcome = Outcome::default();
        (outcome.elapsed_ns, outcome.failed) = (self.elapsed, self.failed);
        if batch.steps != steps {
            return Err(format!("the log ran {steps} steps; in the replay {} are possible", batch.steps));
        }
        if outcome.failed {
            return Ok(outcome);
        }
        if let Some(advances) = &self.advances {
            advances.iter().try_for_each(|advance| advance.push_to(&mut outcome))?;
            return Ok(outcome);
        }
        let n = batch.work.iter().filter(|w| w.samples).count();
        if self.sampled.len() != n {
            return Err(format!("the log sampled {} tokens; the replay expects {n}", self.sampled.len()));
        }
        let mut sampled = self.sampled.iter().enumerate();
        outcome.sample_each(batch, |_| {
            let (i, token) = sampled.next().map_or((0, None), |(i, token)| (i, *token));
            Sampled { token, finished: self.finished.contains(&i) }
        });
        Ok(outcome)
    }
}

/// What the log says the driver added to a batch.
struct Recorded {
    steps: u32,
    drafts: BatchDrafts,
    /// Why the drafts do not fit the batch.
    misfit: Option<String>,
}

impl Lookahead for Recorded {
    fn max_fused_steps(&mut self, _: Batch<'_>, limit: u32) -> u32 {
        self.steps.min(limit)
    }
    fn draft(&mut self, batch: Batch<'_>, limit: u32, drafts: &mut BatchDrafts) {
        match self.drafts.check(batch, limit) {
            Ok(()) => drafts.clone_from(&self.drafts),
            Err(what) => self.misfit = Some(what),
        }
    }
}

/// A replayed iteration.
#[derive(Clone, Copy)]
pub struct Replayed<'a> {
    /// Start of the iteration.
    pub now_ns: u64,
    /// The batch that was run.
    pub batch: Batch<'a>,
    /// What became of it.
    pub outcome: &'a Outcome,
}

/// A line-by-line replay.
pub struct Replay {
    scheduler: Scheduler,
    /// Number of the next line, from 1.
    line: usize,
}

fn wrong(line: usize, what: String) -> ReplayError {
    ReplayError::Line { line, what }
}

impl Replay {
    /// Starts a replay from the first line of an event log. `cache` must be built as in the recorded run; `None`
    /// builds the one that the line describes. `truth` must be the one of the recorded run, if it had one.
    ///
    /// # Errors
    /// The line is not a valid header, the configuration does not fit, or no cache is given and none is described.
    pub fn begin(
        header: &str,
        cache: Option<Cache>,
        truth: Option<Box<dyn Truth>>,
    ) -> Result<Replay, ReplayError> {
        let header: Header =
            serde_json::from_str(header).map_err(|e| wrong(1, format!("not a header: {e}")))?;
        if (header.format.as_str(), header.version) != ("kvist-events", LOG_VERSION) {
            let found = format!("{} version {}", header.format, header.version);
            return Err(wrong(1, format!("found {found}, expected kvist-events version {LOG_VERSION}")));
        }
        let cache = match (cache, header.cache) {
            (Some(cache), _) => cache,
            (None, Some(shape)) => Cache::paged(&shape.spec())
                .map_err(|e| wrong(1, format!("the described cache cannot be made: {e}")))?,
            (None, None) => {
                let what =
                    "it does not describe its cache, which is not paged or was recorded by an older program";
                return Err(wrong(1, what.into()));
            }
        };
        let mut scheduler = Scheduler::new(header.config, cache, truth)?;
        scheduler.record();
        Ok(Replay { scheduler, line: 2 })
    }

    /// Replays the next line. `ran` is called for an iteration that ran steps.
    ///
    /// # Errors The line is not an event, or it does not match the state of the replay. The replay cannot continue
    /// after an error.
    pub fn event(
        &mut self,
        text: &str,
        ran: Option<&mut dyn FnMut(Replayed<'_>)>,
    ) -> Result<(), ReplayError> {
        let line = self.line;
        self.line += 1;
        let scheduler = &mut self.scheduler;
        let event: Event =
            serde_json::from_str(text).map_err(|e| wrong(line, format!("not an event: {e}")))?;
        let expected = line as u64 - 2;
        if event.n != expected {
            return Err(wrong(
                line,
                format!("found event {}, expected {expected}: lines are missing or duplicated", event.n),
            ));
        }
        let kinds =
            [event.arrive.is_some(), event.cancel.is_some(), event.forget.is_some(), event.steps.is_some()];
        let of_tiers =
            [event.found.is_some(), event.loaded.is_some(), event.stored.is_some(), event.unsaved.is_some()];
        let of_plans = [event.idle, event.abandoned];
        let of_capacity = [event.resize.is_some(), event.resized.is_some()];
        let n_kinds =
            kinds.into_iter().chain(of_capacity).chain(of_tiers).chain(of_plans).filter(|&is| is).count();
        if n_kinds != 1 {
            let what = "expected one of arrive, cancel, forget, resize, resized, steps, idle, abandoned, found, loaded, stored and unsaved";
            return Err(wrong(line, what.into()));
        }
        if let Some(request) = event.arrive {
            scheduler.arrive(event.at, request).map_err(|e| wrong(line, e.to_string()))?;
        } else if let Some(id) = event.cancel {
            if !scheduler.cancel(event.at, id) {
                return Err(wrong(line, format!("request {id} is cancelled, but is not live")));
            }
        } else if let Some(salt) = event.forget {
            scheduler.forget(event.at, &salt);
        } else if let Some(capacity_tokens) = event.resize {
            // A refusal is repeated, too.
            let _ = scheduler.begin_resize(event.at, &capacity_tokens);
        } else if let Some(moved) = event.resized {
            scheduler.end_resize(event.at, moved);
        } else if let Some(id) = event.found {
            scheduler.found(event.at, id, event.runs);
        } else if let Some(id) = event.loaded {
            let tokens = if event.ok { u32::MAX } else { event.tokens };
            if !scheduler.loaded_part(event.at, id, tokens, event.took) {
                return Err(wrong(line, format!("load {id} has ended, but was not started")));
            }
        } else if let Some(id) = event.stored {
            if !scheduler.stored(event.at, id, event.ok) {
                return Err(wrong(line, format!("copy {id} has ended, but was not started")));
            }
        } else if let Some(blocks) = event.unsaved {
            scheduler.unsaved(event.at, &blocks);
        } else {
            let steps = event.steps.unwrap_or(1);
            let drafts = BatchDrafts::of_log(&event.drafts).map_err(|e| wrong(line, e))?;
            let mut recorded = Recorded { steps, drafts, misfit: None };
            let planned = scheduler.plan_run(event.at, &mut recorded);
            if let Some(what) = recorded.misfit {
                return Err(wrong(line, what));
            }
            match planned {
                None if event.idle => {}
                None => return Err(wrong(line, "idle is false in the log, true in the replay".into())),
                Some(_) if event.idle => {
                    return Err(wrong(line, "idle is true in the log, false in the replay".into()));
                }
                Some(planned) if event.abandoned => drop(planned),
                Some(planned) => {
                    let outcome = event.outcome(planned.batch(), steps).map_err(|e| wrong(line, e))?;
                    if let Some(ran) = ran {
                        ran(Replayed { now_ns: event.at, batch: planned.batch(), outcome: &outcome });
                    }
                    planned.complete(&outcome).map_err(|e| wrong(line, e.to_string()))?;
                }
            }
        }
        scheduler.drain_ended();
        scheduler.drain_orders();
        scheduler.events().take();
        Ok(())
    }

    /// The scheduler after the last replayed line.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The lines of the decision log since the last call.
    pub fn decisions(&mut self) -> String {
        self.scheduler.decisions().take()
    }
}

/// Replays `events` over `cache`, which must be built as in the recorded run (`None`: as described in the log's
/// header), with the same truth if it had one. Returns the decision log.
pub fn replay(
    events: impl BufRead,
    cache: impl Into<Option<Cache>>,
    truth: Option<Box<dyn Truth>>,
) -> Result<String, ReplayError> {
    let mut lines = events
        .lines()
        .enumerate()
        .map(|(i, text)| text.map_err(|source| ReplayError::Read { line: i + 1, source }));
    let Some(header) = lines.next() else {
        return Err(wrong(
            1,
            "the log is empty; its first line says format, version and configuration".into(),
        ));
    };
    let mut replay = Replay::begin(&header?, cache.into(), truth)?;
    let mut decisions = String::new();
    for line in lines {
        replay.event(&line?, None)?;
        decisions.push_str(&replay.decisions());
    }
    Ok(decisions)
}
