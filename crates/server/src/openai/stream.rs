//! Sends answers to the client: as one document, or as server-sent events.
//!
//! If the deadline or a shutdown cuts an answer off, the client is told. In a document: an error if nothing was
//! generated, otherwise `finish_reason` is `length` and `kvist.ended` gives the cause. In a stream: `finish_reason` is
//! `length`, and an error event follows before `[DONE]`.
use super::fields::Common;
use super::generation::{Answers, Said, Supplied};
use super::scores::Scorer;
use super::tokens::{escape, part_of};
use crate::body::{Leave, blocking};
use crate::error::ApiError;
use crate::job::{Done, Finish, LogProb, Token};
use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::{once, poll_fn, unfold};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;

/// Format in which an endpoint writes answers.
pub(crate) trait Shape: Send + 'static {
    /// The fields around the choices; `streamed` for chunks.
    fn head(&self, streamed: bool) -> Value;
    /// Log-probabilities of a prompt have arrived through this answer.
    fn prompt(&mut self, index: usize, scores: Vec<LogProb>) {
        let _ = (index, scores);
    }
    /// The choice of a chunk with the next part of the answer's prompt, before the answer itself. `complete`: no more
    /// log-probabilities of the prompt will arrive.
    fn unsaid(&mut self, index: usize, complete: bool) -> Option<Value> {
        let _ = (index, complete);
        None
    }
    /// The echoed prompt that precedes this answer in a document. Called when the answer is complete.
    fn before(&mut self, index: usize) -> Before {
        let _ = index;
        Before::default()
    }
    /// The choices of the chunks for this token: often one, sometimes none.
    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value>;
    /// The choices that end the answer. The last one has the finish reason.
    fn last(&mut self, index: usize, done: &Done) -> Vec<Value>;
    /// The choice of a complete answer, without its prompt and its log-probabilities, which are null here.
    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value;
    /// The writer of log-probabilities, if they were requested.
    fn scorer(&self) -> Option<Scorer>;
}

/// An echoed prompt. All answers to it share it: it is written for each of them, and held in memory once.
#[derive(Default)]
pub(crate) struct Before {
    /// As text.
    pub text: Option<Arc<str>>,
    /// Or as scored tokens.
    pub tokens: Arc<Vec<Token>>,
}

/// OpenAI's `finish_reason`.
pub(crate) fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::EndOfText | Finish::Stop(_) => "stop",
        Finish::Length | Finish::Deadline | Finish::Cancelled => "length",
    }
}

/// The error if the answer ended for a reason that the client did not ask for.
fn cut_off(finish: &Finish, answers: &Answers) -> Option<ApiError> {
    match finish {
        Finish::Deadline => Some(ApiError::deadline()),
        Finish::Cancelled => Some(ApiError::shutting_down(answers.retry_after_s())),
        _ => None,
    }
}

/// Respond with a stream or a document, as the request asks.
pub(crate) async fn respond(
    answers: Answers,
    shape: impl Shape,
    common: &Common,
) -> Result<Response, ApiError> {
    if common.stream == Some(true) {
        let options = common.stream_options.as_ref();
        return Ok(stream(answers, shape, options.and_then(|o| o.include_usage).unwrap_or(false)));
    }
    whole(answers, shape).await
}

/// All answers in one document.
async fn whole(mut answers: Answers, mut shape: impl Shape) -> Result<Response, ApiError> {
    let mut tokens: Vec<Vec<Token>> = vec![Vec::new(); answers.total()];
    let mut ends: Vec<Option<Done>> = vec![None; answers.total()];
    while let Some(said) = answers.next().await {
        match said? {
            (index, Said::Prompt(scores)) => shape.prompt(index, scores),
            (index, Said::Token(token)) => tokens[index].push(token),
            (index, Said::Done(done)) => ends[index] = Some(done),
        }
    }
    let mut kvist = json!({});
    if answers.explains() {
        kvist["prompts"] = explained(&answers);
    }
    for (tokens, end) in tokens.iter().zip(&ends) {
        let Some(done) = end else { return Err(ApiError::internal("an answer has no end")) };
        if let Some(error) = cut_off(&done.finish, &answers) {
            if tokens.is_empty() {
                return Err(error);
            }
            kvist["ended"] = error.code.into();
        }
    }
    let mut behind = json!({"usage": answers.usage()});
    if kvist.as_object().is_some_and(|k| !k.is_empty()) {
        behind["kvist"] = kvist;
    }
    let (leave, reading_ends) = (answers.take_leave(), answers.reading_ends());
    drop(answers);
    let (document, first) = blocking(move || {
        let ends = ends.iter().flatten();
        let choices = tokens.into_iter().zip(ends).enumerate();
        let choices = choices.map(|(index, (tokens, done))| {
            let document = shape.whole(index, &tokens, done);
            Choice { document, before: shape.before(index), tokens }
        });
        let choices = choices.collect();
        let mut document =
            Document { scorer: shape.scorer(), choices, behind, place: Place::Choice(0), _leave: leave };
        let mut first = open(&shape.head(false));
        first.extend(b",\"choices\":[");
        document.write(&mut first);
        Ok((document, first))
    })
    .await?;
    let body = match document.place {
        Place::Over => Body::from(first),
        _ => {
            let parts = unfold(document, |document| async {
                match document.place {
                    Place::Over => None,
                    _ => Some(match document.part().await {
                        Ok((part, document)) => (Ok(part), document),
                        Err(error) => (Err(std::io::Error::other(error.to_string())), Document::default()),
                    }),
                }
            });
            until(reading_ends, Body::from_stream(once(ready(Ok(first))).chain(parts)))
        }
    };
    Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
}

/// The object as JSON without its closing brace, so that more fields can follow.
fn open(object: &Value) -> Vec<u8> {
    let mut text = object.to_string().into_bytes();
    text.pop();
    text
}

/// Bytes of a document that are written at a time. Most documents are shorter.
const PART_BYTES: usize = 256 << 10;
/// Bytes of a prompt that are written at a time.
const TEXT_BYTES: usize = 16 << 10;

/// A document that is being sent. With log-probabilities it may be a hundred times as large as the data it is made
/// from, so it is written in parts, as fast as the client reads them.
#[derive(Default)]
struct Document {
    scorer: Option<Scorer>,
    choices: Vec<Choice>,
    /// The fields after the choices.
    behind: Value,
    place: Place,
    _leave: Option<Leave>,
}

struct Choice {
    document: Value,
    before: Before,
    /// Tokens of the answer. They are scored if the prompt's are.
    tokens: Vec<Token>,
}

/// The part to write next.
#[derive(Clone, Copy, Default)]
enum Place {
    /// The choice of this number, or the end of the document.
    Choice(usize),
    /// The prompt's text of a choice, from this byte or token on, and then the answer's own text.
    Text { choice: usize, at: usize },
    /// The score of a token whose text begins at the character `offset`.
    Score { choice: usize, column: usize, token: usize, offset: usize },
    #[default]
    Over,
}

impl Document {
    /// The next part, written on a blocking thread.
    async fn part(mut self) -> Result<(Vec<u8>, Document), ApiError> {
        blocking(move || {
            let mut part = Vec::with_capacity(PART_BYTES);
            self.write(&mut part);
            Ok((part, self))
        })
        .await
    }

    fn write(&mut self, out: &mut Vec<u8>) {
        while out.len() < PART_BYTES && !matches!(self.place, Place::Over) {
            self.place = self.step(out);
        }
    }

    /// Begin the scores of a choice.
    fn scores(&self, choice: usize, out: &mut Vec<u8>) -> Place {
        let frame = self.scorer.as_ref().map_or("", |scorer| scorer.frame()[0]);
        out.extend(b",\"logprobs\":");
        out.extend(frame.as_bytes());
        Place::Score { choice, column: 0, token: 0, offset: 0 }
    }

    fn step(&mut self, out: &mut Vec<u8>) -> Place {
        match self.place {
            Place::Choice(choice) if choice == self.choices.len() => {
                out.extend(b"],");
                // Its opening brace is already written.
                out.extend(&self.behind.to_string().as_bytes()[1..]);
                Place::Over
            }
            Place::Choice(choice) => {
                if choice > 0 {
                    out.push(b',');
                }
                let Choice { document, before, .. } = &mut self.choices[choice];
                if before.text.is_none() && before.tokens.is_empty() {
                    if self.scorer.is_none() {
                        out.extend(document.to_string().as_bytes());
                        return Place::Choice(choice + 1);
                    }
                    if let Some(fields) = document.as_object_mut() {
                        fields.shift_remove("logprobs");
                    }
                    out.extend(open(document));
                    return self.scores(choice, out);
                }
                let fields = document.as_object_mut();
                let text = fields.and_then(|fields| {
                    fields.shift_remove("logprobs");
                    fields.shift_remove("text")
                });
                out.extend(open(document));
                out.extend(b",\"text\":\"");
                *document = text.unwrap_or_default();
                Place::Text { choice, at: 0 }
            }
            Place::Text { choice, at } => {
                let Choice { document, before, .. } = &mut self.choices[choice];
                let (part, next) = match &before.text {
                    Some(text) => {
                        let part = part_of(text, at, TEXT_BYTES);
                        (part, at + part.len())
                    }
                    None => (before.tokens.get(at).map_or("", |token| token.text.as_str()), at + 1),
                };
                let is_over = before.text.as_ref().map_or(before.tokens.len(), |text| text.len()) <= at;
                if !is_over {
                    out.extend(escape(part).as_bytes());
                    return Place::Text { choice, at: next };
                }
                before.text = None;
                out.extend(escape(document.take().as_str().unwrap_or_default()).as_bytes());
                out.push(b'"');
                if self.scorer.is_some() {
                    return self.scores(choice, out);
                }
                out.extend(b",\"logprobs\":null}");
                Place::Choice(choice + 1)
            }
            Place::Score { choice, column, token, offset } => {
                let Some(scorer) = &self.scorer else { return Place::Over };
                let Choice { before, tokens, .. } = &mut self.choices[choice];
                let before = &mut before.tokens;
                let scored = before.get(token).or_else(|| tokens.get(token.checked_sub(before.len())?));
                if let Some(scored) = scored {
                    if token > 0 {
                        out.push(b',');
                    }
                    scorer.write(column, scored, offset, out);
                    let offset = offset + scored.text.chars().count();
                    return Place::Score { choice, column, token: token + 1, offset };
                }
                let frame = scorer.frame();
                out.extend(frame[column + 1].as_bytes());
                if column + 2 < frame.len() {
                    return Place::Score { choice, column: column + 1, token: 0, offset: 0 };
                }
                out.push(b'}');
                (*before, *tokens) = Default::default();
                Place::Choice(choice + 1)
            }
            Place::Over => Place::Over,
        }
    }
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

/// Interval of keep-alive messages while a stream is silent.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How long a client may read the rest of a stream with prompt log-probabilities after its time is over.
const READING: Duration = Duration::from_secs(30);

struct Streaming<S> {
    answers: Answers,
    shape: S,
    /// Events ready to send.
    events: VecDeque<Event>,
    /// An event that waits until its prompt is written.
    held: Option<(usize, Said)>,
    open: Vec<bool>,
    error: Option<ApiError>,
    include_usage: bool,
    over: bool,
}

/// Stream the answers as they are generated.
fn stream(answers: Answers, shape: impl Shape, include_usage: bool) -> Response {
    let open = vec![true; answers.total()];
    let state = Streaming {
        answers,
        shape,
        events: VecDeque::new(),
        held: None,
        open,
        error: None,
        include_usage,
        over: false,
    };
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
    let is_bounded = state.answers.holds_leave();
    // Generation ends before this. The client then has `READING` more for the rest.
    let ends = state.answers.reading_ends() + READING;
    let response =
        Sse::new(unfold(state, next)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    match is_bounded {
        true => response.map(|body| until(ends, body)),
        false => response,
    }
}

/// Returns `body` with an expiry time. At `moment` the body is dropped with everything that it holds, read or not, and
/// the connection breaks off.
pub(crate) fn until(moment: Instant, body: Body) -> Body {
    let held = Arc::new(Mutex::new((Some(body.into_data_stream()), None::<Waker>)));
    let end = {
        let held = held.clone();
        tokio::spawn(async move {
            tokio::time::sleep_until(moment.into()).await;
            let (body, reader) = {
                let mut held = held.lock().unwrap_or_else(|broken| broken.into_inner());
                (held.0.take(), held.1.take())
            };
            drop(body);
            if let Some(reader) = reader {
                reader.wake();
            }
        })
    };
    let end = EndsWith(end.abort_handle());
    Body::from_stream(poll_fn(move |context| {
        let _ = &end;
        let mut held = held.lock().unwrap_or_else(|broken| broken.into_inner());
        let Some(body) = &mut held.0 else {
            return Poll::Ready(Some(Err(axum::Error::new("the answer was not read in time"))));
        };
        let next = body.poll_next_unpin(context);
        held.1 = next.is_pending().then(|| context.waker().clone());
        next
    }))
}

/// Aborts a task when dropped.
struct EndsWith(AbortHandle);

impl Drop for EndsWith {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Returns the next part of the prompt, if any is left to write before this event. The caller must then call again with
/// the same event. The prompt goes out in parts because it may be long, several answers may repeat it, and this runs on
/// an async thread.
fn in_turn(shape: &mut impl Shape, index: usize, mut said: Said) -> (Option<Value>, Said) {
    let complete = match &mut said {
        Said::Prompt(scores) => {
            shape.prompt(index, std::mem::take(scores));
            false
        }
        Said::Token(_) | Said::Done(_) => true,
    };
    (shape.unsaid(index, complete), said)
}

impl<S: Shape> Streaming<S> {
    async fn step(&mut self) {
        let next = match self.held.take() {
            Some(held) => Some(Ok(held)),
            None => self.answers.next().await,
        };
        let next = match next {
            Some(Ok((index, said))) => match in_turn(&mut self.shape, index, said) {
                (Some(choice), said) => {
                    self.held = Some((index, said));
                    self.say(vec![choice], false);
                    // Serve other requests between two parts.
                    return tokio::task::yield_now().await;
                }
                (None, said) => Some(Ok((index, said))),
            },
            other => other,
        };
        match next {
            Some(Ok((_, Said::Prompt(_)))) => {}
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

/// One `data:` line, because JSON contains no line breaks.
fn data(document: &Value) -> Event {
    Event::default().data(document.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::BytePool;

    /// A prompt of three parts.
    struct Three(usize);

    impl Shape for Three {
        fn head(&self, _streamed: bool) -> Value {
            json!({})
        }
        fn unsaid(&mut self, _index: usize, complete: bool) -> Option<Value> {
            let most = if complete { 3 } else { 2 };
            (self.0 < most).then(|| {
                self.0 += 1;
                self.0.into()
            })
        }
        fn delta(&mut self, _index: usize, _token: &Token) -> Vec<Value> {
            Vec::new()
        }
        fn last(&mut self, _index: usize, _done: &Done) -> Vec<Value> {
            Vec::new()
        }
        fn whole(&mut self, _index: usize, _tokens: &[Token], _done: &Done) -> Value {
            Value::Null
        }
        fn scorer(&self) -> Option<Scorer> {
            None
        }
    }

    /// Regression: every answer had a copy of its prompt's text. 128 answers to a prompt of 198 KB took 25 MB until
    /// they were read.
    #[test]
    fn answers_share_the_text_of_their_prompt() {
        let prompt: Arc<str> = "é \"quoted\"\n".repeat(50_000).into();
        let tokens = prompt.chars().map(|c| Token { id: 1, text: c.into(), logprob: None });
        let tokens: Arc<Vec<Token>> = Arc::new(tokens.collect());
        for scored in [false, true] {
            let choice = |index: usize| Choice {
                document: json!({"index": index, "text": " end", "logprobs": null, "finish_reason": "stop"}),
                before: match scored {
                    true => Before { text: None, tokens: tokens.clone() },
                    false => Before { text: Some(prompt.clone()), ..Before::default() },
                },
                tokens: Vec::new(),
            };
            let choices = (0..4).map(choice).collect();
            let mut document = Document { choices, behind: json!({"usage": 1}), ..Document::default() };
            document.place = Place::Choice(0);
            let mut all = b"{\"choices\":[".to_vec();
            while !matches!(document.place, Place::Over) {
                let mut part = Vec::new();
                document.write(&mut part);
                assert!(part.len() < PART_BYTES + 2 * TEXT_BYTES, "{}", part.len());
                all.extend(part);
            }
            let told: Value = serde_json::from_slice(&all).unwrap();
            assert_eq!(told["usage"], 1);
            for index in 0..4 {
                let expected = json!({"index": index, "text": format!("{prompt} end"), "logprobs": null, "finish_reason": "stop"});
                assert!(told["choices"][index] == expected, "{index}, scored: {scored}");
            }
        }
    }

    /// Regression: the prompt was written at once for every answer, which took seconds on an async thread.
    #[test]
    fn a_prompt_is_said_in_parts_before_its_answer() {
        let mut shape = Three(0);
        let mut said = Said::Prompt(Vec::new());
        for expected in [Some(1), Some(2), None] {
            let (choice, held) = in_turn(&mut shape, 0, said);
            assert_eq!(choice, expected.map(Value::from));
            said = held;
        }
        said = Said::Token(Token { id: 7, text: "a".into(), logprob: None });
        for expected in [Some(3), None] {
            let (choice, held) = in_turn(&mut shape, 0, said);
            assert_eq!(choice, expected.map(Value::from));
            said = held;
        }
        assert!(matches!(said, Said::Token(token) if token.id == 7));
    }

    /// Regression: a slow reader kept memory that other requests waited for.
    #[tokio::test]
    async fn what_a_body_holds_is_given_back_unread() {
        let lane = BytePool::new(8, 8, &[]);
        let lend = |leave| {
            let parts = std::iter::from_fn(move || {
                let _held = &leave;
                Some(Ok::<_, Infallible>("part"))
            });
            Body::from_stream(futures_util::stream::iter(parts))
        };
        let now = Instant::now();
        let body = until(now, lend(lane.take("a", 8).await.unwrap()));
        // The body is not polled, and its memory is free again.
        let leave = lane.take("b", 8).await.unwrap();
        assert!(body.into_data_stream().next().await.unwrap().is_err());
        let mut body = until(now + Duration::from_secs(3600), lend(leave)).into_data_stream();
        assert_eq!(body.next().await.unwrap().unwrap(), "part");
        assert!(lane.try_take("c", 1).is_none());
        drop(body);
        // The task that would have ended it drops it too.
        assert!(lane.take("c", 8).await.is_some());
        // A reader that is waiting for more is woken at the end.
        let silent = Body::from_stream(futures_util::stream::pending::<Result<&str, Infallible>>());
        let mut body = until(Instant::now(), silent).into_data_stream();
        assert!(body.next().await.unwrap().is_err());
    }
}
