//! Tool calls: the formats in which models write them, and the conversion back to `tool_calls`.
//!
//! The chat template tells a model about its tools, and the model answers in the format that it was trained on.
//! [`ToolFormat`] knows five families:
//!
//! | format | a call | several |
//! |---|---|---|
//! | `llama3` | `{"name": "f", "parameters": {…}}`, at the start or after `<\|python_tag\|>` | joined by `;` or blanks |
//! | `hermes`, `qwen` | `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, anywhere | one after the other |
//! | `pythonic` | `[f(a=1)]`, at the start or after `<\|python_start\|>` | in the same list |
//! | `qwen3_coder` | `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, anywhere | one after the other |
//! | `harmony` | `<\|channel\|>commentary to=functions.f <\|constrain\|>json<\|message\|>{…}`, a message | one after the other |
//!
//! Harmony's answers are messages in channels ([`kvist_model::harmony`]). The channels are parsed without tools too.
//!
//! If a template does not support tools, `generic` describes the tools in a message, and the model answers in Hermes'
//! format.
//!
//! Text that only resembles a call stays text, unchanged. Arguments that the model wrote as JSON are passed on as they
//! are; others are converted to JSON. Arguments are certain to match the tool's schema only if a grammar enforced it
//! ([`ToolChoice::Required`] and [`ToolChoice::Named`]).
mod answer;
mod call;
mod choice;
pub(crate) mod described;
mod grammar;
pub(crate) mod harmony;
mod marks;
mod parser;
mod pythonic;
mod qwen_coder;
mod reparse;
mod types;

pub use answer::{AnswerFormat, AnswerParser, ParsedAnswer};
pub use call::ToolCall;
pub use choice::{Tool, ToolChoice, tools_from_json};
pub use parser::{ToolDelta, ToolParser};

use kvist_model::harmony::MARKS;
use serde_json::Value;

/// How a model learns about its tools, and how it calls them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tooling {
    pub format: ToolFormat,
    /// A message describes the tools, because the chat template does not.
    pub described_in_message: bool,
}

impl Tooling {
    /// Names for the configuration, including `none`.
    pub const NAMES: &str = "llama3, hermes, qwen, pythonic, qwen3_coder, harmony, generic, none";

    /// Look up by name. `none` is `Ok(None)`: requests with tools are refused.
    pub fn by_name(name: &str) -> Result<Option<Self>, String> {
        let format = match name {
            "llama3" => ToolFormat::Llama3,
            "hermes" | "qwen" | "generic" => ToolFormat::Hermes,
            "pythonic" => ToolFormat::Pythonic,
            "qwen3_coder" => ToolFormat::Qwen3Coder,
            "harmony" => ToolFormat::Harmony,
            "none" => return Ok(None),
            _ => return Err(format!("there is no tool format `{name}`; expected {}", Self::NAMES)),
        };
        Ok(Some(Tooling { format, described_in_message: name == "generic" }))
    }

    /// The tooling that fits a chat template. `None` if the template has an unknown tool format.
    pub(crate) fn of_template(source: &str) -> Option<Self> {
        match ToolFormat::of_template(source) {
            Some(format) => Some(Tooling { format, described_in_message: false }),
            // A template that mentions tools has a format of its own for them.
            None if ["tools", "tool_call", "TOOL_CALL"].iter().any(|word| source.contains(word)) => None,
            None => Some(Tooling { format: ToolFormat::Hermes, described_in_message: true }),
        }
    }
}

/// The format in which a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    Llama3,
    /// Nous Hermes 2 Pro and later, Qwen 2.5 and 3.
    Hermes,
    /// Llama 3.2 and 4, if their templates ask for it.
    Pythonic,
    Qwen3Coder,
    /// gpt-oss.
    Harmony,
}

const TOOL_CALL: &str = "<tool_call>";
const TOOL_CALL_END: &str = "</tool_call>";
const PYTHON_TAG: &str = "<|python_tag|>";
const PYTHON_START: &str = "<|python_start|>";
const PYTHON_END: &str = "<|python_end|>";

impl ToolFormat {
    /// The format that a chat template describes; `None` if it does not support tools, or uses an unknown format.
    /// Harmony is also detected by the vocabulary: [`Model::harmony`](kvist_model::Model::harmony).
    pub(crate) fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        // Several formats write XML inside the same tag: Qwen3-Coder, and others that are not supported.
        match has(TOOL_CALL) {
            true if has("<arg_key>") => return None,
            true if has(qwen_coder::FUNCTION) => {
                return has("<parameter=").then_some(ToolFormat::Qwen3Coder);
            }
            true => return Some(ToolFormat::Hermes),
            false => {}
        }
        // The phrases with which Meta's prompts, and those derived from them, describe the format.
        if has("[func_name1(") || has("[func_name(") || has("[function_name(") {
            return Some(ToolFormat::Pythonic);
        }
        let llama = has("<|start_header_id|>") && has("parameters") && has("tools");
        llama.then_some(ToolFormat::Llama3)
    }

    /// Texts that mark calls. If the tokenizer has one as a control token, its name must be written out
    /// (`Tokenizer::stream_with`), or the parser never sees it.
    pub(crate) fn markers(self) -> &'static [&'static str] {
        match self {
            ToolFormat::Llama3 => &[PYTHON_TAG],
            ToolFormat::Hermes | ToolFormat::Qwen3Coder => &[TOOL_CALL, TOOL_CALL_END],
            ToolFormat::Pythonic => &[PYTHON_START, PYTHON_END],
            ToolFormat::Harmony => &MARKS,
        }
    }

    /// Parse a whole answer: returns the text outside calls, and the calls.
    pub fn parse(self, text: &str, tools: &[Tool]) -> (String, Vec<ToolCall>) {
        let format = AnswerFormat {
            format: Some(self),
            tools: tools.into(),
            parallel: true,
            calls: true,
            ..AnswerFormat::default()
        };
        let parsed = format.parser().parse(text);
        (parsed.content, parsed.calls)
    }
}

/// The text of a message's content; parts are joined with line breaks.
pub(crate) fn text_of(content: &Value) -> String {
    match content {
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
        }
        content => content.as_str().unwrap_or_default().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::{ToolFormat, Tooling};

    #[test]
    fn templates_tell_their_format() {
        let llama =
            "<|start_header_id|>{% if tools %}{\"name\": function name, \"parameters\": …}{% endif %}";
        let hermes =
            "{% for tool in tools %}{% endfor %}<tool_call>\n{\"name\": …, \"arguments\": …}\n</tool_call>";
        for (source, format) in [
            (llama, Some(ToolFormat::Llama3)),
            (hermes, Some(ToolFormat::Hermes)),
            // Hermes on a Llama 3 base has both.
            (&format!("<|start_header_id|>{hermes} parameters"), Some(ToolFormat::Hermes)),
            ("<tool_call>\n<function=example>\n</function>", None),
            (
                "<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>",
                Some(ToolFormat::Qwen3Coder),
            ),
            ("<tool_call>{name}\n<arg_key>", None),
            (
                &format!("{llama} MUST put it in the format of [func_name1(params_name1=params_value1)]"),
                Some(ToolFormat::Pythonic),
            ),
            ("<|start_header_id|>{{ message.content }}", None),
            ("", None),
        ] {
            assert_eq!(ToolFormat::of_template(source), format, "{source}");
        }
    }

    #[test]
    fn names() {
        let known = |format, described_in_message| Ok(Some(Tooling { format, described_in_message }));
        assert_eq!(Tooling::by_name("qwen"), known(ToolFormat::Hermes, false));
        assert_eq!(Tooling::by_name("generic"), known(ToolFormat::Hermes, true));
        assert_eq!(Tooling::by_name("pythonic"), known(ToolFormat::Pythonic, false));
        assert_eq!(Tooling::by_name("qwen3_coder"), known(ToolFormat::Qwen3Coder, false));
        assert_eq!(Tooling::by_name("harmony"), known(ToolFormat::Harmony, false));
        assert_eq!(Tooling::by_name("none"), Ok(None));
        assert!(Tooling::by_name("mistral").unwrap_err().contains(Tooling::NAMES));
    }

    #[test]
    fn templates_without_tools_are_helped_out() {
        let plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}";
        assert_eq!(
            Tooling::of_template(plain),
            Some(Tooling { format: ToolFormat::Hermes, described_in_message: true })
        );
        for own in ["{% if tools %}[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "{{ message.tool_calls }}"] {
            assert_eq!(Tooling::of_template(own), None, "{own}");
        }
        let hermes = Tooling { format: ToolFormat::Hermes, described_in_message: false };
        assert_eq!(Tooling::of_template("{% if tools %}<tool_call>"), Some(hermes));
    }
}
