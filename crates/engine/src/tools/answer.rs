//! Separates an answer into content, reasoning and tool calls.
use super::{Tool, ToolCall, ToolDelta, ToolFormat, ToolParser};
use kvist_model::harmony::{ChannelParser, Delta};
use kvist_model::thinking::ThinkParser;
use serde_json::{Value, json};
use std::sync::Arc;

/// How to parse the answers of a request.
#[derive(Clone, Debug, Default)]
pub struct AnswerFormat {
    /// `None`: the answer is text.
    pub format: Option<ToolFormat>,
    pub tools: Arc<[Tool]>,
    pub parallel: bool,
    /// True if calls are allowed. Without calls only channels are separated.
    pub calls: bool,
    /// Reads the reasoning that may come first.
    pub thinking: Option<ThinkParser>,
}

impl AnswerFormat {
    /// Answers in Harmony's channels, in which nothing may be called.
    pub fn channels(parallel: bool) -> Self {
        AnswerFormat { format: Some(ToolFormat::Harmony), parallel, ..Self::default() }
    }

    /// A parser at the start of an answer.
    pub fn parser(&self) -> AnswerParser {
        let body = match self.format {
            None => Body::Text,
            Some(ToolFormat::Harmony) => {
                Body::Channels { parser: ChannelParser::new(self.calls), parallel: self.parallel, calls: 0 }
            }
            Some(format) => Body::Marked(ToolParser::new(format, self.parallel, self.tools.clone())),
        };
        AnswerParser { thinking: self.thinking.clone(), body }
    }
}

/// Parses an answer incrementally. The result does not depend on how the answer is split into pieces.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    thinking: Option<ThinkParser>,
    body: Body,
}

/// What follows the reasoning.
#[derive(Clone, Debug)]
enum Body {
    Text,
    /// Text with calls inside.
    Marked(ToolParser),
    /// Messages in channels. Without `parallel` only the first call is returned; later ones are dropped.
    Channels {
        parser: ChannelParser,
        parallel: bool,
        calls: usize,
    },
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
        let Some(thinking) = &mut self.thinking else { return self.body.push(piece, out) };
        let mut deltas = Vec::new();
        thinking.push(piece, &mut deltas);
        self.body.read(deltas, out);
    }

    /// Ends the answer.
    pub fn finish(&mut self, out: &mut Vec<ToolDelta>) {
        if let Some(thinking) = &mut self.thinking {
            let mut deltas = Vec::new();
            thinking.finish(&mut deltas);
            self.body.read(deltas, out);
        }
        self.body.finish(out);
    }

    /// Parses a complete answer.
    pub fn parse(mut self, answer: &str) -> ParsedAnswer {
        let mut deltas = Vec::new();
        self.push(answer, &mut deltas);
        self.finish(&mut deltas);
        deltas.into_iter().collect()
    }
}

impl Body {
    /// Takes what comes out of the parser of reasoning.
    fn read(&mut self, deltas: Vec<Delta>, out: &mut Vec<ToolDelta>) {
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => out.push(ToolDelta::Reasoning(text)),
                Delta::Content(text) | Delta::Call { arguments: text, .. } => self.push(&text, out),
            }
        }
    }

    fn push(&mut self, piece: &str, out: &mut Vec<ToolDelta>) {
        self.forward(out, Some(piece));
    }

    fn finish(&mut self, out: &mut Vec<ToolDelta>) {
        self.forward(out, None);
    }

    /// `None`: the answer ends.
    fn forward(&mut self, out: &mut Vec<ToolDelta>, piece: Option<&str>) {
        let (parser, parallel, calls) = match (self, piece) {
            (Body::Text, Some(piece)) => return out.push(ToolDelta::Content(piece.into())),
            (Body::Text, None) => return,
            (Body::Marked(parser), Some(piece)) => return parser.push(piece, out),
            (Body::Marked(parser), None) => return parser.finish(out),
            (Body::Channels { parser, parallel, calls }, _) => (parser, *parallel, calls),
        };
        let mut deltas = Vec::new();
        match piece {
            Some(piece) => parser.push(piece, &mut deltas),
            None => parser.finish(&mut deltas),
        }
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
        AnswerFormat { calls, ..AnswerFormat::channels(parallel) }
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
        let hermes = AnswerFormat { format: Some(ToolFormat::Hermes), ..harmony(true, true) };
        let parsed = hermes.parser().parse(text);
        assert_eq!(
            (parsed.content.as_str(), parsed.calls.len(), parsed.reasoning.as_str()),
            ("I look. ", 1, "")
        );
    }

    /// A call inside the reasoning is not one.
    #[test]
    fn reasoning_comes_before_content_and_calls() {
        let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
        let thinking = |inside| Some(ThinkParser::new(inside));
        let hermes = Some(ToolFormat::Hermes);
        let answer = format!("I could {call}.</think>\n\nI look. {call}");
        for (format, inside, text, calls) in [
            (hermes, true, answer.clone(), 1),
            (hermes, false, format!("<think>\n{answer}"), 1),
            (None, true, answer.replace(&format!(". {call}"), ". "), 0),
        ] {
            let format = AnswerFormat { format, thinking: thinking(inside), ..harmony(true, true) };
            let parsed = format.parser().parse(&text);
            assert_eq!(parsed.reasoning, format!("I could {call}."), "{text}");
            assert_eq!((parsed.content.as_str(), parsed.calls.len()), ("I look. ", calls), "{text}");
        }
    }
}
