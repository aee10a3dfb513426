//! Answers of models that separate their reasoning from what they say.
use crate::harmony::{ChannelParser, Delta};
use crate::model::Model;
use crate::thinking::ThinkParser;

/// Splits one answer, which arrives in pieces, into reasoning and content. A call of a function counts as content.
#[derive(Clone, Debug)]
pub enum AnswerSplitter {
    /// [Harmony](crate::harmony)'s channels.
    Channels(ChannelParser),
    /// A [block](crate::thinking) before the content.
    Thinking(ThinkParser),
}

impl AnswerSplitter {
    /// For the answer to a prompt, of which the last tokens are enough. With the tokens that have to be written out by name. `None` if the
    /// model's answers are content alone.
    pub fn new<'m>(model: &'m Model, prompt: &[u32]) -> Option<(Self, &'m [u32])> {
        if let Some(marks) = model.harmony() {
            return Some((AnswerSplitter::Channels(ChannelParser::new(false)), marks));
        }
        let (marks, tokenizer) = model.thinking().zip(model.tokenizer())?;
        Some((AnswerSplitter::Thinking(ThinkParser::after(tokenizer, marks, prompt)), marks))
    }

    /// Adds a piece of the answer.
    pub fn push(&mut self, piece: &str, out: &mut Vec<Delta>) {
        match self {
            AnswerSplitter::Channels(parser) => parser.push(piece, out),
            AnswerSplitter::Thinking(parser) => parser.push(piece, out),
        }
    }

    /// Ends the answer.
    pub fn finish(&mut self, out: &mut Vec<Delta>) {
        match self {
            AnswerSplitter::Channels(parser) => parser.finish(out),
            AnswerSplitter::Thinking(parser) => parser.finish(out),
        }
    }
}
