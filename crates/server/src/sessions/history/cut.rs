//! Where a history is cut, and what is left of it.
use super::{History, Message, Place, Scribe};
use crate::error::ApiError;
use std::sync::Arc;

/// Where a history is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Cut {
    /// This many tokens stay.
    Token(usize),
    /// This many messages stay.
    Message(usize),
}

impl History {
    /// Up to the cut. A cut inside an answer leaves it open; inside any other message, what stands before the cut is a
    /// beginning of a message that is none yet.
    pub fn cut(&self, scribe: &impl Scribe, cut: Cut, param: &str) -> Result<Self, ApiError> {
        let n_tokens = self.tokens.len();
        let token = match cut {
            Cut::Token(token) if token > n_tokens => {
                let message = format!("`{param}` is token {token}; the session has {n_tokens}");
                return Err(ApiError::invalid(param, message));
            }
            Cut::Token(token) => token,
            Cut::Message(message) => self.begin_of(message, param)?,
        };
        let mut history = self.clone();
        if token == n_tokens {
            return Ok(history);
        }
        Arc::make_mut(&mut history.tokens).truncate(token);
        let Some(said) = history.said.as_mut().map(Arc::make_mut) else { return Ok(history) };
        match said.tail {
            Some(tail) if token > tail => return Ok(history),
            Some(tail) if token == tail => {
                said.tail = None;
                return Ok(history);
            }
            _ => said.tail = None,
        }
        let is_before = |m: &Message| m.begins.is_some_and(|begins| begins.token <= token);
        let at = said.messages.iter().rposition(is_before).unwrap_or(0);
        let begins = said.messages.get(at).and_then(|m| m.begins);
        match said.messages.get_mut(at).map(|message| (begins, &mut message.content)) {
            Some((Some(begins), _)) if begins.token == token => {
                said.messages.truncate(at);
                said.text.truncate(begins.byte);
            }
            Some((_, Some((content, ends))))
                if content.token <= token && ends.is_none_or(|ends| token <= ends) =>
            {
                *ends = None;
                said.messages.truncate(at + 1);
            }
            _ => {
                let begins = begins.unwrap_or(Place { token: 0, byte: 0 });
                said.messages.truncate(at);
                said.text.truncate(begins.byte);
                said.tail = Some(begins.token);
            }
        }
        history.settle(scribe)?;
        Ok(history)
    }

    /// The token at which message `at` begins; behind the last one, the end.
    fn begin_of(&self, at: usize, param: &str) -> Result<usize, ApiError> {
        let Some(said) = &self.said else {
            return Err(ApiError::invalid(param, "this session has no messages: cut it at a token"));
        };
        let n = said.messages.len();
        match said.messages.get(at) {
            Some(message) => message.begins.map(|begins| begins.token).ok_or_else(|| {
                let message =
                    format!("the model's template does not show where message {at} begins: cut at a token");
                ApiError::invalid(param, message)
            }),
            None if at == n => Ok(said.tail.unwrap_or(self.tokens.len())),
            None => {
                let message = format!("`{param}` is message {at}; the session has {n}");
                Err(ApiError::invalid(param, message))
            }
        }
    }

    /// Make `text` of what stands behind token `from`, of which it is a beginning.
    pub(super) fn shorten(&mut self, scribe: &impl Scribe, from: usize, text: &str) -> Result<(), ApiError> {
        // As it was said: behind what stands before it, or SentencePiece would take its first blank.
        let context = scribe.context(&self.tokens[..from]);
        let before = scribe.decode(&self.tokens[context..from])?;
        let said = |to: usize| {
            let mut all = scribe.decode(&self.tokens[context..to])?;
            match all.starts_with(&before) {
                true => Ok(all.split_off(before.len())),
                false => scribe.decode(&self.tokens[from..to]),
            }
        };
        // The most tokens whose text is a beginning of it: it grows with the tokens, but for its end, which may be half a
        // character.
        let (mut fits, mut too_many) = (from, self.tokens.len() + 1);
        while fits + 1 < too_many {
            let middle = fits + (too_many - fits) / 2;
            match text.starts_with(said(middle)?.trim_end_matches(char::REPLACEMENT_CHARACTER)) {
                true => fits = middle,
                false => too_many = middle,
            }
        }
        let mut shown = said(fits)?;
        while fits > from && !text.starts_with(&shown) {
            fits -= 1;
            shown = said(fits)?;
        }
        let rest = text.strip_prefix(&shown).filter(|rest| !rest.is_empty());
        // It may fail, and then nothing has been changed.
        let rest = rest.map(|rest| scribe.encode(rest, false)).transpose()?;
        let tokens = Arc::make_mut(&mut self.tokens);
        tokens.truncate(fits);
        tokens.extend(rest.into_iter().flatten());
        Ok(())
    }
}
