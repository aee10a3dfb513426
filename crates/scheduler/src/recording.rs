//! A recording: everything that arrived, was decided and happened to blocks, in the order in which it did.
//!
//! The first line names format, version and layer groups; behind it, per step, the lines of the scheduler's event log, of
//! its decision log, why prompts of those who ended had missed, and at most two lines
//! `{"step":…,"at":…,"blocks":[[group,"change",block,seq,"reason"],…]}` of block events: of
//! what the step was made room for and what it wrote, at its beginning; of what was stored and let go, at its end, under
//! the number of the next step. A change `copy_on_write` has the original behind its reason. A decision `admit` names the
//! sequence that the request has from then on. What is recorded runs one by one, so that times are those of single steps.
use crate::request::Ended;
use crate::scheduler::Scheduler;
use kvist_cache::{BlockEvent, Cache, Change, GroupId};
use std::fmt::Write;

/// What a text that a recording hears is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The first line.
    Header,
    /// Lines of the scheduler's event log.
    Events,
    /// Lines of its decision log.
    Decisions,
    /// Lines that say why prefix hits ended.
    Misses,
    /// A line of block events.
    Blocks,
}

/// Hears a recording, whole lines at a time.
pub type Recorder<'s> = dyn FnMut(Part, &str) + 's;

/// Of the format.
pub const RECORDING_VERSION: u32 = 1;

/// What is being written down of one scheduler. It hands every line on at once and keeps none.
#[derive(Debug)]
pub struct Recording {
    line: String,
    misses: String,
}

impl Recording {
    /// Switches the scheduler's logs and the cache's block events on, and says the header. What happened before is not told:
    /// a log that is to be replayed begins before the first event, a live view with a [`Snapshot`](crate::Snapshot).
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

    /// Switches off what [`Recording::begin`] switched on.
    pub fn end(self, scheduler: &mut Scheduler) {
        scheduler.record_no_more();
        scheduler.cache_mut().watch_blocks(false);
    }

    /// A request ended: if its miss was explained, the next turn's lines say so.
    pub fn ended(&mut self, ended: &Ended) {
        let (Some(miss), id, at) = (ended.miss, ended.id, ended.ended_ns) else { return };
        let (reason, position) = (miss.name(), miss.position());
        let line = format!("{{\"at\":{at},\"miss\":{id},\"reason\":\"{reason}\",\"position\":{position}}}\n");
        self.misses.push_str(&line);
    }

    /// The turn that has just run, from `now_ns` to `end_ns`; `blocks` is what [`Cache::drain_events`] gave since the turn
    /// before.
    pub fn turn(
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
        let commits = scheduler.counters().steps; // each was run by itself
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

/// One layer group, as headers and snapshots name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GroupShape {
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Blocks it can hold; `None` if there is no bound.
    pub blocks: Option<u32>,
    /// Positions that a query sees, if not all.
    pub window: Option<u32>,
}

/// The layer groups of `cache`, in order.
pub(crate) fn groups(cache: &Cache) -> impl Iterator<Item = GroupShape> + '_ {
    cache.room().enumerate().map(|(group, room)| {
        let blocks = room.capacity_cells / room.block_tokens;
        GroupShape {
            block_tokens: room.block_tokens,
            blocks: (blocks < u32::MAX / room.block_tokens).then_some(blocks),
            window: cache.window(GroupId(group as u16)),
        }
    })
}
