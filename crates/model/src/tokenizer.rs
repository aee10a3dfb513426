//! Converts text to tokens and back with the `tokenizers` crate: from `tokenizer.json`, or rebuilt from the vocabulary
//! of a GGUF file.
//!
//! Long texts are tokenized in pieces where this changes no token. [`Tokenizer::largest_piece`] returns the size of the
//! pieces; the thread's [`Halt`](crate::halt::Halt) is checked between them.
mod cuts;
mod ends;
mod gguf;
mod pieces;
pub(crate) mod stops;

use crate::error::Error;
use crate::files;
use crate::guard::quietly;
use crate::halt;
use cuts::{Cuts, PIECE_BYTES};
use std::path::Path;

pub use ends::Ends;
pub use pieces::Piece;

/// A tokenizer and the settings that a model's files give for it.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Where a text may be cut before tokenization.
    cuts: Cuts,
    file: String,
    /// Name of the file's pre-tokenizer if kvist does not support it, or [`gguf::UNNAMED`]. Its tokens would be wrong, so
    /// encoding is refused.
    unknown_pre: Option<String>,
    /// Prepended if special tokens are wanted and the tokenizer does not add it by itself.
    prepend: Option<u32>,
    eos: Option<u32>,
    /// `bos_token` and `eos_token` as text, for chat templates.
    pub(crate) bos_text: Option<String>,
    pub(crate) eos_text: Option<String>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a Hugging Face folder, and its special tokens from `tokenizer_config.json`, or from
    /// `special_tokens_map.json` those that are not there. `None` if there is no `tokenizer.json`.
    pub fn from_folder(folder: &Path) -> Result<Option<Self>, Error> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            return Ok(None);
        }
        let bytes = files::read(&path)?;
        let file = path.display().to_string();
        let inner = parse(&bytes).map_err(|what| Error::Tokenizer { file: file.clone(), what })?;
        let (config, map) = (folder_config(folder)?, json_of(folder, "special_tokens_map.json")?);
        let text = |key: &str| [&config, &map].into_iter().find_map(|of| special_text(of.get(key)?));
        let (bos_text, eos_text) = (text("bos_token"), text("eos_token"));
        let eos = eos_text.as_deref().and_then(|t| inner.token_to_id(t));
        let cuts = cuts_of(&inner);
        Ok(Some(Tokenizer { inner, cuts, file, unknown_pre: None, prepend: None, eos, bos_text, eos_text }))
    }

    /// The whole tokenizer as JSON: vocabulary, merges, rules, and what kvist adds to them.
    pub(crate) fn definition(&self) -> Result<String, Error> {
        let json = self.inner.to_string(false).map_err(|error| self.failed(error))?;
        Ok(format!("{json}{:?}{:?}{:?}", self.unknown_pre, self.prepend, self.eos))
    }

    /// Tokenizes `text`. With `special`, adds the tokens that the model expects at the start of a text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        self.encode_pieces(text, special, PIECE_BYTES)
    }

    fn encode_pieces(&self, text: &str, special: bool, min: usize) -> Result<Vec<u32>, Error> {
        self.check()?;
        let mut tokens = Vec::new();
        for (i, piece) in self.cuts.pieces(text, min).enumerate() {
            halt::check()?;
            let special = special && i == 0;
            let encoding = quietly(|| self.inner.encode_fast(piece, special));
            let encoding = encoding.ok_or_else(|| self.broke())?.map_err(|e| self.failed(e))?;
            let ids = encoding.get_ids();
            tokens.extend(self.in_front(ids, special).into_iter().chain(ids.iter().copied()));
        }
        Ok(tokens)
    }

    /// Size in bytes of the largest piece that is tokenized at once. This is the whole text if the tokenizer does not
    /// allow cuts. Tokenizing takes about a hundred times as much memory.
    pub fn largest_piece(&self, text: &str) -> usize {
        self.cuts.pieces(text, PIECE_BYTES).map(str::len).max().unwrap_or(0)
    }

    /// The token to prepend, unless the tokens already start with it.
    fn in_front(&self, ids: &[u32], special: bool) -> Option<u32> {
        self.prepend.filter(|bos| special && ids.first() != Some(bos))
    }

    /// Fails if the tokenizer cannot encode, because a GGUF file names no pre-tokenizer, or one that kvist does not
    /// support.
    pub fn check(&self) -> Result<(), Error> {
        let Some(pre) = &self.unknown_pre else { return Ok(()) };
        let how = match pre.as_str() {
            gguf::UNNAMED => "does not say how it cuts words (tokenizer.ggml.pre)".into(),
            pre => format!("cuts words by `{pre}`, which kvist does not know"),
        };
        Err(Error::Tokenizer {
            file: self.file.clone(),
            what: format!(
                "{how}, and other tokens would give another text: use the model's Hugging Face folder, or \
                 --guess-pretokenizer to cut them as GPT-2 does"
            ),
        })
    }

    /// Use GPT-2's pre-tokenizer where [`check`](Self::check) would fail.
    pub fn guess_pretokenizer(&mut self) {
        self.unknown_pre = None;
    }

    /// Decodes tokens to text. Control tokens have no text.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        let decoded = quietly(|| self.inner.decode(tokens, true));
        decoded.ok_or_else(|| self.broke())?.map_err(|e| self.failed(e))
    }

    /// The end-of-text token, if the tokenizer's files name one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
    /// The name of a token in the vocabulary.
    pub fn name(&self, token: u32) -> Option<String> {
        self.inner.id_to_token(token)
    }
    pub fn token(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Decodes token by token.
    pub fn stream(&self) -> TextStream<'_> {
        self.stream_with(&[])
    }
    /// Decodes the tokens that follow `before`, one by one. The pieces together equal the text of both minus the text
    /// of `before`. This includes the leading space that SentencePiece drops at the start of a text. `written` as in
    /// [`stream_with`](Self::stream_with).
    pub fn stream_after(&self, before: &[u32], written: &[u32]) -> TextStream<'_> {
        TextStream { tokenizer: self, state: TextState::after(self, before, written) }
    }
    /// Decodes token by token and writes the control tokens `written` out by name. They matter where a program has to
    /// read them: without `<tool_call>`, for example, the text would mean something else.
    pub fn stream_with(&self, written: &[u32]) -> TextStream<'_> {
        TextStream { tokenizer: self, state: TextState::new(written) }
    }

    /// The end of `tokens` that the text of the following tokens may depend on.
    pub fn context_of<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        let from = |back: usize| &tokens[tokens.len().saturating_sub(CONTEXT_TOKENS + back)..];
        // Do not start inside a character: SentencePiece would turn its bytes, and all that follow, into replacement
        // characters.
        let whole = |part: &&[u32]| {
            self.decode(part).is_ok_and(|text| !text.starts_with(char::REPLACEMENT_CHARACTER))
        };
        (0..4).map(from).find(whole).unwrap_or(from(0))
    }

    fn failed(&self, error: tokenizers::Error) -> Error {
        Error::Tokenizer { file: self.file.clone(), what: error.to_string() }
    }
    fn broke(&self) -> Error {
        Error::Tokenizer { file: self.file.clone(), what: "failed on this text".into() }
    }
}

/// The crate assumes that a decoder is JSON and a precompiled normalizer a trie, and panics otherwise.
fn parse(json: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    serde_json::from_slice::<serde::de::IgnoredAny>(json).map_err(|e| format!("not JSON: {e}"))?;
    let parsed = quietly(|| tokenizers::Tokenizer::from_bytes(json));
    let parsed = parsed.ok_or_else(|| "contains something that kvist cannot read".to_string())?;
    let mut tokenizer = parsed.map_err(|e| e.to_string())?;
    // Files keep the settings with which they were saved, often those of a training. transformers obeys them only if asked to.
    tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

/// A broken tokenizer gets no cuts; encoding reports the error.
fn cuts_of(tokenizer: &tokenizers::Tokenizer) -> Cuts {
    quietly(|| Cuts::of(tokenizer)).unwrap_or(Cuts::Nowhere)
}

/// Reads `tokenizer_config.json`; null if it does not exist.
pub(crate) fn folder_config(folder: &Path) -> Result<serde_json::Value, Error> {
    json_of(folder, "tokenizer_config.json")
}

fn json_of(folder: &Path, name: &str) -> Result<serde_json::Value, Error> {
    let path = folder.join(name);
    if !path.exists() {
        return Ok(serde_json::Value::Null);
    }
    let text = files::read_text(&path)?;
    let file = || path.display().to_string();
    serde_json::from_str(&text).map_err(|e| Error::Malformed { file: file(), what: format!("not JSON: {e}") })
}

/// A special token is a string or an object with `content`.
fn special_text(value: &serde_json::Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_string)
}

/// Decodes tokens as they arrive and never returns part of a character: incomplete bytes are held back. The pieces
/// together equal the text of all tokens. One exception: around invalid UTF-8 a SentencePiece tokenizer may replace
/// neighbouring whole characters too; here these were already returned, and they stay.
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    state: TextState,
}

impl TextStream<'_> {
    /// Adds a token and returns the text that is now final; may be empty.
    pub fn push(&mut self, token: u32) -> Result<String, Error> {
        self.state.push(self.tokenizer, token)
    }
    /// Returns the text held back. An incomplete character becomes a replacement character.
    pub fn finish(&mut self) -> Result<String, Error> {
        self.state.finish(self.tokenizer)
    }
}

/// Like [`TextStream`], for callers that cannot borrow the tokenizer for as long. Pass the same tokenizer in every
/// call.
#[derive(Clone, Debug, Default)]
pub struct TextState {
    /// Control tokens to write out by name.
    written: Vec<u32>,
    tokens: Vec<u32>,
    /// Decoding starts here, slightly before the new tokens, because a token's text can depend on the one before it.
    first: usize,
    /// The text of tokens before this one has been returned.
    shown: usize,
}

/// Most tokens held back for a character, or for any text at all.
const LONGEST_RUN: usize = 64;

/// Number of preceding tokens that the first pieces of a text may depend on. Enough that at least one of them has text
/// even if the last ones are control tokens.
pub const CONTEXT_TOKENS: usize = 16;

impl TextState {
    /// At the start of a text. `written` as in [`Tokenizer::stream_with`].
    pub fn new(written: &[u32]) -> Self {
        TextState { written: written.into(), ..TextState::default() }
    }

    /// After `before`; see [`Tokenizer::stream_after`]. Only its last [`CONTEXT_TOKENS`] are used.
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
        // No character is that long, and decoding the whole run again for every token takes quadratic time.
        let endless = self.tokens.len() - self.shown >= LONGEST_RUN;
        if new.ends_with(char::REPLACEMENT_CHARACTER) && !endless {
            return Ok(String::new());
        }
        // Tokens without text (control tokens) must not become the only context of the next token: its leading space
        // would be dropped as at the start of a text.
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
        // While the last token of a run of byte tokens is incomplete, SentencePiece's decoder turns the whole run into
        // replacement characters, including those already returned. The new tokens decoded alone are right.
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

    /// A tokenizer with two letters.
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
