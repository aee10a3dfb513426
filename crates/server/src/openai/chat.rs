//! `POST /v1/chat/completions`: generates the assistant's next message.
use super::fields::{ChatFields, Common, check, check_together, read};
use super::generation::Answers;
use super::generation_request::GenerationRequest;
use super::scores::Scorer;
use super::stream;
use super::token_ids::TokenIds;
use super::tokens::encode_prompt;
use super::writer::{AnswerWriter, finish_reason};
use crate::auth::Caller;
use crate::error::ApiError;
use crate::extract::Posted;
use crate::state::{EFFORT, ServerState};
use axum::response::Response;
use kvist_engine::chat_format::{AnswerSpec, ChatFormat, PLAIN_STOP};
use kvist_engine::serving::{Done, Token};
use kvist_engine::tools::{AnswerFormat, AnswerParser, ParsedAnswer, ToolDelta};
use kvist_model::template::Conversation;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) async fn chat(posted: Posted) -> Result<Response, ApiError> {
    let state = posted.call.state.clone();
    let prepared = posted.prepare(prepare);
    let (request, writer, common) = prepared.await?;
    let answers = Answers::begin(&state, request)?;
    stream::respond(answers, writer, &common).await
}

/// Turn a checked body into a request to the engine. Runs on a blocking thread.
fn prepare(
    state: &Arc<ServerState>,
    caller: &Caller,
    body: &mut Value,
) -> Result<(GenerationRequest, ChatWriter, Common), ApiError> {
    let Admitted { mut request, common, spec } = admitted(state, caller, body)?;
    state.log_prompts(&request.id, &request.prompts);
    let parser = || spec.format.as_ref().map(AnswerFormat::parser);
    let parsers = (0..request.n).map(|_| parser());
    let writer = ChatWriter::new(state, &request, parsers, true);
    request.queue(state)?;
    Ok((request, writer, common))
}

/// The prompt that this body would run.
pub(super) fn prompts(
    state: &Arc<ServerState>,
    caller: &Caller,
    body: &mut Value,
) -> Result<Vec<Arc<[u32]>>, ApiError> {
    admitted(state, caller, body).map(|admitted| admitted.request.prompts)
}

/// A request that can be served, and how its answers are written.
struct Admitted {
    request: GenerationRequest,
    common: Common,
    spec: AnswerSpec,
}

fn admitted(state: &Arc<ServerState>, caller: &Caller, body: &mut Value) -> Result<Admitted, ApiError> {
    check_together(body, state.bounds.tools)?;
    check(body, &state.schemas.chat, &state.bounds.model)?;
    let (common, mut fields): (Common, ChatFields) = (read(body)?, read(body)?);
    // Both are upper limits.
    let asked = fields.max_completion_tokens.into_iter().chain(fields.max_tokens).min();
    let id = state.new_id("chatcmpl");
    let mut request = GenerationRequest::new(state, caller, &common, id, "chat")?;
    let parallel = fields.parallel_tool_calls.unwrap_or(true);
    let tools = fields.tools.as_deref().unwrap_or_default();
    let choice = fields.tool_choice.as_ref();
    let (chat, response_format) = (&state.chat, fields.response_format.as_ref());
    let mut spec = AnswerSpec::new(chat, chat.has_channels(), tools, choice, parallel, response_format)?;
    if !spec.allows_calls() {
        // The template must not describe tools that may not be called.
        fields.tools = None;
    }
    if let Some(effort) = fields.reasoning_effort.take() {
        let kwargs = fields.chat_template_kwargs.get_or_insert_default();
        kwargs.entry(EFFORT).or_insert(effort.into());
    }
    let prompt = prompt(state, &fields)?;
    spec.separate_reasoning(chat, &prompt);
    request.prompts = vec![prompt.into()];
    request.constraint = spec.constraint.take();
    if spec.format.is_some() {
        request.written = chat.marks().to_vec();
    }
    if state.engine.model().chat_template().is_none() {
        request.stop.push(PLAIN_STOP.into());
    }
    request.logprobs = fields.logprobs.unwrap_or(false).then(|| fields.top_logprobs.unwrap_or(0));
    request.admit(state, asked, "messages")?;
    Ok(Admitted { request, common, spec })
}

/// The conversation as tokens, up to where the answer begins.
fn prompt(state: &ServerState, fields: &ChatFields) -> Result<Vec<u32>, ApiError> {
    let none = serde_json::Map::new();
    let conversation = Conversation {
        messages: &fields.messages,
        tools: fields.tools.as_deref().unwrap_or_default(),
        add_generation_prompt: true,
        kwargs: fields.chat_template_kwargs.as_ref().unwrap_or(&none),
    };
    let model = state.engine.model();
    let text = render(state, &conversation)?;
    encode_prompt(state, &text, model.chat_template().is_none(), "messages")
}

/// Render the conversation as text: [`ChatFormat::render`](kvist_engine::chat_format::ChatFormat::render). A rendering
/// longer than `max_body_bytes` is an error.
pub(crate) fn render(state: &ServerState, conversation: &Conversation) -> Result<String, ApiError> {
    let text = state.chat.render(conversation, |bytes| state.work.take(bytes, "messages"))?;
    let max = state.limits.max_body_bytes;
    if text.len() > max {
        let message = format!(
            "the conversation has {} bytes once formatted by the model's chat template; {max} (max_body_bytes) are \
             allowed",
            text.len()
        );
        return Err(ApiError::too_long("messages", message));
    }
    Ok(text)
}

/// State of one answer.
struct ChatAnswer {
    /// The chunk that names the role was sent.
    has_role: bool,
    calls: usize,
    /// `None`: the answer is plain text.
    parser: Option<AnswerParser>,
    /// The text that comes next is the first of the message.
    begins: bool,
}

impl ChatAnswer {
    fn push(&mut self, chat: &ChatFormat, text: &str) -> Vec<ToolDelta> {
        let mut out = Vec::new();
        match &mut self.parser {
            Some(parser) => parser.push(text, &mut out),
            None if text.is_empty() => {}
            None => {
                // As sessions keep it: the next prompt then repeats what the model generated.
                let text = match std::mem::take(&mut self.begins) {
                    true => chat.content(text),
                    false => text.into(),
                };
                if !text.is_empty() {
                    out.push(ToolDelta::Content(text));
                }
            }
        }
        out
    }

    fn finish(&mut self, chat: &ChatFormat, text: &str) -> Vec<ToolDelta> {
        let mut out = self.push(chat, text);
        if let Some(parser) = &mut self.parser {
            parser.finish(&mut out);
        }
        out
    }
}

/// Writes chat completions.
pub(crate) struct ChatWriter {
    state: Arc<ServerState>,
    id: String,
    created: u64,
    answers: Vec<ChatAnswer>,
    scorer: Option<Scorer>,
    ids: TokenIds,
}

impl ChatWriter {
    /// One answer per parser. Without a parser the answer is plain text. `begins`: the answers are whole messages, not
    /// the rest of one.
    pub fn new(
        state: &Arc<ServerState>,
        request: &GenerationRequest,
        parsers: impl Iterator<Item = Option<AnswerParser>>,
        begins: bool,
    ) -> Self {
        let answers = parsers.map(|parser| ChatAnswer { has_role: false, calls: 0, parser, begins });
        ChatWriter {
            state: state.clone(),
            id: request.id.clone(),
            created: state.now(),
            answers: answers.collect(),
            scorer: request.logprobs.is_some().then(|| Scorer::chat(state)),
            ids: TokenIds::new(request),
        }
    }

    fn choice(index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})
    }

    /// Add the chunk that names the role, once, and then the content.
    fn write(&mut self, index: usize, deltas: Vec<ToolDelta>, mut scores: Value, choices: &mut Vec<Value>) {
        let answer = &mut self.answers[index];
        if !std::mem::replace(&mut answer.has_role, true) {
            let delta = json!({"role": "assistant", "content": ""});
            choices.push(Self::choice(index, delta, Value::Null, None));
        }
        for delta in deltas {
            let delta = match delta {
                ToolDelta::Content(text) => json!({"content": text}),
                ToolDelta::Reasoning(text) => json!({"reasoning_content": text}),
                ToolDelta::Call { index: number, call } => {
                    self.answers[index].calls += 1;
                    let mut call = call.to_json(&self.id, index, number);
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
            "stop" if self.answers[index].calls > 0 => "tool_calls",
            reason => reason,
        }
    }
}

impl AnswerWriter for ChatWriter {
    fn head(&mut self, streamed: bool) -> Value {
        let mut head = json!({
            "id": self.id,
            "object": if streamed { "chat.completion.chunk" } else { "chat.completion" },
            "created": self.created,
            "model": self.state.bounds.model,
        });
        // The only prompt: in a stream its first chunk has it.
        self.ids.add_prompt(&mut head, 0);
        head
    }

    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value> {
        let mut choices = Vec::new();
        let deltas = self.answers[index].push(&self.state.chat, &token.text);
        let scores = self
            .scorer
            .as_ref()
            .map_or(Value::Null, |scorer| scorer.of_tokens(std::slice::from_ref(token), 0));
        self.write(index, deltas, scores, &mut choices);
        if self.ids.are_wanted() {
            // The last chunk of a token has its id: a token may have no text of its own, or several parts.
            if choices.is_empty() {
                choices.push(Self::choice(index, json!({}), Value::Null, None));
            }
            let last = choices.len() - 1;
            self.ids.add(&mut choices[last], std::slice::from_ref(token));
        }
        choices
    }

    fn last(&mut self, index: usize, done: &Done) -> Vec<Value> {
        let mut choices = Vec::new();
        let deltas = self.answers[index].finish(&self.state.chat, &done.text);
        self.write(index, deltas, Value::Null, &mut choices);
        choices.push(Self::choice(index, json!({}), Value::Null, Some(self.reason(index, done))));
        choices
    }

    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value {
        let mut text: String = tokens.iter().map(|t| t.text.as_str()).collect();
        text += &done.text;
        let parsed: ParsedAnswer = self.answers[index].finish(&self.state.chat, &text).into_iter().collect();
        let calls =
            parsed.calls.iter().enumerate().map(|(number, call)| call.to_json(&self.id, index, number));
        let calls: Vec<Value> = calls.collect();
        self.answers[index].calls = calls.len();
        let mut message = parsed.to_message(calls);
        message["refusal"] = Value::Null;
        let mut choice = json!({
            "index": index,
            "message": message,
            "logprobs": null,
            "finish_reason": self.reason(index, done),
        });
        self.ids.add(&mut choice, tokens);
        choice
    }

    fn scorer(&self) -> Option<Scorer> {
        self.scorer.clone()
    }
}
