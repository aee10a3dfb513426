//! `POST /v1/chat/completions`: generates the assistant's next message.
//!
//! A model without a chat template gets a plain one: `role: text` and a line break for every message, then
//! `assistant:`. The answer ends where the next user message would begin.
use super::fields::{ChatFields, Common, check, check_together, read};
use super::generation::{Answers, Order};
use super::scores::Scorer;
use super::stream::{self, Shape, finish_reason};
use super::tokens::{encode_prompt, no_tokenizer};
use crate::app::{App, EFFORT};
use crate::auth::Caller;
use crate::error::ApiError;
use crate::http::json_body;
use crate::job::{Done, Token};
use crate::structured::{Compiled, ResponseFormat};
use crate::tools::taught::{Place, teach};
use crate::tools::{
    AnswerReader, Reading, Said, ToolCall, ToolChoice, ToolDelta, ToolFormat, harmony, tools_from_json,
};
use crate::work::halted;
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use kvist_engine::Error;
use kvist_model::harmony::{END, RETURN};
use kvist_model::template::{ChatTemplate, Conversation};
use kvist_model::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;

/// Stop string of the plain template: the start of the next user message.
pub(crate) const PLAIN_STOP: &str = "\nuser:";

pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut body = json_body(&app, request).await?;
    let prepared = app.prepare(&caller, move |app, caller| prepare(app, caller, &mut body));
    let (order, shape, common) = prepared.await?;
    let answers = Answers::begin(&app, order)?;
    stream::respond(answers, shape, &common).await
}

/// Turn a checked body into a request to the engine. Runs on a blocking thread.
fn prepare(app: &Arc<App>, caller: &Caller, body: &mut Value) -> Result<(Order, Turn, Common), ApiError> {
    check_together(body, app.bounds.tools)?;
    check(body, &app.schemas.chat, &app.bounds.model)?;
    let (common, mut fields): (Common, ChatFields) = (read(body)?, read(body)?);
    let wants_scores = fields.logprobs.unwrap_or(false);
    // Both are upper limits.
    let asked = fields.max_completion_tokens.into_iter().chain(fields.max_tokens).min();
    let id = app.new_id("chatcmpl");
    let mut order = Order::new(app, caller, &common, id.clone(), "chat")?;
    let parallel = fields.parallel_tool_calls.unwrap_or(true);
    let tools = fields.tools.as_deref().unwrap_or_default();
    let choice = fields.tool_choice.as_ref();
    let mut form = Form::new(app, app.channels, tools, choice, parallel, fields.response_format.as_ref())?;
    order.constraint = form.constraint.take();
    if form.reading.is_some() {
        order.written = app.marks.clone();
    }
    if !form.reads_calls() {
        // The template must not describe tools that may not be called.
        fields.tools = None;
    }
    if let Some(effort) = fields.reasoning_effort.take() {
        let kwargs = fields.chat_template_kwargs.get_or_insert_default();
        kwargs.entry(EFFORT).or_insert(effort.into());
    }
    order.prompts = vec![prompt(app, &fields)?.into()];
    if app.engine.model().chat_template().is_none() {
        order.stop.push(PLAIN_STOP.into());
    }
    order.logprobs = wants_scores.then(|| fields.top_logprobs.unwrap_or(0));
    order.admit(app, asked, "messages")?;
    app.log_prompts(&order.id, &order.prompts);
    let reader = || form.reading.as_ref().map(Reading::reader);
    let shape = Turn::new(app, id, (0..order.n).map(|_| reader()), wants_scores);
    order.queue(app)?;
    Ok((order, shape, common))
}

/// How an answer is parsed, and which grammar it must follow.
pub(crate) struct Form {
    /// `None`: the answer is plain text, because there are no channels, and no tools or none may be called.
    pub reading: Option<Reading>,
    pub constraint: Option<Compiled>,
    /// A tool call is required.
    pub demands: bool,
}

impl Form {
    /// `channels`: the model answers in Harmony channels.
    pub fn new(
        app: &App,
        channels: bool,
        described: &[Value],
        choice: Option<&Value>,
        parallel: bool,
        wanted: Option<&Value>,
    ) -> Result<Self, ApiError> {
        let tools = tools_from_json(described)?;
        let choice = ToolChoice::from_json(choice, &tools)?;
        let wanted = match wanted.filter(|format| !format.is_null()) {
            Some(format) => {
                let format = ResponseFormat::from_json(format)?;
                if channels { format.schema().map(harmony::answer) } else { format.grammar() }
            }
            None => None,
        };
        if choice == ToolChoice::None {
            let constraint = wanted.map(|grammar| app.compile(&grammar)).transpose()?;
            let format = ToolFormat::Harmony;
            let reading = || Reading { format, tools: Arc::default(), parallel, calls: false };
            return Ok(Form { reading: channels.then(reading), constraint, demands: false });
        }
        let tooling = app
            .tools
            .ok_or_else(|| ApiError::unsupported("tools", "`tools` are not supported with this model"))?;
        if wanted.is_some() {
            let message = "`response_format` together with `tools` is not supported: an answer has one form; \
                           `tool_choice: \"none\"` leaves the tools out";
            return Err(ApiError::unsupported("response_format", message));
        }
        let format = tooling.format;
        let grammar = choice.grammar(format, &tools, parallel)?;
        let reading = Some(Reading { format, tools: format.held(described)?.into(), parallel, calls: true });
        let demands = grammar.is_some();
        Ok(Form { reading, constraint: grammar.map(|grammar| app.compile(&grammar)).transpose()?, demands })
    }

    /// Returns whether tools may be called.
    pub fn reads_calls(&self) -> bool {
        self.reading.as_ref().is_some_and(|reading| reading.calls)
    }
}

/// The conversation as tokens, up to where the answer begins.
fn prompt(app: &App, fields: &ChatFields) -> Result<Vec<u32>, ApiError> {
    let none = serde_json::Map::new();
    let conversation = Conversation {
        messages: &fields.messages,
        tools: fields.tools.as_deref().unwrap_or_default(),
        add_generation_prompt: true,
        kwargs: fields.chat_template_kwargs.as_ref().unwrap_or(&none),
    };
    let model = app.engine.model();
    let text = render(app, &conversation)?;
    encode_prompt(app, &text, model.chat_template().is_none(), "messages")
}

/// Render the conversation as text. If the model has a template of its own, the text includes the tokens that the model
/// expects at the start. A rendering longer than `max_body_bytes` is an error.
pub(crate) fn render(app: &App, conversation: &Conversation) -> Result<String, ApiError> {
    let model = app.engine.model();
    let messages = for_templates(conversation.messages);
    let text = match model.chat_template() {
        None => plain(&messages, conversation.add_generation_prompt)?,
        Some(template) => {
            let tokenizer = model.tokenizer().ok_or_else(no_tokenizer)?;
            let written = match app.tools.filter(|tools| tools.taught) {
                None if app.channels => {
                    let messages = harmony::for_template(&messages);
                    let tools = harmony::described(conversation.tools);
                    let conversation = Conversation { messages: &messages, tools: &tools, ..*conversation };
                    let ends = !conversation.add_generation_prompt;
                    write(app, template, tokenizer, &conversation)?.map(|text| {
                        match text.strip_suffix(RETURN) {
                            // The template ends messages with this token as in training data. A model never reads it in
                            // a prompt.
                            Some(text) if ends => format!("{text}{END}"),
                            _ => text,
                        }
                    })
                }
                None => {
                    write(app, template, tokenizer, &Conversation { messages: &messages, ..*conversation })?
                }
                Some(_) => {
                    let in_place = |place| {
                        let messages = teach(&messages, conversation.tools, place);
                        let taught = Conversation { messages: &messages, tools: &[], ..*conversation };
                        write(app, template, tokenizer, &taught)
                    };
                    match in_place(Place::System)? {
                        // Some templates refuse a system message.
                        Err(error) if !matches!(error, Error::Halted) && !conversation.tools.is_empty() => {
                            in_place(Place::User)?
                        }
                        written => written,
                    }
                }
            };
            written.map_err(|e| {
                // Templates refuse what their models were not trained on: roles that do not alternate, or a system
                // message.
                let param = match &e {
                    Error::Halted => return halted(),
                    Error::Usage(what) => what.split('`').nth(1).unwrap_or("messages"),
                    _ => "messages",
                };
                ApiError::invalid(param, e.to_string())
            })?
        }
    };
    let most = app.limits.max_body_bytes;
    if text.len() > most {
        let message = format!(
            "the conversation has {} bytes as the model's chat template writes it; {most} (max_body_bytes) are allowed",
            text.len()
        );
        return Err(ApiError::too_long("messages", message));
    }
    Ok(text)
}

/// Render with the template. The outer error means that there is not enough memory for the rendering.
fn write(
    app: &App,
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    conversation: &Conversation,
) -> Result<Result<String, Error>, ApiError> {
    let _taken = app.work.take(conversation.rendering_bytes(), "messages")?;
    Ok(template.render_conversation(conversation, tokenizer))
}

/// Adapt messages to what templates expect.
fn for_templates(messages: &[Value]) -> Vec<Value> {
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
fn plain(messages: &[Value], answer: bool) -> Result<String, ApiError> {
    let mut text = String::new();
    for (i, message) in messages.iter().enumerate() {
        let role = message["role"].as_str().unwrap_or_default();
        if role == "tool" || message.get("tool_calls").is_some_and(|calls| !calls.is_null()) {
            let message = "tool calls are not supported with this model: it has no chat template";
            return Err(ApiError::unsupported(format!("messages[{i}]"), message));
        }
        let content = match &message["content"] {
            Value::Array(parts) => {
                let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
                texts.join("\n")
            }
            content => content.as_str().unwrap_or_default().to_string(),
        };
        text += &format!("{role}: {content}\n");
    }
    if answer {
        text += "assistant:";
    }
    Ok(text)
}

/// A tool call in the format of the API: call `number` of the answer `index` of the request `id`.
pub(crate) fn tool_call(id: &str, index: usize, number: usize, call: &ToolCall) -> Value {
    json!({
        "id": format!("call_{}_{index}_{number}", id.trim_start_matches("chatcmpl-")),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
}

/// The assistant message with this content, and with the calls in the format of the API.
pub(crate) fn message(said: &Said, calls: Vec<Value>) -> Value {
    let mut message = json!({"role": "assistant", "content": said.content});
    if !said.reasoning.is_empty() {
        message["reasoning_content"] = said.reasoning.as_str().into();
    }
    if !calls.is_empty() {
        if said.content.is_empty() {
            message["content"] = Value::Null;
        }
        message["tool_calls"] = calls.into();
    }
    message
}

/// State of one answer.
struct Speaker {
    /// The chunk that names the role was sent.
    begun: bool,
    calls: usize,
    reader: Option<AnswerReader>,
}

impl Speaker {
    fn push(&mut self, text: &str) -> Vec<ToolDelta> {
        let mut out = Vec::new();
        match &mut self.reader {
            Some(reader) => reader.push(text, &mut out),
            None if text.is_empty() => {}
            None => out.push(ToolDelta::Content(text.into())),
        }
        out
    }

    fn finish(&mut self, text: &str) -> Vec<ToolDelta> {
        let mut out = self.push(text);
        if let Some(reader) = &mut self.reader {
            reader.finish(&mut out);
        }
        out
    }
}

/// Writes chat completions.
pub(crate) struct Turn {
    app: Arc<App>,
    id: String,
    created: u64,
    speakers: Vec<Speaker>,
    scorer: Option<Scorer>,
}

impl Turn {
    /// One answer per reader. Without a reader the answer is plain text.
    pub fn new(
        app: &Arc<App>,
        id: String,
        readers: impl Iterator<Item = Option<AnswerReader>>,
        logprobs: bool,
    ) -> Self {
        let speakers = readers.map(|reader| Speaker { begun: false, calls: 0, reader }).collect();
        let scorer = logprobs.then(|| Scorer::chat(app));
        Turn { app: app.clone(), id, created: app.now(), speakers, scorer }
    }

    fn choice(index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})
    }

    fn call(&self, index: usize, number: usize, call: &ToolCall) -> Value {
        tool_call(&self.id, index, number, call)
    }

    /// Add the chunk that names the role, once, and then the content.
    fn say(&mut self, index: usize, said: Vec<ToolDelta>, mut scores: Value, choices: &mut Vec<Value>) {
        let speaker = &mut self.speakers[index];
        if !std::mem::replace(&mut speaker.begun, true) {
            let delta = json!({"role": "assistant", "content": ""});
            choices.push(Self::choice(index, delta, Value::Null, None));
        }
        for delta in said {
            let delta = match delta {
                ToolDelta::Content(text) => json!({"content": text}),
                ToolDelta::Reasoning(text) => json!({"reasoning_content": text}),
                ToolDelta::Call { index: number, call } => {
                    self.speakers[index].calls += 1;
                    let mut call = self.call(index, number, &call);
                    call["index"] = number.into();
                    json!({"tool_calls": [call]})
                }
            };
            choices.push(Self::choice(index, delta, scores.take(), None));
        }
        // Every token gets its score, even if its text is held back or parsed as a call.
        if !scores.is_null() {
            choices.push(Self::choice(index, json!({"content": ""}), scores, None));
        }
    }

    fn reason(&self, index: usize, done: &Done) -> &'static str {
        match finish_reason(&done.finish) {
            "stop" if self.speakers[index].calls > 0 => "tool_calls",
            reason => reason,
        }
    }
}

impl Shape for Turn {
    fn head(&self, streamed: bool) -> Value {
        json!({
            "id": self.id,
            "object": if streamed { "chat.completion.chunk" } else { "chat.completion" },
            "created": self.created,
            "model": self.app.bounds.model,
        })
    }

    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value> {
        let mut choices = Vec::new();
        let said = self.speakers[index].push(&token.text);
        let scores = self
            .scorer
            .as_ref()
            .map_or(Value::Null, |scorer| scorer.of_tokens(std::slice::from_ref(token), 0));
        self.say(index, said, scores, &mut choices);
        choices
    }

    fn last(&mut self, index: usize, done: &Done) -> Vec<Value> {
        let mut choices = Vec::new();
        let said = self.speakers[index].finish(&done.text);
        self.say(index, said, Value::Null, &mut choices);
        choices.push(Self::choice(index, json!({}), Value::Null, Some(self.reason(index, done))));
        choices
    }

    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value {
        let mut text: String = tokens.iter().map(|t| t.text.as_str()).collect();
        text += &done.text;
        let said: Said = self.speakers[index].finish(&text).into_iter().collect();
        let calls = said.calls.iter().enumerate().map(|(number, call)| self.call(index, number, call));
        let calls: Vec<Value> = calls.collect();
        self.speakers[index].calls = calls.len();
        let mut message = message(&said, calls);
        message["refusal"] = Value::Null;
        json!({
            "index": index,
            "message": message,
            "logprobs": null,
            "finish_reason": self.reason(index, done),
        })
    }

    fn scorer(&self) -> Option<Scorer> {
        self.scorer.clone()
    }
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
        assert_eq!(for_templates(&messages), expected);
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
        assert_eq!(plain(&tool, true).unwrap_err().param.as_deref(), Some("messages[0]"));
    }
}
