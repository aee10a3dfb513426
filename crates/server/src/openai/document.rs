//! Answers as one document. With log-probabilities it may be a hundred times as large as the data it is made from, so it
//! is written in parts, as fast as the client reads them.
use super::generation::{Answers, Output};
use super::parts::{escape, part_of, until};
use super::scores::Scorer;
use super::writer::{AnswerWriter, EchoedPrompt, cut_off, explained};
use crate::blocking::blocking;
use crate::error::ApiError;
use crate::memory::Permit;
use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::{once, unfold};
use kvist_engine::serving::{Done, Token};
use serde_json::{Value, json};
use std::future::ready;

/// All answers in one document.
pub(super) async fn respond(
    mut answers: Answers,
    mut writer: impl AnswerWriter,
) -> Result<Response, ApiError> {
    let mut tokens: Vec<Vec<Token>> = vec![Vec::new(); answers.total()];
    let mut ends: Vec<Option<Done>> = vec![None; answers.total()];
    while let Some(output) = answers.next().await {
        match output? {
            (index, Output::Prompt(scores)) => writer.prompt(index, scores),
            (index, Output::Token(token)) => tokens[index].push(token),
            (index, Output::Done(done)) => ends[index] = Some(done),
        }
    }
    let mut kvist = json!({});
    if answers.explains() {
        kvist["prompts"] = explained(&answers);
    }
    // One answer that was cut off does not take the others with it.
    let (mut cut, mut has_output) = (None, false);
    for (tokens, end) in tokens.iter().zip(&ends) {
        let Some(done) = end else {
            return Err(ApiError::internal("an answer ended without a finish reason"));
        };
        let error = cut_off(&done.finish, &answers);
        has_output |= error.is_none() || !tokens.is_empty();
        cut = cut.or(error);
    }
    if let Some(error) = cut {
        if !has_output {
            return Err(error);
        }
        kvist["ended"] = error.code.into();
    }
    let mut behind = json!({"usage": answers.usage()});
    if kvist.as_object().is_some_and(|k| !k.is_empty()) {
        behind["kvist"] = kvist;
    }
    let (permit, reading_ends) = (answers.take_memory_permit(), answers.reading_ends());
    drop(answers);
    let (document, first) = blocking(move || {
        let ends = ends.iter().flatten();
        let choices = tokens.into_iter().zip(ends).enumerate();
        let choices = choices.map(|(index, (tokens, done))| {
            let document = writer.whole(index, &tokens, done);
            Choice { document, before: writer.echoed_prompt(index), tokens }
        });
        let choices = choices.collect();
        let mut document = AnswerDocument {
            scorer: writer.scorer(),
            choices,
            behind,
            position: Position::Choice(0),
            _permit: permit,
        };
        let mut first = open(&writer.head(false));
        first.extend(b",\"choices\":[");
        document.write(&mut first);
        Ok((document, first))
    })
    .await?;
    let body = match document.position {
        Position::Over => Body::from(first),
        _ => {
            let parts = unfold(document, |document| async {
                match document.position {
                    Position::Over => None,
                    _ => Some(match document.part().await {
                        Ok((part, document)) => (Ok(part), document),
                        Err(error) => {
                            (Err(std::io::Error::other(error.to_string())), AnswerDocument::default())
                        }
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
struct AnswerDocument {
    scorer: Option<Scorer>,
    choices: Vec<Choice>,
    /// The fields after the choices.
    behind: Value,
    position: Position,
    _permit: Option<Permit>,
}

struct Choice {
    document: Value,
    before: EchoedPrompt,
    /// Tokens of the answer. They are scored if the prompt's are.
    tokens: Vec<Token>,
}

/// The part to write next.
#[derive(Clone, Copy, Default)]
enum Position {
    /// The choice of this number, or the end of the document.
    Choice(usize),
    /// The prompt's text of a choice, from this byte or token on, and then the answer's own text.
    Text { choice: usize, at: usize },
    /// The score of a token whose text begins at the character `offset`.
    Score { choice: usize, column: usize, token: usize, offset: usize },
    #[default]
    Over,
}

impl AnswerDocument {
    /// The next part, written on a blocking thread.
    async fn part(mut self) -> Result<(Vec<u8>, AnswerDocument), ApiError> {
        blocking(move || {
            let mut part = Vec::with_capacity(PART_BYTES);
            self.write(&mut part);
            Ok((part, self))
        })
        .await
    }

    fn write(&mut self, out: &mut Vec<u8>) {
        while out.len() < PART_BYTES && !matches!(self.position, Position::Over) {
            self.position = self.step(out);
        }
    }

    /// Begins the scores of a choice.
    fn scores(&self, choice: usize, out: &mut Vec<u8>) -> Position {
        let frame = self.scorer.as_ref().map_or("", |scorer| scorer.frame()[0]);
        out.extend(b",\"logprobs\":");
        out.extend(frame.as_bytes());
        Position::Score { choice, column: 0, token: 0, offset: 0 }
    }

    /// Writes a choice up to the echoed prompt, or to the scores. Without either it writes the whole choice.
    fn begin(&mut self, choice: usize, out: &mut Vec<u8>) -> Position {
        if choice > 0 {
            out.push(b',');
        }
        let Choice { document, before, .. } = &mut self.choices[choice];
        if before.text.is_none() && before.tokens.is_empty() {
            if self.scorer.is_none() {
                out.extend(document.to_string().as_bytes());
                return Position::Choice(choice + 1);
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
        Position::Text { choice, at: 0 }
    }

    /// Writes the next part and returns what follows it.
    fn step(&mut self, out: &mut Vec<u8>) -> Position {
        match self.position {
            Position::Choice(choice) if choice == self.choices.len() => {
                out.extend(b"],");
                // Its opening brace is already written.
                out.extend(&self.behind.to_string().as_bytes()[1..]);
                Position::Over
            }
            Position::Choice(choice) => self.begin(choice, out),
            Position::Text { choice, at } => {
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
                    return Position::Text { choice, at: next };
                }
                before.text = None;
                out.extend(escape(document.take().as_str().unwrap_or_default()).as_bytes());
                out.push(b'"');
                if self.scorer.is_some() {
                    return self.scores(choice, out);
                }
                out.extend(b",\"logprobs\":null}");
                Position::Choice(choice + 1)
            }
            Position::Score { choice, column, token, offset } => {
                let Some(scorer) = &self.scorer else { return Position::Over };
                let Choice { before, tokens, .. } = &mut self.choices[choice];
                let before = &mut before.tokens;
                let scored = before.get(token).or_else(|| tokens.get(token.checked_sub(before.len())?));
                if let Some(scored) = scored {
                    if token > 0 {
                        out.push(b',');
                    }
                    scorer.write(column, scored, offset, out);
                    let offset = offset + scored.text.chars().count();
                    return Position::Score { choice, column, token: token + 1, offset };
                }
                let frame = scorer.frame();
                out.extend(frame[column + 1].as_bytes());
                if column + 2 < frame.len() {
                    return Position::Score { choice, column: column + 1, token: 0, offset: 0 };
                }
                out.push(b'}');
                (*before, *tokens) = Default::default();
                Position::Choice(choice + 1)
            }
            Position::Over => Position::Over,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

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
                    true => EchoedPrompt { text: None, tokens: tokens.clone() },
                    false => EchoedPrompt { text: Some(prompt.clone()), ..EchoedPrompt::default() },
                },
                tokens: Vec::new(),
            };
            let choices = (0..4).map(choice).collect();
            let mut document =
                AnswerDocument { choices, behind: json!({"usage": 1}), ..AnswerDocument::default() };
            document.position = Position::Choice(0);
            let mut all = b"{\"choices\":[".to_vec();
            while !matches!(document.position, Position::Over) {
                let mut part = Vec::new();
                document.write(&mut part);
                assert!(part.len() < PART_BYTES + 2 * TEXT_BYTES, "{}", part.len());
                all.extend(part);
            }
            let document_read: Value = serde_json::from_slice(&all).unwrap();
            assert_eq!(document_read["usage"], 1);
            for index in 0..4 {
                let expected = json!({"index": index, "text": format!("{prompt} end"), "logprobs": null, "finish_reason": "stop"});
                assert!(document_read["choices"][index] == expected, "{index}, scored: {scored}");
            }
        }
    }
}
