//! Sends answers to the client: as one document ([`document`]), or as server-sent events.
//!
//! If the deadline or a shutdown cuts an answer off, the client is informed. In a document: an error if nothing was
//! generated, otherwise `finish_reason` is `length` and `kvist.ended` gives the cause. In a stream: `finish_reason` is
//! `length`, and an error event follows before `[DONE]`.
use super::document;
use super::fields::Common;
use super::generation::{Answers, Output};
use super::parts::until;
use super::writer::{AnswerWriter, cut_off, explained};
use crate::error::ApiError;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use kvist_engine::serving::{Done, FinishReason};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// Respond with a stream or a document, as the request asks.
pub(crate) async fn respond(
    answers: Answers,
    writer: impl AnswerWriter,
    common: &Common,
) -> Result<Response, ApiError> {
    if common.stream == Some(true) {
        let options = common.stream_options.as_ref();
        return Ok(stream(answers, writer, options.and_then(|o| o.include_usage).unwrap_or(false)));
    }
    document::respond(answers, writer).await
}

/// Interval of keep-alive messages while a stream is silent.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How long a client may read the rest of a stream with prompt log-probabilities after its time is over.
const READING: Duration = Duration::from_secs(30);

struct Streaming<S> {
    answers: Answers,
    writer: S,
    /// Events ready to send.
    events: VecDeque<Event>,
    /// An event that waits until its prompt is written.
    buffered: Option<(usize, Output)>,
    open: Vec<bool>,
    error: Option<ApiError>,
    include_usage: bool,
    over: bool,
}

/// Stream the answers as they are generated.
fn stream(answers: Answers, writer: impl AnswerWriter, include_usage: bool) -> Response {
    let open = vec![true; answers.total()];
    let state = Streaming {
        answers,
        writer,
        events: VecDeque::new(),
        buffered: None,
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
    let is_bounded = state.answers.has_memory_permit();
    // Generation ends before this. The client then has `READING` more for the rest.
    let ends = state.answers.reading_ends() + READING;
    let response =
        Sse::new(unfold(state, next)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    match is_bounded {
        true => response.map(|body| until(ends, body)),
        false => response,
    }
}

/// Returns the next part of the prompt, if any is left to write before this event. The caller must then call again with
/// the same event. The prompt goes out in parts because it may be long, several answers may repeat it, and this runs on
/// an async thread.
fn next_of_prompt(
    writer: &mut impl AnswerWriter,
    index: usize,
    mut output: Output,
) -> (Option<Value>, Output) {
    let complete = match &mut output {
        Output::Prompt(scores) => {
            writer.prompt(index, std::mem::take(scores));
            false
        }
        Output::Token(_) | Output::Done(_) => true,
    };
    (writer.prompt_chunk(index, complete), output)
}

impl<S: AnswerWriter> Streaming<S> {
    async fn step(&mut self) {
        let next = match self.buffered.take() {
            Some(buffered) => Some(Ok(buffered)),
            None => self.answers.next().await,
        };
        let next = match next {
            Some(Ok((index, output))) => match next_of_prompt(&mut self.writer, index, output) {
                (Some(choice), output) => {
                    self.buffered = Some((index, output));
                    self.push_chunks(vec![choice], false);
                    // Serve other requests between two parts.
                    return tokio::task::yield_now().await;
                }
                (None, output) => Some(Ok((index, output))),
            },
            other => other,
        };
        match next {
            Some(Ok((_, Output::Prompt(_)))) => {}
            Some(Ok((index, Output::Token(token)))) => {
                let choices = self.writer.delta(index, &token);
                self.push_chunks(choices, false);
            }
            Some(Ok((index, Output::Done(done)))) => self.end(index, &done),
            Some(Err(error)) => {
                for index in 0..self.open.len() {
                    if self.open[index] && [408, 503].contains(&error.status.as_u16()) {
                        let done = Done {
                            finish: FinishReason::Cancelled,
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
        let choices = self.writer.last(index, done);
        let last = !self.open.contains(&true);
        self.push_chunks(choices, last);
    }

    fn push_chunks(&mut self, choices: Vec<Value>, last: bool) {
        let n = choices.len();
        for (i, choice) in choices.into_iter().enumerate() {
            let mut chunk = self.writer.head(true);
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
            let mut chunk = self.writer.head(true);
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
    use crate::openai::scores::Scorer;
    use kvist_engine::serving::Token;

    /// A prompt of three parts.
    struct Three(usize);

    impl AnswerWriter for Three {
        fn head(&mut self, _streamed: bool) -> Value {
            json!({})
        }
        fn prompt_chunk(&mut self, _index: usize, complete: bool) -> Option<Value> {
            let max = if complete { 3 } else { 2 };
            (self.0 < max).then(|| {
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

    /// Regression: the prompt was written at once for every answer, which took seconds on an async thread.
    #[test]
    fn a_prompt_is_said_in_parts_before_its_answer() {
        let mut writer = Three(0);
        let mut output = Output::Prompt(Vec::new());
        for expected in [Some(1), Some(2), None] {
            let (choice, buffered) = next_of_prompt(&mut writer, 0, output);
            assert_eq!(choice, expected.map(Value::from));
            output = buffered;
        }
        output = Output::Token(Token { id: 7, text: "a".into(), logprob: None });
        for expected in [Some(3), None] {
            let (choice, buffered) = next_of_prompt(&mut writer, 0, output);
            assert_eq!(choice, expected.map(Value::from));
            output = buffered;
        }
        assert!(matches!(output, Output::Token(token) if token.id == 7));
    }
}
