//! Text to tokens and back, with the `tokenizers` crate: from `tokenizer.json`, or rebuilt from the vocabulary of
//! a GGUF file.
//!
//! Where that changes no token, a text is tokenized in pieces: [`Tokenizer::largest_piece`] says how large they are, and
//! the [`Halt`](crate::halt::Halt) of a thread is looked at between them.
mod cuts;
mod ends;
mod gguf;
mod pieces;

use crate::error::Error;
use crate::files;
use crate::guard::quietly;
use crate::halt;
use cuts::{Cuts, PIECE_BYTES};
use std::path::Path;

pub use ends::Ends;
pub use pieces::Piece;

/// A tokenizer and what a model's files say about using it.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Where texts may be cut before they are tokenized.
    cuts: Cuts,
    file: String,
    /// How the file wants words cut, where kvist does not know how that is done: its tokens would be wrong.
    unknown_pre: Option<String>,
    /// Prepended when special tokens are asked for and the tokenizer does not do it by itself.
    prepend: Option<u32>,
    eos: Option<u32>,
    /// `bos_token` and `eos_token`, as texts: chat templates name them.
    pub(crate) bos_text: Option<String>,
    pub(crate) eos_text: Option<String>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// `tokenizer.json` and `tokenizer_config.json` of a Hugging Face folder; `None` if it has no
    /// `tokenizer.json`.
    pub fn from_folder(folder: &Path) -> Result<Option<Self>, Error> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            return Ok(None);
        }
        let bytes = files::read(&path)?;
        let file = path.display().to_string();
        let inner = parse(&bytes).map_err(|what| Error::Tokenizer { file: file.clone(), what })?;
        let config = folder_config(folder)?;
        let text = |key: &str| special_text(config.get(key)?);
        let (bos_text, eos_text) = (text("bos_token"), text("eos_token"));
        let eos = eos_text.as_deref().and_then(|t| inner.token_to_id(t));
        let cuts = cuts_of(&inner);
        Ok(Some(Tokenizer { inner, cuts, file, unknown_pre: None, prepend: None, eos, bos_text, eos_text }))
    }

    /// Tokens of `text`; with `special`, those that the model expects at the start of a text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        self.encode_pieces(text, special, PIECE_BYTES)
    }

    fn encode_pieces(&self, text: &str, special: bool, least: usize) -> Result<Vec<u32>, Error> {
        self.check()?;
        let mut tokens = Vec::new();
        for (i, piece) in self.cuts.pieces(text, least).enumerate() {
            halt::check()?;
            let special = special && i == 0;
            let encoding = quietly(|| self.inner.encode_fast(piece, special));
            let encoding = encoding.ok_or_else(|| self.broke())?.map_err(|e| self.failed(e))?;
            let ids = encoding.get_ids();
            tokens.extend(self.in_front(ids, special).into_iter().chain(ids.iter().copied()));
        }
        Ok(tokens)
    }

    /// Bytes of the largest piece of a text that is tokenized at once: of the whole text, where this tokenizer cuts none.
    /// Tokenizing takes some hundred times as much memory.
    pub fn largest_piece(&self, text: &str) -> usize {
        self.cuts.pieces(text, PIECE_BYTES).map(str::len).max().unwrap_or(0)
    }

    /// What stands in front of these tokens of a text, if nothing of theirs does.
    fn in_front(&self, ids: &[u32], special: bool) -> Option<u32> {
        self.prepend.filter(|bos| special && ids.first() != Some(bos))
    }

    /// Can it encode? A GGUF file may cut words in a way that kvist does not know.
    pub fn check(&self) -> Result<(), Error> {
        let Some(pre) = &self.unknown_pre else { return Ok(()) };
        Err(Error::Tokenizer {
            file: self.file.clone(),
            what: format!(
                "cuts words by `{pre}`, which kvist does not know, and other tokens would give another text: take the \
                 model's Hugging Face folder, or --guess-pretokenizer to cut them as GPT-2 does"
            ),
        })
    }

    /// Cut words as GPT-2 does where [`check`](Self::check) would refuse.
    pub fn guess_pretokenizer(&mut self) {
        self.unknown_pre = None;
    }

    /// Text of all these tokens; control tokens have none.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        let decoded = quietly(|| self.inner.decode(tokens, true));
        decoded.ok_or_else(|| self.broke())?.map_err(|e| self.failed(e))
    }

    /// The token that ends a text, where the tokenizer's files name one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
    /// What the vocabulary calls a token.
    pub fn name(&self, token: u32) -> Option<String> {
        self.inner.id_to_token(token)
    }
    pub fn token(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Decode token by token.
    pub fn stream(&self) -> TextStream<'_> {
        self.stream_with(&[])
    }
    /// Decode what follows `before`, token by token: all pieces together are what the text of both has behind that of
    /// `before`, its first blank included, which SentencePiece takes off the start of a text.
    /// `written` as [`stream_with`](Self::stream_with) has it.
    pub fn stream_after(&self, before: &[u32], written: &[u32]) -> TextStream<'_> {
        TextStream { tokenizer: self, state: TextState::after(self, before, written) }
    }
    /// Decode token by token, and write out these control tokens by their names: where they mark what a program is
    /// to read, as `<tool_call>` does, their absence would change what the text says.
    pub fn stream_with(&self, written: &[u32]) -> TextStream<'_> {
        TextStream { tokenizer: self, state: TextState::new(written) }
    }

    /// The end of `tokens` on which what follows them may depend.
    pub fn context_of<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        let from = |back: usize| &tokens[tokens.len().saturating_sub(CONTEXT_TOKENS + back)..];
        // Not from inside a character: SentencePiece would make its bytes, and all that follow them, into replacements.
        let whole = |part: &&[u32]| {
            self.decode(part).is_ok_and(|text| !text.starts_with(char::REPLACEMENT_CHARACTER))
        };
        (0..4).map(from).find(whole).unwrap_or(from(0))
    }

    fn failed(&self, error: tokenizers::Error) -> Error {
        Error::Tokenizer { file: self.file.clone(), what: error.to_string() }
    }
    fn broke(&self) -> Error {
        Error::Tokenizer { file: self.file.clone(), what: "broke on this text".into() }
    }
}

/// The crate takes for granted that a decoder is JSON and a precompiled normalizer a trie, and panics if not.
fn parse(json: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    serde_json::from_slice::<serde::de::IgnoredAny>(json).map_err(|e| format!("not JSON: {e}"))?;
    let parsed = quietly(|| tokenizers::Tokenizer::from_bytes(json));
    parsed.ok_or_else(|| "holds something that kvist cannot read".to_string())?.map_err(|e| e.to_string())
}

/// Broken ones are not cut; encoding says what is wrong.
fn cuts_of(tokenizer: &tokenizers::Tokenizer) -> Cuts {
    quietly(|| Cuts::of(tokenizer)).unwrap_or(Cuts::Nowhere)
}

/// `tokenizer_config.json`, or nothing.
pub(crate) fn folder_config(folder: &Path) -> Result<serde_json::Value, Error> {
    let path = folder.join("tokenizer_config.json");
    if !path.exists() {
        return Ok(serde_json::Value::Null);
    }
    let text = files::read_text(&path)?;
    let file = || path.display().to_string();
    serde_json::from_str(&text).map_err(|e| Error::Malformed { file: file(), what: format!("not JSON: {e}") })
}

/// A special token is written as a text or as an object with `content`.
fn special_text(value: &serde_json::Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_string)
}

/// Decodes as tokens come and never gives out half a character: what ends in one waits for the rest. All pieces
/// together are the text of all tokens together; only where bytes are no UTF-8 may a SentencePiece tokenizer put
/// replacement characters for whole characters beside them, which here were given out and stay.
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    state: TextState,
}

impl TextStream<'_> {
    /// The text that became certain with this token: often a piece, sometimes nothing.
    pub fn push(&mut self, token: u32) -> Result<String, Error> {
        self.state.push(self.tokenizer, token)
    }
    /// What was held back; a character that never became whole is a replacement character.
    pub fn finish(&mut self) -> Result<String, Error> {
        self.state.finish(self.tokenizer)
    }
}

/// The same for callers that cannot borrow the tokenizer for as long: it must be the same one in every call.
#[derive(Clone, Debug, Default)]
pub struct TextState {
    /// Control tokens that have their name as text.
    written: Vec<u32>,
    tokens: Vec<u32>,
    /// Decoding starts here, a little before what is new, because a token's text can depend on its neighbour.
    first: usize,
    /// Tokens before this one are given out.
    shown: usize,
}

/// Tokens that may wait for a whole character, or for any text at all.
const LONGEST_RUN: usize = 64;

/// Tokens of what stands before a text that its first pieces may depend on: enough that one of them has a text, where
/// control tokens are the last ones.
pub const CONTEXT_TOKENS: usize = 16;

impl TextState {
    /// At the start of a text; `written` as [`Tokenizer::stream_with`] has it.
    pub fn new(written: &[u32]) -> Self {
        TextState { written: written.into(), ..TextState::default() }
    }

    /// Behind `before`, see [`Tokenizer::stream_after`]. Its last [`CONTEXT_TOKENS`] are looked at.
    pub fn after(tokenizer: &Tokenizer, before: &[u32], written: &[u32]) -> Self {
        let tokens = tokenizer.context_of(before).to_vec();
        TextState { written: written.into(), shown: tokens.len(), tokens, first: 0 }
    }

    /// See [`TextStream::push`].
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String, Error> {
        if self.written.contains(&token) {
            let mut text = self.finish(tokenizer)?;
            text += &tokenizer.inner.id_to_token(token).unwrap_or_default();
            return Ok(text);
        }
        self.tokens.push(token);
        let new = self.new_text(tokenizer)?;
        // No character is that long, and decoding a run anew for each of its tokens takes time by its square.
        let endless = self.tokens.len() - self.shown >= LONGEST_RUN;
        if new.ends_with(char::REPLACEMENT_CHARACTER) && !endless {
            return Ok(String::new());
        }
        // Tokens without a text (control tokens) must not become the whole context of the next one: its leading
        // space would be taken for the one at the start of a text.
        if !new.is_empty() || endless {
            self.advance();
        }
        Ok(new)
    }

    /// See [`TextStream::finish`].
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, Error> {
        let new = self.new_text(tokenizer)?;
        self.advance();
        Ok(new)
    }

    fn new_text(&self, tokenizer: &Tokenizer) -> Result<String, Error> {
        let before = tokenizer.decode(&self.tokens[self.first..self.shown])?;
        let mut all = tokenizer.decode(&self.tokens[self.first..])?;
        if all.starts_with(&before) {
            return Ok(all.split_off(before.len()));
        }
        // SentencePiece's decoder makes a whole run of byte tokens into replacement characters while its last one
        // is unfinished, those before included, which were given out already. The new ones alone are right.
        tokenizer.decode(&self.tokens[self.shown..])
    }

    fn advance(&mut self) {
        self.first = self.shown;
        self.shown = self.tokens.len();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::Tokenizer;

    /// It knows two letters.
    pub fn tiny() -> Tokenizer {
        let json = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": {"type": "BPE",
            "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": {"a": 0, "b": 1}, "merges": []}}"#;
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), json).unwrap();
        Tokenizer::from_folder(folder.path()).unwrap().unwrap()
    }
}
