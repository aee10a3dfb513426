//! How a model's conversations become prompts, and how its answers are read: its chat template, its tool calls, its
//! channels, and the grammars over its tokens.
//!
//! A model without a chat template gets a plain one: `role: text` and a line break for every message, then
//! `assistant:`. The answer ends where the next user message would begin ([`PLAIN_STOP`]).
mod answer_spec;

pub use answer_spec::{AnswerSpec, AnswerSpecError};

use crate::grammar::{Compiled, Grammar, GrammarCompiler, InvalidParameter};
use crate::tools::described::{Role, describe};
use crate::tools::{AnswerFormat, ToolFormat, Tooling, harmony, text_of};
use kvist_model::harmony::{END, RETURN};
use kvist_model::template::Conversation;
use kvist_model::thinking::ThinkParser;
use kvist_model::tokenizer::Tokenizer;
use kvist_model::{Error, Model};
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

/// Stop string of the plain template: the start of the next user message.
pub const PLAIN_STOP: &str = "\nuser:";

/// Why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    #[error("this model has no tokenizer: send lists of tokens")]
    NoTokenizer,
    /// Message `message` has or answers tool calls, which the plain template cannot write.
    #[error("tool calls are not supported with this model: it has no chat template")]
    NoToolCalls { message: usize },
    /// Templates refuse what their models were not trained on, such as roles that do not alternate.
    #[error(transparent)]
    Template(#[from] Error),
}

/// The formats of one model.
pub struct ChatFormat {
    model: Arc<Model>,
    tools: Option<Tooling>,
    channels: bool,
    marks: Vec<u32>,
    /// Built for the first answer that needs one: building it takes time and memory.
    grammars: OnceLock<Result<GrammarCompiler, String>>,
}

impl ChatFormat {
    /// The formats that the model's template and vocabulary show.
    pub fn new(model: Arc<Model>) -> Self {
        let tools = match model.chat_template() {
            None => None,
            Some(_) if model.harmony().is_some() => {
                Some(Tooling { format: ToolFormat::Harmony, described_in_message: false })
            }
            Some(template) => Tooling::of_template(template.source(true)),
        };
        Self::with_tools(model, tools)
    }

    /// With these tool calls; `None`: the model calls no tools. A model without a chat template has none.
    pub fn with_tools(model: Arc<Model>, tools: Option<Tooling>) -> Self {
        let tools = tools.filter(|_| model.chat_template().is_some());
        // A Harmony model answers in channels even if tools are off.
        let channels = match tools {
            Some(tools) => tools.format == ToolFormat::Harmony,
            None => model.harmony().is_some(),
        };
        let format = if channels { Some(ToolFormat::Harmony) } else { tools.map(|tools| tools.format) };
        let marks = format.iter().flat_map(|format| format.markers());
        let marks = marks.filter_map(|mark| model.tokenizer()?.token(mark));
        let marks = marks.chain(model.thinking().into_iter().flatten().copied()).collect();
        ChatFormat { model, tools, channels, marks, grammars: OnceLock::new() }
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }
    pub fn tokenizer(&self) -> Result<&Tokenizer, PromptError> {
        self.model.tokenizer().ok_or(PromptError::NoTokenizer)
    }
    /// The model's tool calls; `None` if it makes none.
    pub fn tools(&self) -> Option<Tooling> {
        self.tools
    }
    /// The model's answers are messages in channels: [`kvist_model::harmony`].
    pub fn has_channels(&self) -> bool {
        self.channels
    }
    /// Reads the reasoning that the answer to `prompt` may begin with. `None` if the model's answers have none before them.
    pub fn thinking(&self, prompt: &[u32]) -> Option<ThinkParser> {
        let marks = self.model.thinking().filter(|_| !self.channels)?;
        Some(ThinkParser::after(self.model.tokenizer()?, marks, prompt))
    }
    /// Control tokens that mark tool calls, channels or reasoning. They are to be written out as text where answers are parsed.
    pub fn marks(&self) -> &[u32] {
        &self.marks
    }

    /// Compile a grammar. The first call may take some tenths of a second. The outer error is that of the model, which
    /// has no tokens that a grammar could use.
    pub fn compile(&self, grammar: &Grammar) -> Result<Result<Compiled, InvalidParameter>, &str> {
        let made =
            self.grammars.get_or_init(|| GrammarCompiler::of_model(&self.model).map_err(|e| e.to_string()));
        Ok(made.as_ref().map_err(String::as_str)?.compile(grammar))
    }

    /// Render the conversation as text. If the model has a template of its own, the text includes the tokens that the
    /// model expects at the start. `reserve` is called before each rendering with an upper bound of the bytes of memory
    /// that it takes; its result is kept until the rendering is done.
    pub fn render<R, E: From<PromptError>>(
        &self,
        conversation: &Conversation<'_>,
        reserve: impl Fn(usize) -> Result<R, E>,
    ) -> Result<String, E> {
        let messages = normalized(conversation.messages);
        let Some(template) = self.model.chat_template() else {
            return Ok(plain(&messages, conversation.add_generation_prompt)?);
        };
        let tokenizer = self.tokenizer()?;
        let render = |conversation: &Conversation<'_>| {
            let _reserved = reserve(conversation.rendering_bytes())?;
            Ok::<_, E>(template.render_conversation(conversation, tokenizer))
        };
        let rendered = match self.tools.filter(|tools| tools.described_in_message) {
            None if self.channels => {
                let messages = harmony::for_template(&messages);
                let tools = harmony::described(conversation.tools);
                let conversation = Conversation { messages: &messages, tools: &tools, ..*conversation };
                let ends = !conversation.add_generation_prompt;
                render(&conversation)?.map(|text| match text.strip_suffix(RETURN) {
                    // The template ends messages with this token as in training data. A model never reads it in a
                    // prompt.
                    Some(text) if ends => format!("{text}{END}"),
                    _ => text,
                })
            }
            None => render(&Conversation { messages: &messages, ..*conversation })?,
            Some(_) => {
                let described_in = |role| {
                    let messages = describe(&messages, conversation.tools, role);
                    render(&Conversation { messages: &messages, tools: &[], ..*conversation })
                };
                match described_in(Role::System)? {
                    // Some templates refuse a system message.
                    Err(error) if !matches!(error, Error::Halted) && !conversation.tools.is_empty() => {
                        described_in(Role::User)?
                    }
                    rendered => rendered,
                }
            }
        };
        Ok(rendered.map_err(PromptError::Template)?)
    }

    /// Decode an answer the way it is parsed: with the marks of channels, or of reasoning, as text.
    pub fn decode_answer(&self, tokens: &[u32]) -> Result<String, PromptError> {
        let tokenizer = self.tokenizer()?;
        let written = if self.channels { &self.marks[..] } else { self.model.thinking().unwrap_or_default() };
        if written.is_empty() {
            return Ok(tokenizer.decode(tokens)?);
        }
        let mut stream = tokenizer.stream_with(written);
        let mut text = String::new();
        for token in tokens {
            text += &stream.push(*token)?;
        }
        Ok(text + &stream.finish()?)
    }

    /// Start index of the suffix of `tokens` that can affect how following tokens are decoded.
    pub fn context(&self, tokens: &[u32]) -> usize {
        let end = self.model.tokenizer().map_or(tokens, |tokenizer| tokenizer.context_of(tokens));
        tokens.len() - end.len()
    }

    /// The message content for this answer text.
    pub fn content(&self, answer: &str) -> String {
        // The plain template writes a space before an answer; the model generated that space here.
        let plain = self.model.chat_template().is_none();
        let answer = if plain { answer.strip_prefix(' ').unwrap_or(answer) } else { answer };
        answer.into()
    }

    /// The assistant message for this answer text, complete or not. Tool calls stay text: only the generation that
    /// produced them knows whether calls were allowed.
    pub fn message(&self, answer: &str) -> Value {
        if !self.channels {
            return json!({"role": "assistant", "content": self.content(answer)});
        }
        AnswerFormat::channels(true).parser().parse(answer).to_message(Vec::new())
    }
}

/// Adapt messages to what templates expect.
fn normalized(messages: &[Value]) -> Vec<Value> {
    let mut messages = messages.to_vec();
    for message in &mut messages {
        // The API treats null as absent. Templates test whether a name is present, and take its length.
        if let Some(fields) = message.as_object_mut() {
            fields.retain(|name, value| name == "content" || !value.is_null());
        }
        // The API's role `developer` is `system` in templates.
        if message["role"] == "developer" {
            message["role"] = "system".into();
        }
    }
    messages
}

/// The plain template, see the module documentation.
fn plain(messages: &[Value], answer: bool) -> Result<String, PromptError> {
    let mut text = String::new();
    for (i, message) in messages.iter().enumerate() {
        let role = message["role"].as_str().unwrap_or_default();
        if role == "tool" || message.get("tool_calls").is_some_and(|calls| !calls.is_null()) {
            return Err(PromptError::NoToolCalls { message: i });
        }
        text += &format!("{role}: {}\n", text_of(&message["content"]));
    }
    if answer {
        text += "assistant:";
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_see_no_null_but_that_of_a_content() {
        let messages = [
            json!({"role": "developer", "content": "a", "name": null}),
            json!({"role": "assistant", "content": null, "refusal": null, "tool_calls": null, "audio": null}),
        ];
        let expected =
            [json!({"role": "system", "content": "a"}), json!({"role": "assistant", "content": null})];
        assert_eq!(normalized(&messages), expected);
    }

    #[test]
    fn the_plain_template_is_the_documented_one() {
        let messages = [
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
            json!({"role": "assistant", "content": "c", "tool_calls": null}),
            json!({"role": "user", "content": "d"}),
        ];
        let text = plain(&messages, true).unwrap();
        assert_eq!(text, "system: Be brief.\nuser: a\nb\nassistant: c\nuser: d\nassistant:");
        let tool = [json!({"role": "tool", "content": "42", "tool_call_id": "1"})];
        assert!(matches!(plain(&tool, true), Err(PromptError::NoToolCalls { message: 0 })));
    }
}
