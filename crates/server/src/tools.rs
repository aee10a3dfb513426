//! Tool calls: how models write them, and how they become `tool_calls` again.
//!
//! A model is told of its tools by its chat template, and answers in the words it was trained on. [`ToolFormat`] knows
//! two families of them:
//!
//! | format | a call | several |
//! |---|---|---|
//! | `llama3` | `{"name": "f", "parameters": {…}}`, at the start or after `<\|python_tag\|>` | joined by `;` or blanks |
//! | `hermes`, `qwen` | `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, anywhere | one after the other |
//!
//! What only looks like a call stays text, to the letter. Arguments are given on as the model wrote them; they are JSON,
//! but whether they fit the tool's schema is checked only where a grammar enforced it ([`ToolChoice::Required`] and
//! [`ToolChoice::Named`]).
mod call;
mod choice;
mod parser;

pub use call::ToolCall;
pub use choice::{Tool, ToolChoice, tools_from_json};
pub use parser::{ToolDelta, ToolParser};

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    Llama3,
    /// Nous Hermes 2 Pro and later, Qwen 2.5 and 3.
    Hermes,
}

const TOOL_CALL: &str = "<tool_call>";
const TOOL_CALL_END: &str = "</tool_call>";
const PYTHON_TAG: &str = "<|python_tag|>";

impl ToolFormat {
    /// Names for a configuration, `none` beside them.
    pub const NAMES: &str = "llama3, hermes, qwen, none";

    /// By name. `none` is `Ok(None)`: tools are refused.
    pub fn by_name(name: &str) -> Result<Option<Self>, String> {
        match name {
            "llama3" => Ok(Some(ToolFormat::Llama3)),
            "hermes" | "qwen" => Ok(Some(ToolFormat::Hermes)),
            "none" => Ok(None),
            _ => Err(format!("there is no tool format `{name}`; known are {}", Self::NAMES)),
        }
    }

    /// The one that a chat template teaches; `None` if it knows nothing of tools, or another format.
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        // Qwen3-Coder and others write XML inside the same tag.
        if has(TOOL_CALL) && !has("<function=") && !has("<arg_key>") {
            return Some(ToolFormat::Hermes);
        }
        let llama = has("<|start_header_id|>") && has("parameters") && has("tools");
        (llama && !has(TOOL_CALL)).then_some(ToolFormat::Llama3)
    }

    /// Texts that mark calls. Where the tokenizer has one as a control token, its name must be written out
    /// (`Tokenizer::stream_with`), or the parser never sees it.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            ToolFormat::Llama3 => &[PYTHON_TAG],
            ToolFormat::Hermes => &[TOOL_CALL, TOOL_CALL_END],
        }
    }

    /// A whole answer: the text that is no call, and the calls. The same as from a [`ToolParser`].
    pub fn parse(self, text: &str) -> (String, Vec<ToolCall>) {
        let mut parser = ToolParser::new(self, true);
        let mut deltas = Vec::new();
        parser.push(text, &mut deltas);
        parser.finish(&mut deltas);
        let (mut content, mut calls) = (String::new(), Vec::new());
        for delta in deltas {
            match delta {
                ToolDelta::Content(text) => content += &text,
                ToolDelta::Call { call, .. } => calls.push(call),
            }
        }
        (content, calls)
    }
}

#[cfg(test)]
mod tests {
    use super::ToolFormat;

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
            ("<|start_header_id|>{{ message.content }}", None),
            ("", None),
        ] {
            assert_eq!(ToolFormat::of_template(source), format, "{source}");
        }
    }

    #[test]
    fn names() {
        assert_eq!(ToolFormat::by_name("qwen"), Ok(Some(ToolFormat::Hermes)));
        assert_eq!(ToolFormat::by_name("none"), Ok(None));
        assert!(ToolFormat::by_name("mistral").unwrap_err().contains(ToolFormat::NAMES));
    }
}
