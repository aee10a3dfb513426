//! What one answer must look like: how it is parsed, and which grammar it follows.
use super::ChatFormat;
use crate::grammar::{Compiled, Grammar, InvalidParameter, ResponseFormat};
use crate::tools::{AnswerFormat, ToolChoice, harmony, tools_from_json};
use serde_json::Value;

/// How an answer is parsed, and which grammar it must follow.
pub struct AnswerSpec {
    /// `None`: the answer is plain text, because it has no channels and no reasoning, and no tools or none may be called.
    pub format: Option<AnswerFormat>,
    pub constraint: Option<Compiled>,
    /// A tool call is required.
    pub requires_call: bool,
}

/// Why an answer cannot have the form that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerSpecError {
    #[error(transparent)]
    Invalid(#[from] InvalidParameter),
    /// This model, or kvist, cannot do it.
    #[error("{message}")]
    Unsupported { param: &'static str, message: String },
}

impl AnswerSpec {
    /// `channels`: the answer is in Harmony channels. `tools`, `choice` (`tool_choice`), `parallel`
    /// (`parallel_tool_calls`) and `response_format` are fields of OpenAI's requests.
    pub fn new(
        chat: &ChatFormat,
        channels: bool,
        tools: &[Value],
        choice: Option<&Value>,
        parallel: bool,
        response_format: Option<&Value>,
    ) -> Result<Self, AnswerSpecError> {
        let described = tools;
        let tools = tools_from_json(described)?;
        let choice = ToolChoice::from_json(choice, &tools)?;
        let grammar = match response_format.filter(|format| !format.is_null()) {
            Some(format) => {
                let format = ResponseFormat::from_json(format)?;
                if channels { format.schema().map(harmony::answer) } else { format.grammar() }
            }
            None => None,
        };
        if choice == ToolChoice::None {
            let constraint = grammar.map(|grammar| compile(chat, &grammar)).transpose()?;
            let format = channels.then(|| AnswerFormat::channels(parallel));
            return Ok(AnswerSpec { format, constraint, requires_call: false });
        }
        let unsupported =
            |param, message: &str| AnswerSpecError::Unsupported { param, message: message.into() };
        let tooling =
            chat.tools().ok_or_else(|| unsupported("tools", "`tools` are not supported with this model"))?;
        if grammar.is_some() {
            let message = "`response_format` together with `tools` is not supported: an answer has only one format; \
                           `tool_choice: \"none\"` omits the tools";
            return Err(unsupported("response_format", message));
        }
        let grammar = choice.grammar(tooling.format, &tools, parallel)?;
        let tools = tooling.format.tools_for_parsing(described)?.into();
        Ok(AnswerSpec {
            format: Some(AnswerFormat {
                format: Some(tooling.format),
                tools,
                parallel,
                calls: true,
                ..AnswerFormat::default()
            }),
            requires_call: grammar.is_some(),
            constraint: grammar.map(|grammar| compile(chat, &grammar)).transpose()?,
        })
    }

    /// Separates reasoning from the answer to `prompt`, if the model reasons. An answer with a grammar has no reasoning, because the grammar
    /// allows none.
    pub fn separate_reasoning(&mut self, chat: &ChatFormat, prompt: &[u32]) {
        if self.constraint.is_none()
            && let Some(thinking) = chat.thinking(prompt)
        {
            self.format.get_or_insert_default().thinking = Some(thinking);
        }
    }

    /// Returns whether tools may be called.
    pub fn allows_calls(&self) -> bool {
        self.format.as_ref().is_some_and(|format| format.calls)
    }
}

fn compile(chat: &ChatFormat, grammar: &Grammar) -> Result<Compiled, AnswerSpecError> {
    let no_grammars =
        |message: &str| AnswerSpecError::Unsupported { param: "response_format", message: message.into() };
    Ok(chat.compile(grammar).map_err(no_grammars)??)
}
