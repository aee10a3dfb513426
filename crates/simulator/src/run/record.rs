//! A recording: everything that arrived, was decided and happened to blocks, in the order in which it did.
//!
//! The first line names format and version; behind it, per turn of the scheduler, the lines of its event log, of its
//! decision log, and one line `{"at":…,"blocks":[[group,"change",block,seq,"reason"],…]}` of block events. A decision
//! `admit` names the sequence that the request has from then on.
use kvist_cache::{BlockEvent, PrefixEvent};
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
    blocks: Vec<BlockEvent>,
    prefixes: Vec<PrefixEvent>,
    line: String,
}

impl<'s> Recording<'s> {
    pub fn begin(sink: &'s mut Recorder<'s>, scheduler: &mut Scheduler) -> Self {
        scheduler.record();
        scheduler.cache_mut().watch(true);
        sink(Part::Header, &format!("{{\"format\":\"kvist-recording\",\"version\":{RECORDING_VERSION}}}\n"));
        Recording { sink, blocks: Vec::new(), prefixes: Vec::new(), line: String::new() }
    }

    pub fn turn(&mut self, now_ns: u64, scheduler: &mut Scheduler) {
        let (events, decisions) = (scheduler.events().take(), scheduler.decisions().take());
        for (part, lines) in [(Part::Events, events), (Part::Decisions, decisions)] {
            if !lines.is_empty() {
                (self.sink)(part, &lines);
            }
        }
        self.blocks.clear();
        self.prefixes.clear(); // the same told by content, which a recording does not hold
        scheduler.cache_mut().drain_events(&mut self.blocks, &mut self.prefixes);
        if self.blocks.is_empty() {
            return;
        }
        self.line.clear();
        // Writing to a `String` does not fail.
        let _ = write!(self.line, "{{\"at\":{now_ns},\"blocks\":[");
        for (i, event) in self.blocks.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let BlockEvent { group, block, change, reason, .. } = event;
            let _ = write!(self.line, "{comma}[{group},\"{}\",{block},", change.name());
            let _ = match event.seq {
                Some(seq) => write!(self.line, "{seq}"),
                None => self.line.write_str("null"),
            };
            let _ = write!(self.line, ",\"{}\"]", reason.name());
        }
        self.line.push_str("]}\n");
        (self.sink)(Part::Blocks, &self.line);
    }
}
