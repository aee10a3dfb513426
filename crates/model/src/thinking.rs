//! Reasoning between `<think>` and `</think>`, before the answer: Qwen3, DeepSeek R1, GLM 4.5, SmolLM3 and others write it.
//!
//! Some chat templates end the prompt with `<think>`, so that the answer begins inside the block. Others end it with an empty block, which
//! turns reasoning off.
use crate::harmony::Delta;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

pub const OPEN: &str = "<think>";
pub const CLOSE: &str = "</think>";

/// The marks that are tokens of the vocabulary. `None` if the model does not use the format: its chat template must have the closing mark.
pub fn marks(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<Vec<u32>> {
    let writes = template.source(false).contains(CLOSE);
    writes.then(|| [OPEN, CLOSE].iter().filter_map(|mark| tokenizer.token(mark)).collect())
}

/// Splits an answer that arrives in pieces into reasoning and content. Whitespace around the reasoning, and before the content, is dropped.
///
/// The result does not depend on how the text is cut. Text is returned as soon as no mark can begin in it.
#[derive(Clone, Debug)]
pub struct ThinkParser {
    place: Place,
    /// Text that is not decided yet.
    pending: String,
}

/// Where the undecided text begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// At the start of the answer.
    Start,
    /// Inside the block; `begun` if some of its text was returned.
    Inside {
        begun: bool,
    },
    /// After the block, before the content.
    After,
    Content,
}

/// A mark has a few tokens at most, and a line break may follow it.
const TAIL: usize = 12;

impl ThinkParser {
    /// `inside`: the prompt has opened the block.
    pub fn new(inside: bool) -> Self {
        let place = if inside { Place::Inside { begun: false } } else { Place::Start };
        ThinkParser { place, pending: String::new() }
    }

    /// For the answer to a prompt of these tokens. `marks`: those of the model ([`marks`]).
    pub fn after(tokenizer: &Tokenizer, marks: &[u32], prompt: &[u32]) -> Self {
        let mut stream = tokenizer.stream_with(marks);
        let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
        // A token that cannot be decoded is not a mark.
        let text: String = tail.iter().filter_map(|token| stream.push(*token).ok()).collect();
        Self::new(text.trim_end().ends_with(OPEN))
    }

    /// Adds a piece of the answer.
    pub fn push(&mut self, piece: &str, out: &mut Vec<Delta>) {
        self.pending += piece;
        while self.step(out) {}
    }

    /// Ends the answer. A block that is still open is reasoning.
    pub fn finish(&mut self, out: &mut Vec<Delta>) {
        let rest = std::mem::take(&mut self.pending);
        match self.place {
            Place::Inside { .. } => emit(rest.trim_end(), Delta::Reasoning, out),
            Place::Start | Place::Content => emit(&rest, Delta::Content, out),
            Place::After => {}
        }
    }

    /// Decides about the beginning of the pending text. Returns whether it did and there may be more.
    fn step(&mut self, out: &mut Vec<Delta>) -> bool {
        let text = self.pending.trim_start();
        let blank = self.pending.len() - text.len();
        match self.place {
            Place::Start if text.starts_with(OPEN) => {
                self.go(Place::Inside { begun: false }, blank + OPEN.len())
            }
            Place::Start if OPEN.starts_with(text) => false,
            Place::Start => self.go(Place::Content, 0),
            Place::Inside { begun } => {
                if !begun && blank > 0 {
                    self.pending.drain(..blank);
                }
                match self.pending.find(CLOSE) {
                    Some(at) => {
                        emit(self.pending[..at].trim_end(), Delta::Reasoning, out);
                        self.go(Place::After, at + CLOSE.len())
                    }
                    None => {
                        let sure = self.pending.len() - possible_start(&self.pending);
                        let sure = self.pending[..sure].trim_end().len();
                        emit(&self.pending[..sure], Delta::Reasoning, out);
                        self.pending.drain(..sure);
                        self.place = Place::Inside { begun: begun || sure > 0 };
                        false
                    }
                }
            }
            Place::After if text.is_empty() => {
                self.pending.clear();
                false
            }
            Place::After => self.go(Place::Content, blank),
            Place::Content => {
                emit(&std::mem::take(&mut self.pending), Delta::Content, out);
                false
            }
        }
    }

    /// Drops `read` bytes of the pending text, and continues at `place`.
    fn go(&mut self, place: Place, read: usize) -> bool {
        self.pending.drain(..read);
        self.place = place;
        true
    }
}

/// The length of the longest end of `text` that [`CLOSE`] may begin with.
fn possible_start(text: &str) -> usize {
    (1..CLOSE.len()).rev().find(|n| text.ends_with(&CLOSE[..*n])).unwrap_or(0)
}

fn emit(text: &str, of: impl FnOnce(String) -> Delta, out: &mut Vec<Delta>) {
    if !text.is_empty() {
        out.push(of(text.to_string()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reasoning and the content of an answer that comes in pieces of so many bytes, cut at characters.
    fn split(inside: bool, answer: &str, piece: usize) -> (String, String) {
        let (mut parser, mut out) = (ThinkParser::new(inside), Vec::new());
        let (mut reasoning, mut content) = (String::new(), String::new());
        let mut rest = answer;
        while !rest.is_empty() {
            let at = (piece..=rest.len()).find(|at| rest.is_char_boundary(*at)).unwrap_or(rest.len());
            parser.push(&rest[..at], &mut out);
            rest = &rest[at..];
        }
        parser.finish(&mut out);
        for delta in out {
            match delta {
                Delta::Reasoning(text) => reasoning += &text,
                Delta::Content(text) | Delta::Call { arguments: text, .. } => content += &text,
            }
        }
        (reasoning, content)
    }

    #[test]
    fn reasoning_comes_first_and_whitespace_around_it_goes() {
        for (inside, answer, reasoning, content) in [
            (false, "<think>\nSo 2.\n</think>\n\nTwo.\n", "So 2.", "Two.\n"),
            (false, "\n<think>\n\n</think>\n\nTwo.", "", "Two."),
            (false, "Two. <think>is text</think>", "", "Two. <think>is text</think>"),
            (false, " Two.", "", " Two."),
            (false, "<thin", "", "<thin"),
            (false, "", "", ""),
            (true, "\nSo 2.\n\n</think>\n\nTwo.", "So 2.", "Two."),
            (true, "So 2 < 3 </thing> ü\n", "So 2 < 3 </thing> ü", ""),
            (true, "a </think>b</think> c", "a", "b</think> c"),
            (true, "a </thi", "a </thi", ""),
            (true, "</think>", "", ""),
        ] {
            for piece in [1, 2, 3, 7, 100] {
                let found = split(inside, answer, piece);
                assert_eq!(found, (reasoning.to_string(), content.to_string()), "{answer:?} by {piece}");
            }
        }
    }

    /// Nothing is held back that cannot be a mark.
    #[test]
    fn text_is_returned_at_once() {
        let (mut parser, mut out) = (ThinkParser::new(true), Vec::new());
        parser.push("So two", &mut out);
        parser.push("</think>\nT", &mut out);
        parser.push("wo", &mut out);
        let text = |text: &str| text.to_string();
        assert_eq!(
            out,
            [Delta::Reasoning(text("So two")), Delta::Content(text("T")), Delta::Content(text("wo"))]
        );
    }
}
