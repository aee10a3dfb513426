//! A recording: everything that arrived, was decided and happened to blocks, in the order in which it did.
//!
//! The first line names format and version; behind it, per step, the lines of the scheduler's event log, of its decision
//! log, and at most two lines `{"step":…,"at":…,"blocks":[[group,"change",block,seq,"reason"],…]}` of block events: of
//! what the step was made room for and what it wrote, at its beginning; of what was stored and let go, at its end, under
//! the number of the next step. A change `copy_on_write` has the original behind its reason. A decision `admit` names the
//! sequence that the request has from then on. What is recorded runs one by one, so that times are those of single steps.
use super::memory::Memory;
use kvist_cache::{BlockEvent, Change};
use kvist_scheduler::Scheduler;
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
    /// A line of block events.
    Blocks,
}

/// Hears a recording, whole lines at a time.
pub type Recorder<'s> = dyn FnMut(Part, &str) + 's;

/// Of the format.
pub const RECORDING_VERSION: u32 = 1;

pub(super) struct Recording<'s> {
    sink: &'s mut Recorder<'s>,
    line: String,
}

impl<'s> Recording<'s> {
    pub fn begin(sink: &'s mut Recorder<'s>, scheduler: &mut Scheduler) -> Self {
        scheduler.record();
        sink(Part::Header, &format!("{{\"format\":\"kvist-recording\",\"version\":{RECORDING_VERSION}}}\n"));
        Recording { sink, line: String::new() }
    }

    /// A turn from `now_ns` to `end_ns`, of which `memory` has just heard.
    pub fn turn(&mut self, now_ns: u64, end_ns: u64, scheduler: &mut Scheduler, memory: &Memory) {
        let (events, decisions) = (scheduler.events().take(), scheduler.decisions().take());
        for (part, lines) in [(Part::Events, events), (Part::Decisions, decisions)] {
            if !lines.is_empty() {
                (self.sink)(part, &lines);
            }
        }
        let commits = memory.commits();
        let is_after = |event: &&BlockEvent| end_ns > now_ns && event.step >= commits;
        self.blocks(now_ns, memory.events.iter().filter(|event| !is_after(event)));
        self.blocks(end_ns, memory.events.iter().filter(is_after));
    }

    fn blocks<'e>(&mut self, at_ns: u64, events: impl Iterator<Item = &'e BlockEvent>) {
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
            (self.sink)(Part::Blocks, &self.line);
        }
    }
}
