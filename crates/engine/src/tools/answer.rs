//! Separates an answer into content, reasoning and tool calls.
use super::{Tool, ToolCall, ToolDelta, ToolFormat, ToolParser};
use kvist_model::harmony::{ChannelParser, Delta};
use serde_json::{Value, json};
use std::sync::Arc;

/// How to parse the answers of a request.
#[derive(Clone, Debug)]
pub struct AnswerFormat {
    pub format: ToolFormat,
    pub tools: Arc<[Tool]>,
    pub parallel: bool,
    /// True if calls are allowed. Without calls only channels are separated.
    pub calls: bool,
}

impl AnswerFormat {
    /// Answers in Harmony's channels, in which nothing may be called.
    pub fn channels(parallel: bool) -> Self {
        AnswerFormat { format: ToolFormat::Harmony, tools: Arc::default(), parallel, calls: false }
    }

    /// A parser at the start of an answer.
    pub fn parser(&self) -> AnswerParser {
        match self.format {
            ToolFormat::Harmony => AnswerParser::Channels {
                parser: ChannelParser::new(self.calls),
                parallel: self.parallel,
                calls: 0,
            },
            format => AnswerParser::Marked(ToolParser::new(format, self.parallel, self.tools.clone())),
        }
    }
}

/// Parses an answer incrementally. The result does not depend on how the answer is split into pieces.
#[derive(Clone, Debug)]
pub enum AnswerParser {
    /// Text with calls inside.
    Marked(ToolParser),
    /// Messages in channels. Without `parallel` only the first call is returned; later ones are dropped.
    Channels { parser: ChannelParser, parallel: bool, calls: usize },
}

/// A complete answer, parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedAnswer {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<ToolCall>,
}

impl AnswerParser {
    /// Adds a piece of the answer.
    pub fn push(&mut self, piece: &str, out: &mut Vec<ToolDelta>) {
        self.forward(out, |parser, out| parser.push(piece, out), |parser, out| parser.push(piece, out));
    }

    /// Ends the answer.
    pub fn finish(&mut self, out: &mut Vec<ToolDelta>) {
        self.forward(out, ToolParser::finish, ChannelParser::finish);
    }

    /// Parses a complete answer.
    pub fn parse(mut self, answer: &str) -> ParsedAnswer {
        let mut deltas = Vec::new();
        self.push(answer, &mut deltas);
        self.finish(&mut deltas);
        deltas.into_iter().collect()
    }

    fn forward(
        &mut self,
        out: &mut Vec<ToolDelta>,
        marked: impl FnOnce(&mut ToolParser, &mut Vec<ToolDelta>),
        channels: impl FnOnce(&mut ChannelParser, &mut Vec<Delta>),
    ) {
        let (parser, parallel, calls) = match self {
            AnswerParser::Marked(parser) => return marked(parser, out),
            AnswerParser::Channels { parser, parallel, calls } => (parser, *parallel, calls),
        };
        let mut deltas = Vec::new();
        channels(parser, &mut deltas);
        for delta in deltas {
            match delta {
                Delta::Content(text) => out.push(ToolDelta::Content(text)),
                Delta::Reasoning(text) => out.push(ToolDelta::Reasoning(text)),
                Delta::Call { .. } if *calls > 0 && !parallel => {}
                Delta::Call { name, arguments } => {
                    out.push(ToolDelta::Call { index: *calls, call: ToolCall { name, arguments } });
                    *calls += 1;
                }
            }
        }
    }
}

impl ParsedAnswer {
    /// The assistant message with this content, and with these calls in OpenAI's format ([`ToolCall::to_json`]).
    pub fn to_message(&self, calls: Vec<Value>) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.as_str().into();
        }
        if !calls.is_empty() {
            if self.content.is_empty() {
                message["content"] = Value::Null;
            }
            message["tool_calls"] = calls.into();
        }
        message
    }
}

impl FromIterator<ToolDelta> for ParsedAnswer {
    fn from_iter<T: IntoIterator<Item = ToolDelta>>(deltas: T) -> Self {
        let mut parsed = ParsedAnswer::default();
        for delta in deltas {
            match delta {
                ToolDelta::Content(text) => parsed.content += &text,
                ToolDelta::Reasoning(text) => parsed.reasoning += &text,
                ToolDelta::Call { call, .. } => parsed.calls.push(call),
            }
        }
        parsed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
        <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>\
        <|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}";

    fn harmony(parallel: bool, calls: bool) -> AnswerFormat {
        AnswerFormat { format: ToolFormat::Harmony, tools: Arc::default(), parallel, calls }
    }

    #[test]
    fn channels_and_calls_are_told_apart() {
        let call = |name: &str, arguments: &str| ToolCall { name: name.into(), arguments: arguments.into() };
        let both = vec![call("f", "{\"a\": 1}"), call("g", "{}")];
        for (parallel, calls) in [(true, both.clone()), (false, both[..1].to_vec())] {
            let parsed = harmony(parallel, true).parser().parse(ANSWER);
            assert_eq!(parsed, ParsedAnswer { content: "I look.".into(), reasoning: "Two.".into(), calls });
        }
        let parsed = harmony(true, false).parser().parse(ANSWER);
        assert_eq!(parsed.content, "I look.\n{\"a\": 1}\n{}");
        // Indices continue across pieces.
        let (mut parser, mut out) = (harmony(true, true).parser(), Vec::new());
        ANSWER.split_inclusive('>').for_each(|piece| parser.push(piece, &mut out));
        parser.finish(&mut out);
        let indices: Vec<usize> = out
            .iter()
            .filter_map(|d| if let ToolDelta::Call { index, .. } = d { Some(*index) } else { None })
            .collect();
        assert_eq!(indices, [0, 1]);
    }

    #[test]
    fn other_formats_are_read_as_before() {
        let text = "I look. <tool_call>{\"name\": \"f\"}</tool_call>";
        let parsed = AnswerFormat { format: ToolFormat::Hermes, ..harmony(true, true) }.parser().parse(text);
        assert_eq!(
            (parsed.content.as_str(), parsed.calls.len(), parsed.reasoning.as_str()),
            ("I look. ", 1, "")
        );
    }
}
