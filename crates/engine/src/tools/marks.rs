//! The marks around the calls of each format, and parsing of what is between them. Harmony has no calls
//! inside text.
use super::call::{Found, read};
use super::qwen_coder::FUNCTION;
use super::{
    PYTHON_END, PYTHON_START, PYTHON_TAG, TOOL_CALL, TOOL_CALL_END, Tool, ToolFormat, pythonic, qwen_coder,
};

impl ToolFormat {
    /// Marks that open a call.
    pub(super) fn openers(self) -> &'static [&'static str] {
        match self {
            ToolFormat::Llama3 => &[PYTHON_TAG],
            ToolFormat::Hermes => &[TOOL_CALL],
            ToolFormat::Pythonic => &[PYTHON_START],
            // These models sometimes omit the first mark.
            ToolFormat::Qwen3Coder => &[TOOL_CALL, FUNCTION],
            ToolFormat::Harmony => &[],
        }
    }

    /// A mark that may follow calls.
    pub(super) fn closer(self) -> Option<&'static str> {
        match self {
            ToolFormat::Llama3 | ToolFormat::Hermes | ToolFormat::Harmony => None,
            ToolFormat::Pythonic => Some(PYTHON_END),
            ToolFormat::Qwen3Coder => Some(TOOL_CALL_END),
        }
    }

    /// True if a call begins here without an opening mark. That can be at the start of an answer or after
    /// another call.
    pub(super) fn begins_unmarked(self, text: &str) -> bool {
        match self {
            ToolFormat::Llama3 => text.starts_with('{'),
            ToolFormat::Pythonic => text.starts_with('['),
            ToolFormat::Hermes | ToolFormat::Qwen3Coder | ToolFormat::Harmony => false,
        }
    }

    /// True if the piece may complete a call: only a bracket or the end of a mark can.
    pub(super) fn may_complete(self, piece: &str) -> bool {
        piece.contains([if self == ToolFormat::Pythonic { ']' } else { '}' }, '>'])
    }

    /// Parses what follows an opening mark, including the closing mark. `end`: the answer is complete.
    pub(super) fn read(self, body: &str, end: bool, tools: &[Tool]) -> Found {
        let start = body.len() - body.trim_start().len();
        let rest = &body[start..];
        let found = match self {
            ToolFormat::Llama3 => read(rest, false),
            ToolFormat::Hermes => read(rest, true),
            ToolFormat::Pythonic => pythonic::read(rest),
            ToolFormat::Qwen3Coder => match rest.strip_prefix(FUNCTION) {
                Some(function) => match qwen_coder::read(function, tools) {
                    Found::Calls(calls, len) => Found::Calls(calls, FUNCTION.len() + len),
                    other => other,
                },
                None if FUNCTION.starts_with(rest) => Found::Unfinished,
                None => Found::Nothing,
            },
            ToolFormat::Harmony => Found::Nothing,
        };
        let found = match found {
            Found::Calls(calls, len) => {
                let len = start + len;
                let tail = &body[len..];
                let blank = tail.len() - tail.trim_start().len();
                let tail = &tail[blank..];
                if self != ToolFormat::Hermes {
                    Found::Calls(calls, len)
                } else if tail.starts_with(TOOL_CALL_END) {
                    Found::Calls(calls, len + blank + TOOL_CALL_END.len())
                } else if !TOOL_CALL_END.starts_with(tail) {
                    Found::Nothing
                } else if end {
                    Found::Calls(calls, body.len())
                } else {
                    Found::Unfinished
                }
            }
            other => other,
        };
        match found {
            Found::Unfinished if end => Found::Nothing,
            found => found,
        }
    }
}
