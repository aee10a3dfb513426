//! A recording: all arrivals, decisions and block events of a run, in the order in which they happened.
//!
//! The first line names the format, its version and the layer groups. Then follow, per step: the lines of the
//! scheduler's event log, those of its decision log, the miss reasons of requests that ended, and at most two lines
//! `{"step":…,"at":…,"blocks":[[group,"change",block,seq,"reason"],…]}` of block events. The first is dated at the
//! beginning of the step and lists the blocks evicted and written for it. The second is dated at the end of the step
//! and lists the blocks stored and freed, under the number of the next step. For the change `copy_on_write`, the
//! source block follows the reason. An `admit` decision names the sequence that the request uses from then on.
//! Recorded steps run one by one, never as multi-step runs, so that every step has its own time.
use crate::request::Ended;
use crate::scheduler::Scheduler;
use kvist_cache::{BlockEvent, Cache, Change, GroupId};
use std::fmt::Write;

/// The kind of text passed to a [`Recorder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The first line.
    Header,
    /// Lines of the scheduler's event log.
    Events,
    /// Lines of its decision log.
    Decisions,
    /// Lines with the reasons why prefix hits ended.
    Misses,
    /// A line of block events.
    Blocks,
}

/// Receives a recording, in whole lines.
pub type Recorder<'s> = dyn FnMut(Part, &str) + 's;

/// Version of the recording format.
pub const RECORDING_VERSION: u32 = 1;

/// An active recording of one scheduler. It passes every line on at once and stores none.
#[derive(Debug)]
pub struct Recording {
    line: String,
    misses: String,
}

impl Recording {
    /// Turns on the scheduler's logs and the cache's block events, and writes the header. Earlier events are not
    /// included: a log for replay must begin before the first event, and a live view begins with a
    /// [`Snapshot`](crate::Snapshot).
    pub fn begin(scheduler: &mut Scheduler, sink: &mut Recorder<'_>) -> Recording {
        scheduler.record();
        scheduler.cache_mut().watch_blocks(true);
        let mut line =
            format!("{{\"format\":\"kvist-recording\",\"version\":{RECORDING_VERSION},\"groups\":[");
        for (i, group) in groups(scheduler.cache()).enumerate() {
            line.push_str(if i == 0 { "" } else { "," });
            line.push_str(&serde_json::to_string(&group).unwrap_or_default());
        }
        line.push_str("]}\n");
        sink(Part::Header, &line);
        Recording { line, misses: String::new() }
    }

    /// Turns off what [`Recording::begin`] turned on.
    pub fn end(self, scheduler: &mut Scheduler) {
        scheduler.record_no_more();
        scheduler.cache_mut().watch_blocks(false);
    }

    /// Notes that a request ended. If its miss reason is known, it is written with the next iteration.
    pub fn ended(&mut self, ended: &Ended) {
        let (Some(miss), id, at) = (ended.miss, ended.id, ended.ended_ns) else { return };
        let (reason, position) = (miss.name(), miss.position());
        let line = format!("{{\"at\":{at},\"miss\":{id},\"reason\":\"{reason}\",\"position\":{position}}}\n");
        self.misses.push_str(&line);
    }

    /// Writes the iteration that has just run, from `now_ns` to `end_ns`. `blocks` are the events from
    /// [`Cache::drain_block_events`] since the previous iteration.
    pub fn iteration(
        &mut self,
        now_ns: u64,
        end_ns: u64,
        scheduler: &mut Scheduler,
        blocks: &[BlockEvent],
        sink: &mut Recorder<'_>,
    ) {
        let (events, decisions) = (scheduler.events().take(), scheduler.decisions().take());
        for (part, lines) in
            [(Part::Events, &events), (Part::Decisions, &decisions), (Part::Misses, &self.misses)]
        {
            if !lines.is_empty() {
                sink(part, lines);
            }
        }
        self.misses.clear();
        let commits = scheduler.counters().steps; // recorded steps run one by one
        let is_after = |event: &&BlockEvent| end_ns > now_ns && event.step >= commits;
        self.blocks(now_ns, blocks.iter().filter(|event| !is_after(event)), sink);
        self.blocks(end_ns, blocks.iter().filter(is_after), sink);
    }

    fn blocks<'e>(
        &mut self,
        at_ns: u64,
        events: impl Iterator<Item = &'e BlockEvent>,
        sink: &mut Recorder<'_>,
    ) {
        self.line.clear();
        // Writing to a `String` does not fail.
        for event in events {
            let BlockEvent { step, group, block, change, reason, .. } = event;
            let _ = match self.line.is_empty() {
                true => write!(self.line, "{{\"step\":{step},\"at\":{at_ns},\"blocks\":["),
                false => self.line.write_str(","),
            };
            let _ = write!(self.line, "[{group},\"{}\",{block},", change.name());
            let _ = match event.seq {
                Some(seq) => write!(self.line, "{seq}"),
                None => self.line.write_str("null"),
            };
            let _ = write!(self.line, ",\"{}\"", reason.name());
            if let Change::CopyOnWrite { from } | Change::Move { from } = change {
                let _ = write!(self.line, ",{from}");
            }
            self.line.push(']');
        }
        if !self.line.is_empty() {
            self.line.push_str("]}\n");
            sink(Part::Blocks, &self.line);
        }
    }
}

/// One layer group, as named in headers and snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GroupShape {
    /// Tokens per block.
    pub block_tokens: u32,
    /// Number of blocks; `None` if unbounded.
    pub blocks: Option<u32>,
    /// Size of the sliding window in positions; `None` for full attention.
    pub window: Option<u32>,
}

/// The layer groups of `cache`, in order.
pub(crate) fn groups(cache: &Cache) -> impl Iterator<Item = GroupShape> + '_ {
    cache.occupancy().enumerate().map(|(group, occupancy)| {
        let blocks = occupancy.capacity_cells / occupancy.block_tokens;
        GroupShape {
            block_tokens: occupancy.block_tokens,
            blocks: (blocks < u32::MAX / occupancy.block_tokens).then_some(blocks),
            window: cache.window(GroupId(group as u16)),
        }
    })
}
