//! Answers on their way to the client: in one document, or as server-sent events.
//!
//! An answer that was cut off by its deadline or by the server's end is told so. In a document: an error if nothing
//! was generated, otherwise `finish_reason` is `length` and `kvist.ended` says which. In a stream: `finish_reason` is
//! `length`, and an error event follows before `[DONE]`.
use super::generation::{Answers, Said, Supplied};
use crate::error::ApiError;
use crate::job::{Done, Finish, Token};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// How an endpoint writes answers.
pub(crate) trait Shape: Send + 'static {
    /// The document around choices; `streamed` for chunks.
    fn head(&self, streamed: bool) -> Value;
    /// The choices of chunks that say this token of an answer: often one, sometimes none.
    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value>;
    /// The choices that end it, the last one with the reason.
    fn last(&mut self, index: usize, done: &Done) -> Vec<Value>;
    /// The choice of a whole answer.
    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value;
}

/// OpenAI's word.
pub(crate) fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::EndOfText | Finish::Stop(_) => "stop",
        Finish::Length | Finish::Deadline | Finish::Cancelled => "length",
    }
}

/// An end that the client did not ask for.
fn cut_off(finish: &Finish, answers: &Answers) -> Option<ApiError> {
    match finish {
        Finish::Deadline => Some(ApiError::deadline()),
        Finish::Cancelled => Some(ApiError::shutting_down(answers.retry_after_s())),
        _ => None,
    }
}

/// All answers in one document.
pub(crate) async fn whole(mut answers: Answers, mut shape: impl Shape) -> Result<Value, ApiError> {
    let mut tokens: Vec<Vec<Token>> = vec![Vec::new(); answers.total()];
    let mut ends: Vec<Option<Done>> = vec![None; answers.total()];
    while let Some(said) = answers.next().await {
        match said? {
            (index, Said::Token(token)) => tokens[index].push(token),
            (index, Said::Done(done)) => ends[index] = Some(done),
        }
    }
    let mut choices = Vec::new();
    let mut ended = None;
    for (index, (tokens, end)) in tokens.iter().zip(&ends).enumerate() {
        let Some(done) = end else { return Err(ApiError::internal("an answer has no end")) };
        if let Some(error) = cut_off(&done.finish, &answers) {
            if tokens.is_empty() {
                return Err(error);
            }
            ended = Some(error.code);
        }
        choices.push(shape.whole(index, tokens, done));
    }
    let mut document = shape.head(false);
    document["choices"] = choices.into();
    document["usage"] = answers.usage();
    let mut kvist = json!({});
    if answers.explains() {
        kvist["prompts"] = explained(&answers);
    }
    if let Some(code) = ended {
        kvist["ended"] = code.into();
    }
    if kvist.as_object().is_some_and(|k| !k.is_empty()) {
        document["kvist"] = kvist;
    }
    Ok(document)
}

/// What each prompt found in the cache.
fn explained(answers: &Answers) -> Value {
    let one = |supplied: Option<Supplied>| match supplied {
        None => Value::Null,
        Some(Supplied { cached_tokens, miss }) => json!({
            "cached_tokens": cached_tokens,
            "miss": miss.map(|miss| json!({"reason": miss.name(), "position": miss.position()})),
        }),
    };
    (0..answers.prompts()).map(|p| one(answers.supplied(p))).collect()
}

/// How often a stream that has nothing to say shows that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

struct Streaming<S> {
    answers: Answers,
    shape: S,
    /// Ready to be sent.
    events: VecDeque<Event>,
    open: Vec<bool>,
    error: Option<ApiError>,
    include_usage: bool,
    over: bool,
}

/// Answers as they come.
pub(crate) fn stream(answers: Answers, shape: impl Shape, include_usage: bool) -> Response {
    let open = vec![true; answers.total()];
    let state =
        Streaming { answers, shape, events: VecDeque::new(), open, error: None, include_usage, over: false };
    let next = |mut state: Streaming<_>| async move {
        loop {
            if let Some(event) = state.events.pop_front() {
                return Some((Ok::<_, Infallible>(event), state));
            }
            if state.over {
                return None;
            }
            state.step().await;
        }
    };
    Sse::new(unfold(state, next)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

impl<S: Shape> Streaming<S> {
    async fn step(&mut self) {
        match self.answers.next().await {
            Some(Ok((index, Said::Token(token)))) => {
                let choices = self.shape.delta(index, &token);
                self.say(choices, false);
            }
            Some(Ok((index, Said::Done(done)))) => self.end(index, &done),
            Some(Err(error)) => {
                for index in 0..self.open.len() {
                    if self.open[index] && [408, 503].contains(&error.status.as_u16()) {
                        let done = Done {
                            finish: Finish::Cancelled,
                            text: String::new(),
                            usage: Default::default(),
                        };
                        self.end(index, &done);
                    }
                }
                self.error = Some(error);
                self.close();
            }
            None => self.close(),
        }
    }

    fn end(&mut self, index: usize, done: &Done) {
        self.open[index] = false;
        self.error = self.error.take().or(cut_off(&done.finish, &self.answers));
        let choices = self.shape.last(index, done);
        let last = !self.open.contains(&true);
        self.say(choices, last);
    }

    fn say(&mut self, choices: Vec<Value>, last: bool) {
        let n = choices.len();
        for (i, choice) in choices.into_iter().enumerate() {
            let mut chunk = self.shape.head(true);
            chunk["choices"] = vec![choice].into();
            if self.include_usage {
                chunk["usage"] = Value::Null;
            }
            if last && i + 1 == n && self.answers.explains() {
                chunk["kvist"] = json!({"prompts": explained(&self.answers)});
            }
            self.events.push_back(data(&chunk));
        }
    }

    fn close(&mut self) {
        if let Some(error) = &self.error {
            self.events.push_back(data(&error.to_json()));
        } else if self.include_usage {
            let mut chunk = self.shape.head(true);
            chunk["choices"] = Value::Array(Vec::new());
            chunk["usage"] = self.answers.usage();
            self.events.push_back(data(&chunk));
        }
        self.events.push_back(Event::default().data("[DONE]"));
        self.over = true;
    }
}

/// JSON has no line breaks of its own: one `data:` line.
fn data(document: &Value) -> Event {
    Event::default().data(document.to_string())
}
