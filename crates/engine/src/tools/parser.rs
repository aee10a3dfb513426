//! Extracts tool calls from an answer that arrives in pieces.
//!
//! Text that cannot belong to a call is returned at once. Text that may begin a call is held back until that is
//! decided. Calls are returned whole. The result does not depend on how the text is split into pieces: a
//! decision is made only when no further text can change it.
#[cfg(test)]
mod tests;

use super::call::Found;
use super::qwen_coder::FUNCTION;
use super::reparse::LastParse;
use super::{Tool, ToolCall, ToolFormat};
use std::sync::Arc;

/// A part of the answer that has been decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolDelta {
    Content(String),
    /// The model's reasoning, if the format separates it from the answer.
    Reasoning(String),
    /// The `index`-th call of this answer, from 0, complete.
    Call {
        index: usize,
        call: ToolCall,
    },
}

/// Position in the answer where the undecided text begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    /// At the start of the answer.
    Start,
    /// Inside text.
    Text,
    /// After a call.
    Called,
}

/// Extracts tool calls from an answer; see the module documentation.
#[derive(Clone, Debug)]
pub struct ToolParser {
    format: ToolFormat,
    parallel: bool,
    /// Types of the parameters, needed for Qwen3-Coder.
    tools: Arc<[Tool]>,
    position: Position,
    pending: String,
    calls: usize,
    last_parse: LastParse,
}

impl ToolParser {
    /// Without `parallel` only the first call is returned; later ones are dropped.
    pub fn new(format: ToolFormat, parallel: bool, tools: Arc<[Tool]>) -> Self {
        ToolParser {
            format,
            parallel,
            tools,
            position: Position::Start,
            pending: String::new(),
            calls: 0,
            last_parse: LastParse::default(),
        }
    }

    /// Number of calls returned so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Adds a piece of the answer.
    pub fn push(&mut self, piece: &str, out: &mut Vec<ToolDelta>) {
        self.pending += piece;
        if self.last_parse.should_parse(self.pending.len(), self.format.may_complete(piece)) {
            self.parse(false, out);
        }
    }

    /// Ends the answer. The undecided text becomes a call if at most its closing mark is missing, otherwise
    /// text.
    pub fn finish(&mut self, out: &mut Vec<ToolDelta>) {
        self.parse(true, out);
        debug_assert!(self.pending.is_empty(), "{:?} stayed", self.pending);
    }

    fn parse(&mut self, end: bool, out: &mut Vec<ToolDelta>) {
        self.last_parse = LastParse::default();
        while self.parse_next(end, out) {}
    }

    /// Tries to decide about the beginning of the undecided text. Returns whether it did and there may be more.
    fn parse_next(&mut self, end: bool, out: &mut Vec<ToolDelta>) -> bool {
        let separates = |c: char| {
            c.is_whitespace()
                || (c == ';' && self.format == ToolFormat::Llama3 && self.position == Position::Called)
        };
        let blank = match self.position {
            Position::Text => 0,
            _ => self.pending.len() - self.pending.trim_start_matches(separates).len(),
        };
        let rest = &self.pending[blank..];
        if rest.is_empty() {
            if end && self.position == Position::Start {
                self.content(blank, out);
            } else if end {
                self.pending.clear();
            }
            return false;
        }
        // A closing mark after a call is dropped, even if the format does not require it.
        if let Some(closer) = self.format.closer().filter(|_| self.position == Position::Called) {
            if rest.starts_with(closer) {
                self.pending.drain(..blank + closer.len());
                return true;
            }
            if closer.starts_with(rest) {
                if end {
                    self.pending.clear();
                }
                return false;
            }
        }
        let find = |opener: &&'static str| rest.find(*opener).map(|at| (at, *opener));
        let opened = self.format.openers().iter().filter_map(find).min();
        let unmarked = self.position != Position::Text && self.format.begins_unmarked(rest);
        let (at, body) = match opened {
            _ if unmarked => (0, 0),
            Some((at, FUNCTION)) => (at, at), // the mark is part of the call
            Some((at, opener)) => (at, at + opener.len()),
            None => {
                let sure = if end { rest.len() } else { rest.len() - self.possible_start(rest) };
                if sure > 0 {
                    self.text(blank, sure, out);
                }
                return false;
            }
        };
        if at > 0 {
            self.text(blank, at, out);
            return true;
        }
        match self.format.read(&rest[body..], end, &self.tools) {
            Found::Unfinished => {
                self.last_parse = LastParse(self.pending.len());
                false
            }
            Found::Calls(calls, len) => {
                self.pending.drain(..blank + body + len);
                self.position = Position::Called;
                for call in calls {
                    if self.calls == 0 || self.parallel {
                        out.push(ToolDelta::Call { index: self.calls, call });
                        self.calls += 1;
                    }
                }
                true
            }
            Found::Nothing => {
                // Take at least the bracket, so that it is not parsed again.
                self.text(blank, body.max(1), out);
                true
            }
        }
    }

    /// Returns `len` bytes as text. The `blank` bytes before it are part of the text only at the start of an
    /// answer.
    fn text(&mut self, blank: usize, len: usize, out: &mut Vec<ToolDelta>) {
        if self.position == Position::Called {
            self.pending.drain(..blank);
            self.content(len, out);
        } else {
            self.content(blank + len, out);
        }
        self.position = Position::Text;
    }

    fn content(&mut self, len: usize, out: &mut Vec<ToolDelta>) {
        if len == 0 {
            return;
        }
        match out.last_mut() {
            Some(ToolDelta::Content(text)) => *text += &self.pending[..len],
            _ => out.push(ToolDelta::Content(self.pending[..len].to_string())),
        }
        self.pending.drain(..len);
    }

    /// Length of the longest suffix of `text` that is the beginning of an opening mark.
    fn possible_start(&self, text: &str) -> usize {
        let begins = |opener: &&str| {
            (1..opener.len().min(text.len() + 1)).rev().find(|n| text.ends_with(&opener[..*n])).unwrap_or(0)
        };
        self.format.openers().iter().map(begins).max().unwrap_or(0)
    }
}
