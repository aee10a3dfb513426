//! Separates an answer into content, reasoning and tool calls.
use super::{Tool, ToolCall, ToolDelta, ToolFormat, ToolParser};
use kvist_model::harmony::{ChannelParser, Delta};
use std::sync::Arc;

/// How to parse the answers of a request.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub format: ToolFormat,
    pub tools: Arc<[Tool]>,
    pub parallel: bool,
    /// True if calls are allowed. Without calls only channels are separated.
    pub calls: bool,
}

impl Reading {
    pub fn reader(&self) -> AnswerReader {
        match self.format {
            ToolFormat::Harmony => AnswerReader::Channels {
                parser: ChannelParser::new(self.calls),
                parallel: self.parallel,
                calls: 0,
            },
            format => AnswerReader::Marked(ToolParser::new(format, self.parallel, self.tools.clone())),
        }
    }
}

/// Parses an answer incrementally. The result does not depend on how the answer is split into pieces.
#[derive(Clone, Debug)]
pub(crate) enum AnswerReader {
    /// Text with calls inside.
    Marked(ToolParser),
    /// Messages in channels. Without `parallel` only the first call is returned; later ones are dropped.
    Channels { parser: ChannelParser, parallel: bool, calls: usize },
}

/// A complete answer, parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<ToolCall>,
}

impl AnswerReader {
    /// Adds a piece of the answer.
    pub fn push(&mut self, piece: &str, out: &mut Vec<ToolDelta>) {
        self.read(out, |parser, out| parser.push(piece, out), |parser, out| parser.push(piece, out));
    }

    /// Ends the answer.
    pub fn finish(&mut self, out: &mut Vec<ToolDelta>) {
        self.read(out, ToolParser::finish, ChannelParser::finish);
    }

    /// Parses a complete answer.
    pub fn whole(mut self, answer: &str) -> Said {
        let mut deltas = Vec::new();
        self.push(answer, &mut deltas);
        self.finish(&mut deltas);
        deltas.into_iter().collect()
    }

    fn read(
        &mut self,
        out: &mut Vec<ToolDelta>,
        marked: impl FnOnce(&mut ToolParser, &mut Vec<ToolDelta>),
        channels: impl FnOnce(&mut ChannelParser, &mut Vec<Delta>),
    ) {
        let (parser, parallel, calls) = match self {
            AnswerReader::Marked(parser) => return marked(parser, out),
            AnswerReader::Channels { parser, parallel, calls } => (parser, *parallel, calls),
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

impl FromIterator<ToolDelta> for Said {
    fn from_iter<T: IntoIterator<Item = ToolDelta>>(deltas: T) -> Self {
        let mut said = Said::default();
        for delta in deltas {
            match delta {
                ToolDelta::Content(text) => said.content += &text,
                ToolDelta::Reasoning(text) => said.reasoning += &text,
                ToolDelta::Call { call, .. } => said.calls.push(call),
            }
        }
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
        <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>\
        <|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}";

    fn reading(parallel: bool, calls: bool) -> Reading {
        Reading { format: ToolFormat::Harmony, tools: Arc::default(), parallel, calls }
    }

    #[test]
    fn channels_and_calls_are_told_apart() {
        let call = |name: &str, arguments: &str| ToolCall { name: name.into(), arguments: arguments.into() };
        let both = vec![call("f", "{\"a\": 1}"), call("g", "{}")];
        for (parallel, calls) in [(true, both.clone()), (false, both[..1].to_vec())] {
            let said = reading(parallel, true).reader().whole(ANSWER);
            assert_eq!(said, Said { content: "I look.".into(), reasoning: "Two.".into(), calls });
        }
        let said = reading(true, false).reader().whole(ANSWER);
        assert_eq!(said.content, "I look.\n{\"a\": 1}\n{}");
        // Indices continue across pieces.
        let (mut reader, mut out) = (reading(true, true).reader(), Vec::new());
        ANSWER.split_inclusive('>').for_each(|piece| reader.push(piece, &mut out));
        reader.finish(&mut out);
        let indices: Vec<usize> = out
            .iter()
            .filter_map(|d| if let ToolDelta::Call { index, .. } = d { Some(*index) } else { None })
            .collect();
        assert_eq!(indices, [0, 1]);
    }

    #[test]
    fn other_formats_are_read_as_before() {
        let text = "I look. <tool_call>{\"name\": \"f\"}</tool_call>";
        let said = Reading { format: ToolFormat::Hermes, ..reading(true, true) }.reader().whole(text);
        assert_eq!((said.content.as_str(), said.calls.len(), said.reasoning.as_str()), ("I look. ", 1, ""));
    }
}
