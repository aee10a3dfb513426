//! `POST /v1/sessions/{id}/generate`: continues a session; the output becomes part of its history.
//!
//! The response has the shape of a chat completion if the session consists of messages, otherwise of a
//! completion. Its field `session` names the session.
use super::fields::GenerateFields;
use super::shared::arrive;
use super::tokenizer::decoding_memory;
use super::verbs::check_tools;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::extract::{Path, Posted};
use crate::openai::chat::ChatWriter;
use crate::openai::completions::CompletionWriter;
use crate::openai::fields::{Common, check, check_together, read};
use crate::openai::generation::Answers;
use crate::openai::generation_request::{EventStream, GenerationRequest};
use crate::openai::scores::Scorer;
use crate::openai::stream;
use crate::openai::writer::AnswerWriter;
use crate::state::ServerState;
use crate::work::{self, SETTLING_BYTES};
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::stream::{StreamExt, unfold};
use kvist_engine::chat_format::{AnswerSpec, PLAIN_STOP};
use kvist_engine::serving::{Done, Event, FinishReason, GenerationHandle, Token};
use kvist_engine::sessions::{History, SessionGeneration, Timestamp};
use kvist_engine::tools::AnswerParser;
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinError;

pub(crate) async fn generate(Path(id): Path<String>, posted: Posted) -> Result<Response, ApiError> {
    let state = posted.call.state.clone();
    let _arrival = arrive(&state, &posted.call.caller, &id).await?;
    let prepared = posted.prepare(move |state, caller, body| prepare(state, caller, &id, body));
    let Prepared { mut request, run, parser, is_chat, common } = prepared.await?;
    let session = run.generation.guard().id.to_string();
    let begins = !run.generation.continues_answer();
    request.session = Some(session.as_str().into());
    request.record = Some(Box::new(|generation| run.follow(generation)));
    let chat = is_chat.then(|| ChatWriter::new(&state, &request, std::iter::once(parser), begins));
    let text = CompletionWriter::new(&state, &request);
    let answers = Answers::begin(&state, request)?;
    match chat {
        Some(writer) => stream::respond(answers, WithSession { writer, session }, &common).await,
        None => stream::respond(answers, WithSession { writer: text, session }, &common).await,
    }
}

/// A request that is ready to submit.
struct Prepared {
    request: GenerationRequest,
    /// Records the output.
    run: Run,
    /// The parser of the client's stream.
    parser: Option<AnswerParser>,
    /// The output is an answer of the assistant.
    is_chat: bool,
    common: Common,
}

/// Turns a checked body into a request to the engine. Runs on a blocking thread.
fn prepare(
    state: &Arc<ServerState>,
    caller: &Caller,
    id: &str,
    body: &mut Value,
) -> Result<Prepared, ApiError> {
    let id = state.sessions.id(id)?;
    check_together(body, state.bounds.tools)?;
    check(body, &state.schemas.sessions.generate, &state.bounds.model)?;
    let (common, fields): (Common, GenerateFields) = (read(body)?, read(body)?);
    let guard = state.sessions.claim(Timestamp::now(), &caller.name, id, true)?;
    let tools = match &fields.tools {
        Some(tools) => tools.as_slice(),
        None => guard.history.tools(),
    };
    let (mut spec, history) = answer_spec(state, &guard.history, &fields, tools)?;
    let prompt = history.as_prompt(&**state, fields.add_generation_prompt)?;
    if prompt.tokens.is_empty() {
        let message = "the session is empty: append `messages`, `text` or `tokens` first";
        return Err(ApiError::new(StatusCode::CONFLICT, "session_empty", message));
    }
    let is_chat = prompt.has_messages() && !prompt.has_tail();
    if is_chat {
        spec.separate_reasoning(&state.chat, &prompt.tokens[..prompt.answer_start()]);
    }
    let kind = if is_chat { "chatcmpl" } else { "cmpl" };
    let mut request = GenerationRequest::new(state, caller, &common, state.new_id(kind), "sessions")?;
    request.constraint = spec.constraint;
    let format = spec.format.filter(|_| is_chat);
    if format.is_none() && asks_for_calls(&fields) {
        let message = "`tools` apply only to answers of the assistant, but this session continues as plain text: \
                       append `messages`, or omit `tools` and `tool_choice`";
        return Err(ApiError::invalid("tools", message));
    }
    if format.is_some() {
        request.written = state.chat.marks().to_vec();
    }
    request.salt = guard.salt.clone();
    if let Some(keeper) = state.keeper.get() {
        keeper.warm(&guard.salt, &prompt.tokens);
    }
    request.prompts = vec![prompt.tokens.as_slice().into()];
    if is_chat && state.engine.model().chat_template().is_none() {
        request.stop.push(PLAIN_STOP.into());
    }
    request.logprobs = fields.logprobs.unwrap_or(false).then(|| fields.top_logprobs.unwrap_or(0));
    let asked = fields.max_completion_tokens.into_iter().chain(fields.max_tokens).min();
    request.admit(state, asked, "session")?;
    state.log_prompts(&request.id, &request.prompts);
    request.queue(state)?;
    let generation = SessionGeneration::new(guard, prompt)
        .with_format(format, &request.id)
        .with_ignore_eos(request.ignore_eos);
    let parser = generation.parser();
    let run = Run { state: state.clone(), generation, owner: caller.name.clone() };
    Ok(Prepared { request, run, parser, is_chat, common })
}

/// True if this request itself asks for tool calls.
fn asks_for_calls(fields: &GenerateFields) -> bool {
    match fields.tool_choice.as_ref().filter(|choice| !choice.is_null()) {
        Some(choice) => choice != "none",
        None => fields.tools.as_ref().is_some_and(|tools| !tools.is_empty()),
    }
}

/// What the answer must look like, and the history with the tools that are passed to its template.
fn answer_spec(
    state: &ServerState,
    history: &History,
    fields: &GenerateFields,
    tools: &[Value],
) -> Result<(AnswerSpec, History), ApiError> {
    check_tools(tools)?;
    let continues = history.is_open() && fields.add_generation_prompt != Some(true);
    let another = "an unfinished answer: `add_generation_prompt: true` begins a new one";
    if continues && tools != history.tools() {
        let message =
            format!("`tools` cannot change inside an answer, but the session's last message is {another}");
        return Err(ApiError::invalid("tools", message));
    }
    // Tools that were set on the session earlier do not count as a wish of this request.
    let wanted = fields.response_format.as_ref().filter(|format| !format.is_null());
    let silent = fields.tools.is_none() && fields.tool_choice.is_none();
    let none = Value::from("none");
    let choice = match silent && (wanted.is_some() || state.chat.tools().is_none()) {
        true => Some(&none),
        false => fields.tool_choice.as_ref(),
    };
    // Text without messages has no channels.
    let ends = fields.add_generation_prompt == Some(false) && !history.is_open();
    let channels = state.chat.has_channels() && history.has_messages() && !history.has_tail() && !ends;
    let parallel = fields.parallel_tool_calls.unwrap_or(true);
    let spec = AnswerSpec::new(&state.chat, channels, tools, choice, parallel, wanted)?;
    if continues && spec.requires_call {
        let message = format!(
            "`tool_choice` requires a call, which must begin an answer, but the session's last message is {another}"
        );
        return Err(ApiError::invalid("tool_choice", message));
    }
    if continues && spec.constraint.is_some() && channels {
        let message = format!(
            "`response_format` applies to the final message of a whole answer, but the session's last message is \
             {another}"
        );
        return Err(ApiError::invalid("response_format", message));
    }
    Ok((spec, history.with_tools(tools)))
}

/// A generation in a session, which records its output in the history.
struct Run {
    state: Arc<ServerState>,
    generation: SessionGeneration,
    /// Name of the API key that generates.
    owner: Arc<str>,
}

/// How many tokens a client may fall behind its session. The stream of a slower client ends with an error; the
/// session continues.
const MAX_BEHIND: usize = 4096;

impl Run {
    /// Starts a task that appends the output to the history as fast as it is generated, and sends it to the
    /// client through a queue. The generation ends early if the session is deleted, its quota is exceeded, or
    /// the client disconnects.
    fn follow(self, generation: GenerationHandle) -> EventStream {
        let (sender, events) = mpsc::channel(MAX_BEHIND);
        let unsettled = self.state.unsettled.begin();
        tokio::spawn(async move {
            self.record(generation, sender).await;
            drop(unsettled);
        });
        unfold(events, |mut events| async move { Some((events.recv().await?, events)) }).boxed()
    }

    async fn record(
        mut self,
        mut generation: GenerationHandle,
        client: mpsc::Sender<Result<Event, ApiError>>,
    ) {
        let deleted = self.generation.guard().deleted();
        tokio::pin!(deleted);
        let mut behind = false;
        let (done, last) = loop {
            let event = tokio::select! {
                biased; // record pending tokens first
                event = generation.next() => event,
                error = &mut deleted => break (None, Some(Err(error.into()))),
                () = client.closed() => break (None, None),
            };
            match event {
                Some(Event::Token(token)) => {
                    if let Err(error) = self.generation.push(&token) {
                        break (None, Some(Err(error.into())));
                    }
                    // Keep one slot free for the final event.
                    behind |= client.capacity() < 2;
                    if !behind {
                        let _ = client.try_send(Ok(Event::Token(token)));
                    }
                }
                Some(Event::Done(done)) => break (Some(done.clone()), Some(Ok(Event::Done(done)))),
                Some(Event::Failed(failure)) => break (None, Some(Ok(Event::Failed(failure)))),
                Some(event) => drop(client.try_send(Ok(event))),
                None => break (None, None),
            }
        };
        // Stop the job, so that nothing more is computed while the history is finalized.
        drop(generation);
        // The client gets the final event only after the session has been updated.
        let settled = self.settled(done).await;
        if let Err(error) = settled {
            tracing::error!(target: "kvist::server", "the output was not added to the session: {error}");
        }
        let last = match behind {
            true => Some(Err(too_slow())),
            false => last,
        };
        if let Some(last) = last {
            let _ = client.try_send(last);
        }
    }

    async fn settled(self, done: Option<Done>) -> Result<(), JoinError> {
        let Run { state, generation, owner } = self;
        let (history, from) = generation.recorded();
        let stops = matches!(done.as_ref().map(|done| &done.finish), Some(FinishReason::Stop(_)));
        let of = state.clone();
        let bytes = move || {
            let decoded = decoding_memory(&of, history.unsettled(&*of, from));
            // A stop string may end inside a token; the part of the token before it is tokenized again.
            (decoded + if stops { SETTLING_BYTES } else { 0 }).min(of.work.bytes())
        };
        let bytes = tokio::task::spawn_blocking(bytes).await?;
        // This task waits for memory, without blocking a thread and without a time limit, so that the output is
        // not lost.
        let permit = state.work.permit(&owner, bytes).await;
        let left = permit.as_ref().map_or(0, |_| bytes);
        let settle = move || work::with(owner, permit, left, || generation.finish(&*state, done.as_ref()));
        tokio::task::spawn_blocking(settle).await
    }
}

fn too_slow() -> ApiError {
    let message = format!(
        "the client fell more than {MAX_BEHIND} tokens behind the stream: the session has all tokens"
    );
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "reads_too_slowly", message)
}

/// Adds the session's id to every response.
struct WithSession<W> {
    writer: W,
    session: String,
}

impl<W: AnswerWriter> AnswerWriter for WithSession<W> {
    fn head(&mut self, streamed: bool) -> Value {
        let mut head = self.writer.head(streamed);
        head["session"] = self.session.as_str().into();
        head
    }
    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value> {
        self.writer.delta(index, token)
    }
    fn last(&mut self, index: usize, done: &Done) -> Vec<Value> {
        self.writer.last(index, done)
    }
    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value {
        self.writer.whole(index, tokens, done)
    }
    fn scorer(&self) -> Option<Scorer> {
        self.writer.scorer()
    }
}
