//! `POST /v1/sessions/{id}/generate`: the session goes on, and what comes is part of it.
//!
//! Written as chat completions are where the session is made of messages, and as completions otherwise; `session` says
//! which one it is.
use super::fields::GenerateFields;
use super::history::History;
use super::store::Claim;
use super::verbs::moment;
use crate::app::App;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::http::{Path, blocking, json_body};
use crate::job::{Done, Event, Finish, Token};
use crate::openai::chat::{PLAIN_STOP, Turn};
use crate::openai::completions::Text;
use crate::openai::generation::{Answers, Order, Told};
use crate::openai::request::{Common, check, check_together, read};
use crate::openai::scores::Scorer;
use crate::openai::stream::{self, Shape};
use crate::structured::ResponseFormat;
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

pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = json_body(&app, request).await?;
    let (mut order, run, common) = blocking({
        let app = app.clone();
        move || prepare(&app, &caller, &id, body)
    })
    .await?;
    let (prompt, deadline) = (order.prompts[0].clone(), order.deadline);
    run.wait(&prompt, deadline).await?;
    let session = run.claim.id.to_string();
    order.session = Some(session.as_str().into());
    let chats = run.chats;
    order.record = Some(Box::new(|generation| run.follow(generation)));
    let (logprobs, id) = (order.logprobs.is_some(), order.id.clone());
    let text = Text::new(&app, &order, Vec::new());
    let answers = Answers::begin(&app, order)?;
    match chats {
        true => {
            let shape = Turn::new(&app, id, std::iter::once(None), logprobs);
            stream::respond(answers, Within { shape, session }, &common).await
        }
        false => stream::respond(answers, Within { shape: text, session }, &common).await,
    }
}

/// From a body to what is submitted, and to what records it.
fn prepare(
    app: &Arc<App>,
    caller: &Caller,
    id: &str,
    mut body: Value,
) -> Result<(Order, Run, Common), ApiError> {
    let id = app.sessions.id(id)?;
    check_together(&body, true)?;
    check(&mut body, &app.schemas.sessions.generate, &app.bounds.model)?;
    let (common, fields): (Common, GenerateFields) = (read(&body)?, read(&body)?);
    let claim = app.sessions.claim(moment(app), &caller.name, id, true)?;
    let began = begin(app, &claim.history, fields.add_generation_prompt)?;
    if began.tokens.is_empty() {
        let message = "the session is empty: append `messages`, `text` or `tokens` first";
        return Err(ApiError::new(StatusCode::CONFLICT, "session_empty", message));
    }
    let chats = began.has_messages() && !began.has_tail();
    let kind = if chats { "chatcmpl" } else { "cmpl" };
    let mut order = Order::new(app, caller, &common, app.new_id(kind), "sessions")?;
    let format = fields.response_format.as_ref().filter(|format| !format.is_null());
    let grammar = format.map(ResponseFormat::from_json).transpose()?.and_then(|format| format.grammar());
    order.constraint = grammar.map(|grammar| app.compile(&grammar)).transpose()?;
    order.salt = claim.salt.clone();
    order.prompts = vec![began.tokens.as_slice().into()];
    if chats && app.engine.model().chat_template().is_none() {
        order.stop.push(PLAIN_STOP.into());
    }
    order.logprobs = fields.logprobs.unwrap_or(false).then(|| fields.top_logprobs.unwrap_or(0));
    let asked = fields.max_completion_tokens.into_iter().chain(fields.max_tokens).min();
    order.admit(app, asked, "session")?;
    app.log_prompts(&order.id, &order.prompts);
    let run = Run {
        app: app.clone(),
        claim,
        chats,
        from: began.tokens.len(),
        began: Some(began),
        text: String::new(),
        last: None,
        ignore_eos: order.ignore_eos,
    };
    Ok((order, run, common))
}

/// The history that is the prompt.
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

/// What is generated in a session, on its way into the history.
struct Run {
    app: Arc<App>,
    claim: Claim,
    chats: bool,
    /// The prompt; it becomes the history with the first token.
    began: Option<History>,
    /// Its first token is the history's token of this number.
    from: usize,
    /// Text so far.
    text: String,
    last: Option<u32>,
    ignore_eos: bool,
}

impl Run {
    /// Until nobody computes what this one would compute too.
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

/// Tokens that a client may be behind its session. Who reads more slowly is told so; the session goes on without.
const MAX_BEHIND: usize = 4096;

impl Run {
    /// A task of its own takes what comes into the history, at the pace at which it comes; the client hears it from a
    /// queue. The generation ends early when the session is deleted, its quota is full, or nobody listens any more.
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
                biased; // what has come is kept
                event = generation.next() => event,
                error = &mut gone => break (None, Some(Err(error))),
                () = tell.closed() => break (None, None),
            };
            match event {
                Some(Event::Token(token)) => {
                    if let Err(error) = self.token(&token) {
                        break (None, Some(Err(error)));
                    }
                    // Room is left for the end.
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
        // Nothing more is computed while the history is settled.
        drop(generation);
        // The client hears of the end when the session has it.
        let settled = tokio::task::spawn_blocking(move || self.settle(done.as_ref())).await;
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

    fn token(&mut self, token: &Token) -> Result<(), ApiError> {
        self.text += &token.text;
        self.last = Some(token.id);
        self.claim.push(self.began.take(), token.id)
    }

    /// The generation has ended. Without `done` it did not end as generations do: what came until then stays.
    fn settle(mut self, done: Option<&Done>) {
        let stopped = done.is_some_and(|done| matches!(done.finish, Finish::Stop(_)));
        let at_end = done.is_some_and(|done| done.finish == Finish::EndOfText);
        let end = at_end
            && !self.ignore_eos
            && self.last.is_some_and(|token| self.app.engine.model().end_tokens().contains(&token));
        self.text += done.map_or("", |done| &done.text);
        let (app, from, text) = (self.app, self.from, self.text);
        self.claim.end(Instant::now(), |history| {
            let settled = match stopped || at_end {
                true => history.end_answer(&*app, from, end, stopped.then_some(text.as_str())),
                false => history.settle(&*app),
            };
            if let Err(error) = settled {
                tracing::error!(target: "kvist::server", "a session's text: {error}");
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

/// Answers that say which session they are part of.
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
