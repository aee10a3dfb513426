//! Texts with drafts. A pass draws several tokens and callers take one at a time, so the cache may have more of a text than its caller
//! has seen. What callers do with a sequence sees only what they have seen of it.
use super::{Session, Text, kvist_finish};
use kvist_engine::executor::SampledToken;
use kvist_engine::kvist_cache::{Refused, SeqId};
use kvist_engine::kvist_model::Error;
use kvist_engine::speculate::{Counts, DraftContext, DraftedPass};

impl Session {
    pub(super) fn counts(&self) -> Option<&Counts> {
        self.speculator.as_ref().map(|speculator| speculator.counts())
    }

    /// Tokens of the sequence that its caller knows to be computed, if the cache may have others.
    pub(super) fn seen_length(&self, seq: SeqId) -> Option<u32> {
        let drafts = self.speculator.is_some() && self.texts.contains_key(&seq.0);
        drafts.then(|| self.known.stored(seq).len() as u32)
    }

    /// Lets the cache have exactly what the caller has seen. A text goes on from there, with the tokens that were drawn already.
    pub(super) fn settle(&mut self, seq: SeqId) -> Result<(), Error> {
        let Some(seen) = self.seen_length(seq) else { return Ok(()) };
        let Session { session, known, .. } = self;
        let mut held = session.cache().next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        if held > seen {
            let cut = session.config().cut_before(seen);
            held = session.truncate(seq, cut)?;
        }
        if held < seen {
            session.prefill(seq, &known.stored(seq)[held as usize..], &mut |_| true)?;
        }
        Ok(())
    }

    /// Computes the tokens of a prompt, and shows drafters what they read. Returns how many were computed before `progress` stopped it.
    pub(super) fn read(
        &mut self,
        seq: SeqId,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize) -> bool,
    ) -> Result<usize, Error> {
        let Session { session, known, speculator, .. } = self;
        let held = session.cache().next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        let (Some(speculator), Some(before)) = (speculator, known.of(seq, held)) else {
            return session.prefill(seq, tokens, progress);
        };
        let text = [before, tokens].concat();
        session.set_taps(speculator.taps())?;
        session.prefill_watched(seq, tokens, &mut |session, computed| {
            let of = (u64::from(seq.0), held + computed.start as u32, &text[..]);
            if let Err(error) = session.report_features(of, 0..computed.len(), speculator) {
                speculator.stop(&error);
            }
            Ok(progress(computed.end))
        })
    }

    /// Computes the last token of a text with a draft of what follows it, and draws the tokens that come next. On `Err` the cache
    /// is as it was.
    pub(super) fn drafted_pass(&mut self, seq: SeqId, last: u32) -> Result<(), Error> {
        self.settle(seq)?;
        let Session { session, known, texts, speculator, .. } = self;
        let (Some(speculator), Some(text)) = (speculator, texts.get_mut(&seq.0)) else { return Ok(()) };
        let model = session.model().clone();
        let mut tokens = [known.stored(seq), &[last]].concat();
        let max_new = match text.max_tokens {
            0 => u32::MAX,
            most => most.saturating_sub(text.n_tokens),
        };
        let of = DraftContext { id: u64::from(seq.0), salt: "", tokens: &tokens, max_new };
        let mut pass = DraftedPass::propose(session, speculator, of)?;
        let ran = pass.run(session, seq, &mut |row| {
            let token = text.sampler.take(row)?;
            text.take(&model, token)?;
            let finished = text.ahead.back().is_some_and(|last| last.finish != kvist_finish::KVIST_GOES_ON);
            Ok(SampledToken { token, finished })
        });
        if ran.is_err() {
            text.ahead.clear();
        }
        ran?;
        known.add(seq, &[last]);
        tokens.extend(text.ahead.iter().map(|next| next.token));
        pass.settle(session, speculator, &tokens);
        Ok(())
    }

    /// Tells the drafters that a sequence keeps `kept` tokens, or that it is removed: they learn from the text that is gone.
    pub(super) fn learn(&mut self, seq: SeqId, kept: Option<u32>) {
        let Session { known, texts, speculator, .. } = self;
        let Some(speculator) = speculator else { return };
        let (id, stored) = (u64::from(seq.0), known.stored(seq));
        let begins = texts.get(&seq.0).map_or(stored.len(), |text: &Text| text.begins);
        match kept {
            Some(kept) => speculator.removed(id, "", stored, begins.max(kept as usize)),
            None => speculator.end(id, "", stored, begins),
        }
    }
}
