//! `POST /v1/sessions/{id}/generate`: continues a session; the output becomes part of its history.
//!
//! The response has the shape of a chat completion if the session consists of messages, otherwise of a
//! completion. Its field `session` names the session.
use super::fields::GenerateFields;
use super::history::History;
use super::store::SessionGuard;
use super::verbs::{decoding_room, known_tools, moment};
use crate::app::App;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::http::{Path, json_body};
use crate::job::{Done, Event, Finish, Token};
use crate::openai::chat::{Form, PLAIN_STOP, Turn, message, tool_call};
use crate::openai::completions::Text;
use crate::openai::fields::{Common, check, check_together, read};
use crate::openai::generation::{Answers, Order, Told};
use crate::openai::scores::Scorer;
use crate::openai::stream::{self, Shape};
use crate::tools::{AnswerReader, Reading, ToolFormat};
use crate::work::{self, SETTLING_BYTES};
use crate::worker::Generation;
use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::stream::{StreamExt, unfold};
use serde_json::Value;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;
use tokio::task::JoinError;

pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut body = json_body(&app, request).await?;
    let prepared = app.prepare(&caller, move |app, caller| prepare(app, caller, &id, &mut body));
    let (mut order, run, common) = prepared.await?;
    let (prompt, deadline) = (order.prompts[0].clone(), order.deadline);
    run.wait(&prompt, deadline).await?;
    let session = run.claim.id.to_string();
    order.session = Some(session.as_str().into());
    let (chats, reader) = (run.chats, run.reader.clone());
    order.record = Some(Box::new(|generation| run.follow(generation)));
    let (logprobs, id) = (order.logprobs.is_some(), order.id.clone());
    let text = Text::new(&app, &order);
    let answers = Answers::begin(&app, order)?;
    match chats {
        true => {
            let shape = Turn::new(&app, id, std::iter::once(reader), logprobs);
            stream::respond(answers, Within { shape, session }, &common).await
        }
        false => stream::respond(answers, Within { shape: text, session }, &common).await,
    }
}

/// Validates the request body; returns the job to submit and the [`Run`] that records its output.
fn prepare(
    app: &Arc<App>,
    caller: &Caller,
    id: &str,
    body: &mut Value,
) -> Result<(Order, Run, Common), ApiError> {
    let id = app.sessions.id(id)?;
    check_together(body, app.bounds.tools)?;
    check(body, &app.schemas.sessions.generate, &app.bounds.model)?;
    let (common, fields): (Common, GenerateFields) = (read(body)?, read(body)?);
    let claim = app.sessions.claim(moment(app), &caller.name, id, true)?;
    let tools = match &fields.tools {
        Some(tools) => tools.as_slice(),
        None => claim.history.tools(),
    };
    let (form, history) = form(app, &claim.history, &fields, tools)?;
    let began = begin(app, &history, fields.add_generation_prompt)?;
    if began.tokens.is_empty() {
        let message = "the session is empty: append `messages`, `text` or `tokens` first";
        return Err(ApiError::new(StatusCode::CONFLICT, "session_empty", message));
    }
    let chats = began.has_messages() && !began.has_tail();
    let kind = if chats { "chatcmpl" } else { "cmpl" };
    let mut order = Order::new(app, caller, &common, app.new_id(kind), "sessions")?;
    order.constraint = form.constraint;
    let reading = form.reading.filter(|_| chats);
    if reading.is_none() && asks_for_calls(&fields) {
        let message = "`tools` are for answers of the assistant, and this session goes on as a text: append `messages`, \
                       or leave `tools` and `tool_choice` out";
        return Err(ApiError::invalid("tools", message));
    }
    // An answer that is continued may end inside a tool call or a Harmony message.
    let before = began.open_text().unwrap_or_default().to_string();
    let reader = reading.as_ref().map(|reading| {
        let mut reader = reading.reader();
        reader.push(&before, &mut Vec::new());
        reader
    });
    if reading.is_some() {
        order.written = app.marks.clone();
    }
    order.salt = claim.salt.clone();
    order.prompts = vec![began.tokens.as_slice().into()];
    if chats && app.engine.model().chat_template().is_none() {
        order.stop.push(PLAIN_STOP.into());
    }
    order.logprobs = fields.logprobs.unwrap_or(false).then(|| fields.top_logprobs.unwrap_or(0));
    let asked = fields.max_completion_tokens.into_iter().chain(fields.max_tokens).min();
    order.admit(app, asked, "session")?;
    app.log_prompts(&order.id, &order.prompts);
    order.queue(app)?;
    let run = Run {
        app: app.clone(),
        claim,
        chats,
        from: began.tokens.len(),
        owner: caller.name.clone(),
        began: Some(began),
        text: String::new(),
        before,
        reading,
        reader,
        request: order.id.clone(),
        last: None,
        ignore_eos: order.ignore_eos,
    };
    Ok((order, run, common))
}

/// True if this request itself asks for tool calls.
fn asks_for_calls(fields: &GenerateFields) -> bool {
    match fields.tool_choice.as_ref().filter(|choice| !choice.is_null()) {
        Some(choice) => choice != "none",
        None => fields.tools.as_ref().is_some_and(|tools| !tools.is_empty()),
    }
}

/// The output constraint, and the history with the tools that its template is told of.
fn form(
    app: &App,
    history: &History,
    fields: &GenerateFields,
    tools: &[Value],
) -> Result<(Form, History), ApiError> {
    known_tools(tools)?;
    let goes_on = history.is_open() && fields.add_generation_prompt != Some(true);
    let another = "an answer that goes on: `add_generation_prompt: true` begins another one";
    if goes_on && tools != history.tools() {
        let message =
            format!("`tools` cannot change inside an answer, and the session's last message is {another}");
        return Err(ApiError::invalid("tools", message));
    }
    // Tools that were set on the session earlier do not count as a wish of this request.
    let wanted = fields.response_format.as_ref().filter(|format| !format.is_null());
    let silent = fields.tools.is_none() && fields.tool_choice.is_none();
    let none = Value::from("none");
    let choice = match silent && (wanted.is_some() || app.tools.is_none()) {
        true => Some(&none),
        false => fields.tool_choice.as_ref(),
    };
    // Text without messages has no channels.
    let ends = fields.add_generation_prompt == Some(false) && !history.is_open();
    let channels = app.channels && history.has_messages() && !history.has_tail() && !ends;
    let parallel = fields.parallel_tool_calls.unwrap_or(true);
    let form = Form::new(app, channels, tools, choice, parallel, wanted)?;
    if goes_on && form.demands {
        let message = format!(
            "`tool_choice` demands a call, which begins an answer, and the session's last message is {another}"
        );
        return Err(ApiError::invalid("tool_choice", message));
    }
    if goes_on && form.constraint.is_some() && channels {
        let message = format!(
            "`response_format` is for the final message of a whole answer, and the session's last message is {another}"
        );
        return Err(ApiError::invalid("response_format", message));
    }
    Ok((form, history.with_tools(tools)))
}

/// The history to use as the prompt: with the beginning of a new answer, or as it is.
fn begin(app: &App, history: &History, answer: Option<bool>) -> Result<History, ApiError> {
    let by_itself = history.has_messages() && !history.has_tail() && !history.is_open();
    match answer {
        Some(true) if !history.has_messages() => {
            let message = "this session is not made of messages: it has no answers of an assistant";
            Err(ApiError::invalid("add_generation_prompt", message))
        }
        Some(true) => history.with_answer(app),
        None if by_itself => history.with_answer(app),
        _ if by_itself => Ok(history.with_tail()),
        _ => Ok(history.clone()),
    }
}

/// A generation in a session, which records its output in the history.
struct Run {
    app: Arc<App>,
    claim: SessionGuard,
    /// Name of the API key that generates.
    owner: Arc<str>,
    chats: bool,
    /// The prompt; it becomes the history with the first token.
    began: Option<History>,
    /// Index in the history of the first generated token.
    from: usize,
    /// Text generated so far.
    text: String,
    /// Text of the continued answer before this generation.
    before: String,
    /// How to parse the answer, and the parser of the client's stream.
    reading: Option<Reading>,
    reader: Option<AnswerReader>,
    /// The request's id, from which the ids of tool calls are derived.
    request: String,
    last: Option<u32>,
    ignore_eos: bool,
}

impl Run {
    /// Waits while another generation computes a prefix that this one needs too.
    async fn wait(&self, prompt: &Arc<[u32]>, deadline: Instant) -> Result<(), ApiError> {
        let deadline = tokio::time::Instant::from_std(deadline);
        while let Some(mut other) = self.claim.announce(prompt)? {
            let gone = tokio::time::timeout_at(deadline, other.changed()).await;
            if gone.is_err() {
                return Err(ApiError::deadline());
            }
        }
        Ok(())
    }
}

/// How many tokens a client may fall behind its session. The stream of a slower client ends with an error; the
/// session continues.
const MAX_BEHIND: usize = 4096;

impl Run {
    /// Starts a task that appends the output to the history as fast as it is generated, and sends it to the
    /// client through a queue. The generation ends early if the session is deleted, its quota is exceeded, or
    /// the client disconnects.
    fn follow(self, generation: Generation) -> Told {
        let (tell, told) = mpsc::channel(MAX_BEHIND);
        tokio::spawn(self.record(generation, tell));
        unfold(told, |mut told| async move { Some((told.recv().await?, told)) }).boxed()
    }

    async fn record(mut self, mut generation: Generation, tell: mpsc::Sender<Result<Event, ApiError>>) {
        let gone = self.claim.deleted();
        tokio::pin!(gone);
        let mut behind = false;
        let (done, last) = loop {
            let event = tokio::select! {
                biased; // record pending tokens first
                event = generation.next() => event,
                error = &mut gone => break (None, Some(Err(error))),
                () = tell.closed() => break (None, None),
            };
            match event {
                Some(Event::Token(token)) => {
                    if let Err(error) = self.token(&token) {
                        break (None, Some(Err(error)));
                    }
                    // Keep one slot free for the final event.
                    behind |= tell.capacity() < 2;
                    if !behind {
                        let _ = tell.try_send(Ok(Event::Token(token)));
                    }
                }
                Some(Event::Done(done)) => break (Some(done.clone()), Some(Ok(Event::Done(done)))),
                Some(Event::Failed(failure)) => break (None, Some(Ok(Event::Failed(failure)))),
                Some(event) => drop(tell.try_send(Ok(event))),
                None => break (None, None),
            }
        };
        // Stop the job, so that nothing more is computed while the history is finalized.
        drop(generation);
        // The client gets the final event only after the session has been updated.
        let settled = self.settled(done).await;
        if let Err(error) = settled {
            tracing::error!(target: "kvist::server", "a session was not settled: {error}");
        }
        let last = match behind {
            true => Some(Err(too_slow())),
            false => last,
        };
        if let Some(last) = last {
            let _ = tell.try_send(last);
        }
    }

    async fn settled(self, done: Option<Done>) -> Result<(), JoinError> {
        let name = self.owner.clone();
        let (app, from) = (self.app.clone(), self.from);
        let history = self.claim.now();
        let stops = matches!(done.as_ref().map(|done| &done.finish), Some(Finish::Stop(_)));
        let bytes = move || {
            let decoded = decoding_room(&app, history.unsettled(&*app, from));
            // A stop string may end inside a token; the part of the token before it is tokenized again.
            (decoded + if stops { SETTLING_BYTES } else { 0 }).min(app.work.bytes())
        };
        let bytes = tokio::task::spawn_blocking(bytes).await?;
        // This task waits for memory, without blocking a thread and without a time limit, so that the output is
        // not lost.
        let room = self.app.work.room(&name, bytes).await;
        let left = room.as_ref().map_or(0, |_| bytes);
        tokio::task::spawn_blocking(move || work::with(name, room, left, || self.settle(done.as_ref()))).await
    }

    fn token(&mut self, token: &Token) -> Result<(), ApiError> {
        self.text += &token.text;
        self.last = Some(token.id);
        self.claim.push(self.began.take(), token.id)
    }

    /// Finalizes the history after the generation. `done` is `None` if the generation was cut off; the tokens
    /// so far are kept.
    fn settle(mut self, done: Option<&Done>) {
        let stopped = done.is_some_and(|done| matches!(done.finish, Finish::Stop(_)));
        let at_end = done.is_some_and(|done| done.finish == Finish::EndOfText);
        let end = at_end
            && !self.ignore_eos
            && self.last.is_some_and(|token| self.app.engine.model().end_tokens().contains(&token));
        self.text += done.map_or("", |done| &done.text);
        let (app, from, text) = (self.app, self.from, self.text);
        let raw = self.before + &text;
        let shown = self.reading.filter(|_| stopped || at_end).and_then(|reading| {
            let said = reading.reader().whole(&raw);
            let calls = said.calls.iter().enumerate();
            let calls: Vec<Value> = calls.map(|(n, call)| tool_call(&self.request, 0, n, call)).collect();
            let is_text = calls.is_empty() && reading.format != ToolFormat::Harmony;
            (!is_text).then(|| message(&said, calls))
        });
        self.claim.end(Instant::now(), |history| {
            let settled = match stopped || at_end {
                true => history.end_answer(&*app, from, end, stopped.then_some(text.as_str())),
                false => history.settle(&*app),
            };
            if let Err(error) = settled {
                tracing::error!(target: "kvist::server", "a session's text: {error}");
                // Keep the tokens as they were sampled, with their decoded text.
                let _ = history.settle(&*app);
            }
            if let Some(shown) = shown {
                history.show_last(&*app, &raw, shown);
            }
        });
    }
}

fn too_slow() -> ApiError {
    let message = format!(
        "the stream was read more slowly than {MAX_BEHIND} tokens behind: the session has all of them"
    );
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "reads_too_slowly", message)
}

/// Adds the session's id to every response.
struct Within<S> {
    shape: S,
    session: String,
}

impl<S: Shape> Shape for Within<S> {
    fn head(&self, streamed: bool) -> Value {
        let mut head = self.shape.head(streamed);
        head["session"] = self.session.as_str().into();
        head
    }
    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value> {
        self.shape.delta(index, token)
    }
    fn last(&mut self, index: usize, done: &Done) -> Vec<Value> {
        self.shape.last(index, done)
    }
    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value {
        self.shape.whole(index, tokens, done)
    }
    fn scorer(&self) -> Option<Scorer> {
        self.shape.scorer()
    }
}
