//! One pass of a session that verifies a draft.
use super::{Draft, DraftContext, Speculator, Verified};
use crate::executor::SampledToken;
use crate::session::ModelSession;
use kvist_cache::{Refused, SeqId};
use kvist_device::{RowResult, StepError};
use kvist_model::Error;
use std::time::{Duration, Instant};

/// A pass over the last known token of a text and a draft of what follows: [`propose`](Self::propose), then
/// [`run`](Self::run), then [`settle`](Self::settle). A drafter that fails ends speculation, and no text.
#[derive(Debug, Default)]
pub struct DraftedPass {
    pub draft: Draft,
    pub verified: Verified,
    /// Time of the pass, without that of drawing tokens: what a caller does with these is not the cost of a draft.
    pub elapsed: Duration,
    id: u64,
    /// The last known token and its position.
    last: u32,
    first: u32,
}

impl DraftedPass {
    /// Asks the drafters about `text`, which must not be empty.
    pub fn propose(
        session: &mut ModelSession,
        speculator: &mut Speculator,
        text: DraftContext<'_>,
    ) -> Result<DraftedPass, Error> {
        let limit = session.config().max_rows.min(session.config().max_step_tokens).saturating_sub(1);
        let chains = !session.verifies_trees();
        let mut drafts = Vec::new();
        let proposed = speculator.propose(&[text], 0, limit, chains, &mut drafts);
        let mut draft = drafts.pop().unwrap_or_default();
        if let Err(error) = proposed {
            end_speculation(speculator, &error);
            draft.tree.clear();
        }
        session.set_taps(speculator.taps())?;
        Ok(DraftedPass { draft, id: text.id, ..Self::without_draft(text.tokens)? })
    }

    /// A pass over the last of `known` alone, which must not be empty.
    pub fn without_draft(known: &[u32]) -> Result<DraftedPass, Error> {
        let (&last, before) = known.split_last().ok_or(Error::EmptyPrompt)?;
        Ok(DraftedPass { last, first: before.len() as u32, ..DraftedPass::default() })
    }

    /// Verifies the draft; `choose` draws the tokens, as in [`ModelSession::forward_draft`]. Falls back to a pass without a
    /// draft where that does not fit into the cache. On `Err` the cache is unchanged.
    pub fn run(
        &mut self,
        session: &mut ModelSession,
        seq: SeqId,
        choose: &mut dyn FnMut(RowResult<'_>) -> Result<SampledToken, Error>,
    ) -> Result<(), Error> {
        let mut drawing = Duration::ZERO;
        let mut choose = |row: RowResult<'_>| {
            let started = Instant::now();
            let chosen = choose(row);
            drawing += started.elapsed();
            chosen
        };
        let started = Instant::now();
        loop {
            match session.forward_draft(seq, self.last, &self.draft.tree, &mut choose, &mut self.verified) {
                Err(Error::Step(StepError::Refused(Refused::NoSpace { .. })))
                    if !self.draft.tree.is_empty() =>
                {
                    self.draft.tree.clear();
                }
                other => break other?,
            }
        }
        self.elapsed = started.elapsed().saturating_sub(drawing);
        Ok(())
    }

    /// Tells the drafters what was accepted. `known` are the text's tokens with those of this pass.
    pub fn settle(&self, session: &ModelSession, speculator: &mut Speculator, known: &[u32]) {
        speculator.record(&self.draft, &self.verified);
        speculator.passed(Some((self.draft.tree.len() + 1, self.elapsed)));
        let text = (self.id, self.first, known);
        if let Err(error) = session.report_features(text, self.verified.rows(), speculator) {
            end_speculation(speculator, &error);
        }
    }
}

/// A drafter has failed: the text goes on without drafts.
pub(crate) fn end_speculation(speculator: &mut Speculator, error: &Error) {
    tracing::warn!(target: "kvist::engine", "speculation ends: {error}");
    speculator.stop(error);
}
