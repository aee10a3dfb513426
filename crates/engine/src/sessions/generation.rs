//! A generation that continues a session.
use super::{History, HistoryTokenizer, SessionError, SessionGuard};
use crate::serving::{Done, FinishReason, Token};
use crate::tools::{AnswerFormat, AnswerParser, ToolFormat};
use serde_json::Value;
use std::time::Instant;

/// Records the output of one generation in a session's history. Dropping it ends the recording: the tokens so far stay,
/// and the text of the last message is not updated.
pub struct SessionGeneration {
    guard: SessionGuard,
    /// The prompt; it becomes the history with the first token.
    prompt: Option<History>,
    /// Index in the history of the first generated token.
    from: usize,
    /// Text generated so far.
    text: String,
    /// Text of the continued answer before this generation.
    before: String,
    format: Option<AnswerFormat>,
    /// The request's id, from which the ids of tool calls are derived.
    request: String,
    last: Option<u32>,
    ignore_eos: bool,
}

impl SessionGeneration {
    /// `prompt` is what the generation continues: [`History::as_prompt`] of the guard's history.
    pub fn new(guard: SessionGuard, prompt: History) -> Self {
        SessionGeneration {
            guard,
            from: prompt.tokens.len(),
            // An answer that is continued may end inside a tool call or a Harmony message.
            before: prompt.open_text().unwrap_or_default().into(),
            prompt: Some(prompt),
            text: String::new(),
            format: None,
            request: String::new(),
            last: None,
            ignore_eos: false,
        }
    }

    /// Parse the whole answer at its end: the message then has its tool calls and reasoning as fields. The ids of calls
    /// are derived from `request`.
    pub fn with_format(mut self, format: Option<AnswerFormat>, request: &str) -> Self {
        (self.format, self.request) = (format, request.into());
        self
    }

    /// The job continues after an end-of-text token ([`Job::ignore_eos`](crate::serving::Job::ignore_eos)).
    pub fn with_ignore_eos(mut self, ignore_eos: bool) -> Self {
        self.ignore_eos = ignore_eos;
        self
    }

    /// The output follows text of the same answer.
    pub fn continues_answer(&self) -> bool {
        !self.before.is_empty()
    }

    /// A parser of the answer that has read the part before this generation.
    pub fn parser(&self) -> Option<AnswerParser> {
        let mut parser = self.format.as_ref()?.parser();
        parser.push(&self.before, &mut Vec::new());
        Some(parser)
    }

    pub fn guard(&self) -> &SessionGuard {
        &self.guard
    }

    /// The history so far, and the index of its first generated token.
    pub fn recorded(&self) -> (History, usize) {
        (self.guard.now(), self.from)
    }

    /// Appends a token. Fails if the session was deleted or its owner's limit is exceeded; the generation should then
    /// end.
    pub fn push(&mut self, token: &Token) -> Result<(), SessionError> {
        self.text += &token.text;
        self.last = Some(token.id);
        self.guard.push(self.prompt.take(), token.id)
    }

    /// Finalizes the history. `done` is `None` if the generation was cut off; the tokens so far are kept, as they also
    /// are if their text cannot be made.
    pub fn finish<T: HistoryTokenizer>(mut self, tokenizer: &T, done: Option<&Done>)
    where
        T::Error: std::fmt::Display,
    {
        let stopped = done.is_some_and(|done| matches!(done.finish, FinishReason::Stop(_)));
        let at_end = done.is_some_and(|done| done.finish == FinishReason::EndOfText);
        let ends_with_token =
            at_end && !self.ignore_eos && self.last.is_some_and(|token| tokenizer.is_end(token));
        self.text += done.map_or("", |done| &done.text);
        let (from, text) = (self.from, self.text);
        let raw = self.before + &text;
        let shown = self.format.filter(|_| stopped || at_end).and_then(|format| {
            let parsed = format.parser().parse(&raw);
            let calls = parsed.calls.iter().enumerate();
            let calls: Vec<Value> = calls.map(|(n, call)| call.to_json(&self.request, 0, n)).collect();
            let in_channels = format.format == Some(ToolFormat::Harmony);
            let is_text = calls.is_empty() && parsed.content == raw && !in_channels;
            (!is_text).then(|| parsed.to_message(calls))
        });
        self.guard.end(Instant::now(), |history| {
            let settled = match stopped || at_end {
                true => {
                    history.end_answer(tokenizer, from, ends_with_token, stopped.then_some(text.as_str()))
                }
                false => history.settle(tokenizer),
            };
            if let Err(error) = settled {
                tracing::error!(target: "kvist::server", "a session's text: {error}");
                // Keep the tokens as they were sampled, with their decoded text.
                let _ = history.settle(tokenizer);
            }
            if let Some(shown) = shown {
                history.show_last(tokenizer, &raw, shown);
            }
        });
    }
}
