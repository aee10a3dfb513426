//! Sessions in files: a sequence with its text, and frozen prefixes, which need no file.
use super::{Last, Session, Text, TextConfig};
use crate::status::{Failure, Outcome, bad_file};
use kvist_engine::frozen::{self, FrozenPrefix, FrozenText, SharedPrefix};
use kvist_engine::kvist_cache::SeqId;
use kvist_engine::sampler::Sampler;
use kvist_engine::saved::{self, Origin, SavedSession, SavedText};
use std::path::Path;

impl Session {
    fn origin(&self) -> Outcome<Origin> {
        Ok(self.origin.of(self.session.model(), self.session.config())?)
    }

    /// The tokens that the cache has of a sequence.
    pub(super) fn tokens(&mut self, seq: SeqId) -> Outcome<&[u32]> {
        let n = self.length(seq)?;
        self.known.of(seq, n).ok_or_else(|| {
            Failure::unsupported(format!(
                "the tokens of sequence {seq} are not known: settle its draft nodes first"
            ))
        })
    }

    /// Saves a sequence, with the token that the caller has seen last.
    pub(super) fn save(&mut self, seq: SeqId, path: &Path) -> Outcome<()> {
        self.settle(seq)?;
        let mut tokens = self.tokens(seq)?.to_vec();
        if tokens.is_empty() {
            return Err(Failure::order(format!("sequence {seq} has no tokens to save")));
        }
        if let Some(Text { last: Last::Shown(token), .. }) = self.texts.get(&seq.0) {
            tokens.push(*token);
        }
        let origin = self.origin()?;
        let text = SavedText { tokens: &tokens, messages: &[] };
        saved::save(&mut self.session, seq, text, &origin, path).map_err(bad_file)
    }

    /// Puts a saved text into an empty sequence, computes what the file does not have, and draws the next token. Returns how many
    /// tokens were not computed. On `Err` the sequence is empty.
    pub(super) fn resume(&mut self, seq: SeqId, saved: &SavedSession, config: TextConfig) -> Outcome<u32> {
        let mut sampler = Sampler::new(config.sampler)?;
        let origin = self.origin()?;
        // The last token is computed: the next one is drawn from its logits.
        let most = saved.tokens().len() - 1;
        let n = saved::resume(&mut self.session, seq, saved, &origin, most).map_err(bad_file)?;
        self.compute_rest(seq, saved.tokens(), n)?;
        sampler.observe(saved.tokens());
        self.begin_text(seq, saved.tokens(), sampler, config)?;
        Ok(n as u32)
    }

    /// Begins a new session with a frozen prefix, and computes what cannot be taken from the file. Returns how many tokens were
    /// not computed. On `Err` the sequence is empty.
    pub(super) fn begin_with(&mut self, seq: SeqId, prefix: &FrozenPrefix) -> Outcome<u32> {
        let origin = self.origin()?;
        let n = frozen::begin_with(&mut self.session, seq, prefix, &origin, usize::MAX).map_err(bad_file)?;
        self.compute_rest(seq, prefix.tokens(), n)?;
        Ok(n as u32)
    }

    /// Computes the tokens from `n` on. On `Err` the sequence is empty.
    fn compute_rest(&mut self, seq: SeqId, tokens: &[u32], n: usize) -> Outcome<()> {
        self.texts.remove(&seq.0);
        if n < tokens.len()
            && let Err(error) = self.session.prefill(seq, &tokens[n..], &mut |_| true)
        {
            self.session.truncate(seq, 0)?;
            return Err(error.into());
        }
        self.known.truncate(seq, 0);
        self.known.add(seq, tokens);
        Ok(())
    }

    /// Freezes a sequence in a file.
    pub(super) fn freeze(&mut self, seq: SeqId, path: &Path) -> Outcome<()> {
        let (tokens, origin) = self.text_and_origin(seq)?;
        let text = FrozenText { tokens: &tokens, system: None };
        frozen::freeze(&mut self.session, seq, text, &origin, path).map_err(bad_file)
    }

    /// Freezes a sequence in memory.
    pub(super) fn share(&mut self, seq: SeqId) -> Outcome<SharedPrefix> {
        let (tokens, origin) = self.text_and_origin(seq)?;
        let text = FrozenText { tokens: &tokens, system: None };
        frozen::share(&mut self.session, seq, text, &origin).map_err(bad_file)
    }

    fn text_and_origin(&mut self, seq: SeqId) -> Outcome<(Vec<u32>, Origin)> {
        self.settle(seq)?;
        let tokens = self.tokens(seq)?.to_vec();
        if tokens.is_empty() {
            return Err(Failure::order(format!("sequence {seq} has no tokens to freeze")));
        }
        Ok((tokens, self.origin()?))
    }
}
