//! Truncating a history.
use super::{History, HistoryTokenizer, Message, Position};
use crate::sessions::SessionError;
use std::sync::Arc;

/// A position at which a history is truncated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cut {
    /// Keep this many tokens.
    Token(usize),
    /// Keep this many messages.
    Message(usize),
}

impl History {
    /// The history up to the cut. A cut inside an answer leaves the answer open. After a cut inside any other
    /// message, the rest of that message becomes the tail and is no longer a message.
    /// `param` is the name of the cut in errors.
    pub fn cut<T: HistoryTokenizer>(&self, tokenizer: &T, cut: Cut, param: &str) -> Result<Self, T::Error> {
        let n_tokens = self.tokens.len();
        let token = match cut {
            Cut::Token(token) if token > n_tokens => {
                let message = format!("`{param}` is token {token}, but the session has {n_tokens} tokens");
                return Err(SessionError::invalid(param, message).into());
            }
            Cut::Token(token) => token,
            Cut::Message(message) => self.begin_of(message, param)?,
        };
        let mut history = self.clone();
        if token == n_tokens {
            return Ok(history);
        }
        Arc::make_mut(&mut history.tokens).truncate(token);
        let Some(rendered) = history.rendered.as_mut().map(Arc::make_mut) else { return Ok(history) };
        match rendered.tail {
            Some(tail) if token > tail => return Ok(history),
            Some(tail) if token == tail => {
                rendered.tail = None;
                return Ok(history);
            }
            _ => rendered.tail = None,
        }
        let is_before = |m: &Message| m.begins.is_some_and(|begins| begins.token <= token);
        let at = rendered.messages.iter().rposition(is_before).unwrap_or(0);
        let begins = rendered.messages.get(at).and_then(|m| m.begins);
        match rendered.messages.get_mut(at).map(|message| (begins, &mut message.content)) {
            Some((Some(begins), _)) if begins.token == token => {
                rendered.messages.truncate(at);
                rendered.text.truncate(begins.byte);
            }
            Some((_, Some((content, ends))))
                if content.token <= token && ends.is_none_or(|ends| token <= ends) =>
            {
                *ends = None;
                rendered.messages.truncate(at + 1);
            }
            _ => {
                let begins = begins.unwrap_or(Position { token: 0, byte: 0 });
                rendered.messages.truncate(at);
                rendered.text.truncate(begins.byte);
                rendered.tail = Some(begins.token);
            }
        }
        history.settle(tokenizer)?;
        Ok(history)
    }

    /// Index of the first token of message `at`. With `at` equal to the number of messages, the end of the last
    /// message.
    fn begin_of(&self, at: usize, param: &str) -> Result<usize, SessionError> {
        let Some(rendered) = &self.rendered else {
            return Err(SessionError::invalid(
                param,
                "this session has no messages: give a number of tokens",
            ));
        };
        let n = rendered.messages.len();
        match rendered.messages.get(at) {
            Some(message) => message.begins.map(|begins| begins.token).ok_or_else(|| {
                let message = format!(
                    "the model's chat template does not show where message {at} begins: give a number of \
                     tokens"
                );
                SessionError::invalid(param, message)
            }),
            None if at == n => Ok(rendered.tail.unwrap_or(self.tokens.len())),
            None => {
                let message = format!("`{param}` is message {at}, but the session has {n} messages");
                Err(SessionError::invalid(param, message))
            }
        }
    }

    /// Shortens the tokens from `from` on so that their text is `text`, which must be a prefix of their current
    /// text.
    pub(super) fn shorten<T: HistoryTokenizer>(
        &mut self,
        tokenizer: &T,
        from: usize,
        text: &str,
    ) -> Result<(), T::Error> {
        // Decode with the preceding tokens as context; by themselves, SentencePiece would drop the first space.
        let context = tokenizer.context(&self.tokens[..from]);
        let before = tokenizer.decode(&self.tokens[context..from])?;
        let text_until = |to: usize| {
            let mut all = tokenizer.decode(&self.tokens[context..to])?;
            match all.starts_with(&before) {
                true => Ok(all.split_off(before.len())),
                false => tokenizer.decode(&self.tokens[from..to]),
            }
        };
        // Binary search for the most tokens whose text is a prefix of `text`. The text grows with the tokens,
        // except for its end, which may be an incomplete character.
        let (mut fits, mut too_many) = (from, self.tokens.len() + 1);
        while fits + 1 < too_many {
            let middle = fits + (too_many - fits) / 2;
            match text.starts_with(text_until(middle)?.trim_end_matches(char::REPLACEMENT_CHARACTER)) {
                true => fits = middle,
                false => too_many = middle,
            }
        }
        let mut shown = text_until(fits)?;
        while fits > from && !text.starts_with(&shown) {
            fits -= 1;
            shown = text_until(fits)?;
        }
        let rest = text.strip_prefix(&shown).filter(|rest| !rest.is_empty());
        // Encode first: it may fail, and then the history must be unchanged.
        let rest = rest.map(|rest| tokenizer.encode(rest, false)).transpose()?;
        let tokens = Arc::make_mut(&mut self.tokens);
        tokens.truncate(fits);
        tokens.extend(rest.into_iter().flatten());
        Ok(())
    }
}
