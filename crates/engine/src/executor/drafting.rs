//! Drafts for the requests of a batch.
use crate::session::report_features;
use crate::speculate::{Draft, DraftContext, DraftTree, Speculator, Verified};
use kvist_model::Error;
use kvist_scheduler::{Batch, BatchDrafts, RequestId};
use std::collections::HashMap;
use std::time::Duration;

/// A speculator, and what it needs to know about the scheduler's requests.
pub(super) struct Drafting {
    pub speculator: Speculator,
    /// Indices into the batch and drafts of the step being built.
    drafts: Vec<(usize, Draft)>,
    /// Looked up by id, never iterated.
    texts: HashMap<RequestId, Known>,
}

/// A request's tokens. They are kept here, because the scheduler has dropped them by the time the request ends.
struct Known {
    salt: String,
    tokens: Vec<u32>,
    prompt: usize,
}

impl Drafting {
    pub fn new(speculator: Speculator) -> Self {
        Drafting { speculator, drafts: Vec::new(), texts: HashMap::new() }
    }

    /// Proposes drafts for the requests that decode.
    pub fn propose(
        &mut self,
        batch: Batch<'_>,
        limit: u32,
        vocab: u32,
        out: &mut BatchDrafts,
    ) -> Result<(), Error> {
        self.drafts.clear();
        let decoding = batch.work.iter().enumerate().filter(|(_, work)| work.decodes);
        let texts: Vec<(usize, DraftContext<'_>)> = decoding
            .filter_map(|(i, work)| {
                let (id, tokens) = (work.request.0, batch.known_tokens(i)?);
                Some((i, DraftContext { id, salt: batch.salt(i), tokens, max_new: batch.max_new(i) }))
            })
            .collect();
        let rows: u32 = batch.work.iter().map(|work| work.n_tokens).sum();
        let (works, texts): (Vec<usize>, Vec<DraftContext<'_>>) = texts.into_iter().unzip();
        let mut drafts = Vec::new();
        self.speculator.propose(&texts, rows as usize - texts.len(), limit, false, &mut drafts)?;
        for (i, mut draft) in works.into_iter().zip(drafts) {
            // A drafter's error must not fail a step of all requests.
            if draft.tree.tokens().iter().any(|token| *token >= vocab)
                || draft.tree.max_depth() >= batch.max_new(i)
            {
                draft.tree.clear();
            }
            out.push(i, draft.tree.parents());
            self.drafts.push((i, draft));
        }
        Ok(())
    }

    /// The draft tree that the step computes for request `i` of the batch.
    pub fn tree(&self, i: usize, batch: Batch<'_>) -> Option<&DraftTree> {
        // The scheduler drops drafts that do not fit.
        if batch.draft(i).is_empty() {
            return None;
        }
        self.drafts.iter().find(|(work, _)| *work == i).map(|(_, draft)| &draft.tree)
    }

    /// Request `i` of the batch has verified its draft.
    pub fn verified(&mut self, batch: Batch<'_>, i: usize, verified: &Verified) {
        if let Some((_, draft)) = self.drafts.iter().find(|(work, _)| *work == i) {
            self.speculator.record(draft, verified);
        }
        self.extend(batch, i, &verified.tokens);
    }

    /// Request `i` of the batch has emitted tokens without a draft.
    pub fn emitted(&mut self, batch: Batch<'_>, i: usize, tokens: &[u32]) {
        if batch.work[i].decodes {
            let verified = Verified { path: Vec::new(), tokens: tokens.to_vec(), finished: false };
            self.speculator.record(&Draft::default(), &verified);
        }
        self.extend(batch, i, tokens);
    }

    /// The step has computed the batch. Of `taps`, passes on the rows that stay: per request, those of its tokens and of its
    /// accepted nodes.
    pub fn computed(
        &mut self,
        batch: Batch<'_>,
        taps: &[Vec<f32>],
        hidden: usize,
        kept: &[Vec<usize>],
    ) -> Result<(), Error> {
        for (i, (work, rows)) in batch.work.iter().zip(kept).enumerate() {
            if let Some(known) = batch.known_tokens(i) {
                let text = (work.request.0, work.first, known);
                report_features(taps, hidden, text, rows.iter().copied(), &mut self.speculator)?;
            }
        }
        Ok(())
    }

    fn extend(&mut self, batch: Batch<'_>, i: usize, tokens: &[u32]) {
        let Some(known) = batch.known_tokens(i) else { return };
        let text = self.texts.entry(batch.work[i].request).or_insert_with(|| Known {
            salt: batch.salt(i).to_string(),
            tokens: known.to_vec(),
            prompt: batch.prompt_tokens(i) as usize,
        });
        text.tokens.extend_from_slice(tokens);
    }

    /// The step has run.
    pub fn passed(&mut self, batch: Batch<'_>, elapsed: Duration) {
        let rows: u32 = batch.work.iter().map(|work| work.n_tokens).sum();
        // Prompt tokens have other costs: most of them need no logits.
        let decodes = batch.work.iter().all(|work| work.decodes);
        self.speculator.passed(decodes.then_some((rows as usize, elapsed)));
        self.drafts.clear();
    }

    /// A request has ended.
    pub fn end(&mut self, id: RequestId) {
        match self.texts.remove(&id) {
            Some(Known { salt, tokens, prompt }) => self.speculator.end(id.0, &salt, &tokens, prompt),
            // It ended before its first token, but drafters may have seen features of its prompt.
            None => self.speculator.forget(id.0),
        }
    }
}
