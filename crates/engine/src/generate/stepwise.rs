//! A generation whose caller asks for one pass at a time, and may do other things with the session in between.
use super::{Draw, Generating, GenerationEnd, Limits, drafted_pass};
use crate::sampler::Sampler;
use crate::session::{LogitRows, ModelSession, SequenceInput};
use crate::speculate::{Speculator, end_speculation};
use kvist_cache::{Refused, SeqId};
use kvist_device::{RowResult, StepError};
use kvist_model::Error;
use std::time::{Duration, Instant};

/// Like [`generate`](super::generate), in steps: the same tokens, the same text. It borrows neither the session nor its
/// cache, so the generations of several sequences can take turns. Between two steps the sequence itself must not
/// change: its length is checked, its tokens are not.
pub struct Stepwise {
    seq: SeqId,
    sampler: Sampler,
    text: Generating,
    /// Where the prompt starts in the sequence.
    start: u32,
    /// Where it starts in the tokens of `text`: at `start`, if these are the whole text, and otherwise at 0.
    first: usize,
    /// Tokens of `text` that the session has computed, or that come before the prompt.
    fed: usize,
    prefill: Duration,
    decode: Duration,
}

impl Stepwise {
    /// A generation that adds `prompt` to `seq`, and then what the model says. `written` as in
    /// [`Tokenizer::stream_with`](kvist_model::tokenizer::Tokenizer::stream_with). Computes nothing yet.
    ///
    /// Refused if the prompt is empty, has unknown tokens, or does not fit behind what is in the cache; and if there
    /// is no such sequence.
    pub fn new(
        session: &mut ModelSession,
        seq: SeqId,
        prompt: Vec<u32>,
        sampler: Sampler,
        limits: &Limits,
        written: &[u32],
    ) -> Result<Self, Error> {
        Self::begin(session, seq, &[], prompt, sampler, limits, written)
    }

    /// Like [`new`](Self::new), for a sequence whose tokens so far are `before`. Drafts need them: see
    /// [`step_drafted`](Self::step_drafted).
    ///
    /// # Errors
    /// As for `new`; or the sequence has another number of tokens.
    pub fn after(
        session: &mut ModelSession,
        seq: SeqId,
        before: &[u32],
        prompt: Vec<u32>,
        sampler: Sampler,
        limits: &Limits,
        written: &[u32],
    ) -> Result<Self, Error> {
        let held = session.cache().next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        if held as usize != before.len() {
            return Err(Error::Usage(format!(
                "the sequence has {held} tokens, and {} are said to be before the prompt",
                before.len()
            )));
        }
        Self::begin(session, seq, before, prompt, sampler, limits, written)
    }

    fn begin(
        session: &mut ModelSession,
        seq: SeqId,
        before: &[u32],
        prompt: Vec<u32>,
        mut sampler: Sampler,
        limits: &Limits,
        written: &[u32],
    ) -> Result<Self, Error> {
        let start = session.cache().next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        crate::check_prompt(session.config(), start as usize + prompt.len())?;
        sampler.observe(&prompt);
        let model = session.model().clone();
        let vocab = model.config().vocab;
        if let Some(&token) = prompt.iter().find(|token| **token as usize >= vocab) {
            return Err(Error::TokenOutsideVocabulary { token, vocab });
        }
        let known = [before, &prompt].concat();
        let text = Generating::new(session, prompt, model.tokenizer(), limits, written);
        let (first, prompt) = (before.len(), known.len());
        let text = Generating { known, prompt, ..text };
        let (prefill, decode) = (Duration::ZERO, Duration::ZERO);
        Ok(Stepwise { seq, sampler, text, start, first, fed: first, prefill, decode })
    }

    /// Runs one pass: the next part of the prompt, of at most `max_step_tokens`, or the last token. Returns false if the
    /// text has ended; then nothing was computed. After an `Err` the sequence is as it was before the pass, and the same
    /// step can be tried again.
    pub fn step(&mut self, session: &mut ModelSession) -> Result<bool, Error> {
        self.timed(session, None)
    }

    /// Like [`step`](Self::step), with a draft beside the last token: the same tokens, perhaps several in one pass. For drafters
    /// the text's id is that of the sequence; it is not reported as ended, because more may follow.
    ///
    /// # Errors
    /// As for `step`; or the tokens before the prompt are not known: see [`after`](Self::after).
    pub fn step_drafted(
        &mut self,
        session: &mut ModelSession,
        speculator: &mut Speculator,
    ) -> Result<bool, Error> {
        if self.first != self.start as usize {
            return Err(Error::Usage("drafts need the tokens before the prompt: use Stepwise::after".into()));
        }
        self.timed(session, Some(speculator))
    }

    fn timed(
        &mut self,
        session: &mut ModelSession,
        speculator: Option<&mut Speculator>,
    ) -> Result<bool, Error> {
        if self.text.finish.is_some() {
            return Ok(false);
        }
        let expected = self.start + (self.fed - self.first) as u32;
        match session.cache().next_position(self.seq) {
            None => return Err(Refused::UnknownSequence(self.seq).into()),
            Some(got) if got != expected => {
                return Err(Refused::NotAtEnd { seq: self.seq, expected: got, got: expected }.into());
            }
            Some(_) => {}
        }
        let started = Instant::now();
        let decodes = self.fed >= self.text.prompt;
        let done = match speculator {
            // After an error more than the last token may be missing in the cache.
            Some(speculator) if decodes && self.fed + 1 == self.text.known.len() => {
                self.drafted(session, speculator)
            }
            speculator => self.plain(session, speculator),
        };
        match done {
            Err(Error::Step(StepError::Refused(Refused::NoSpace { .. }))) if decodes => {
                self.end(session, GenerationEnd::CacheFull)?;
            }
            other => other?,
        }
        *(if decodes { &mut self.decode } else { &mut self.prefill }) += started.elapsed();
        Ok(true)
    }

    /// Computes the tokens that the cache lacks, a chunk of them, and draws the next token if it was the last chunk.
    fn plain(
        &mut self,
        session: &mut ModelSession,
        speculator: Option<&mut Speculator>,
    ) -> Result<(), Error> {
        if let Some(speculator) = &speculator {
            session.set_taps(speculator.taps())?;
        }
        let longest = session.config().max_step_tokens.max(1) as usize;
        let end = self.text.known.len().min(self.fed + longest);
        let is_last = end == self.text.known.len();
        let want = if is_last { LogitRows::LastOfEach } else { LogitRows::None };
        let computed = self.fed..end;
        let input = SequenceInput::chain(self.seq, &self.text.known[computed.clone()]);
        session.forward(&[input], want)?;
        self.fed = end;
        if let Some(speculator) = speculator {
            let text = (u64::from(self.seq.0), computed.start as u32, &self.text.known[..]);
            if let Err(error) = session.report_features(text, 0..computed.len(), speculator) {
                end_speculation(speculator, &error);
            }
        }
        if is_last { self.choose(session) } else { Ok(()) }
    }

    /// Verifies a draft behind the last token.
    fn drafted(&mut self, session: &mut ModelSession, speculator: &mut Speculator) -> Result<(), Error> {
        let model = session.model().clone();
        let mut draw =
            Draw { sampler: &mut self.sampler, tokenizer: model.tokenizer(), observer: &mut Silent };
        drafted_pass(session, self.seq, &mut self.text, speculator, &mut draw)?;
        let held = session.cache().next_position(self.seq).unwrap_or(self.start);
        self.fed = held.saturating_sub(self.start) as usize + self.first;
        self.end_if_finished(session)
    }

    fn choose(&mut self, session: &mut ModelSession) -> Result<(), Error> {
        if self.text.limits.max_tokens == 0 {
            return self.end(session, GenerationEnd::MaxTokens);
        }
        let model = session.model().clone();
        let mut draw =
            Draw { sampler: &mut self.sampler, tokenizer: model.tokenizer(), observer: &mut Silent };
        self.text.choose(RowResult::Logits(session.logits_mut()), &mut draw)?;
        self.end_if_finished(session)
    }

    fn end_if_finished(&mut self, session: &ModelSession) -> Result<(), Error> {
        match self.text.finish.clone() {
            Some(finish) => self.end(session, finish),
            None => Ok(()),
        }
    }

    fn end(&mut self, session: &ModelSession, finish: GenerationEnd) -> Result<(), Error> {
        self.text.out.finish(&finish, session.model().tokenizer())?;
        self.text.finish = Some(finish);
        Ok(())
    }

    /// Every sampled token, including an end token. The last one is not in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.text.known[self.text.prompt..]
    }
    /// The final text so far: whole characters, and no part of a stop string.
    pub fn text(&self) -> &str {
        &self.text.out.text
    }
    /// Prompt tokens computed so far.
    pub fn prompt_done(&self) -> usize {
        self.fed.min(self.text.prompt) - self.first
    }
    pub fn prompt_tokens(&self) -> usize {
        self.text.prompt - self.first
    }
    /// Why the text has ended; `None` while it goes on.
    pub fn finish(&self) -> Option<&GenerationEnd> {
        self.text.finish.as_ref()
    }
    /// Time spent on the prompt, with the first token, and on the tokens after it.
    pub fn times(&self) -> (Duration, Duration) {
        (self.prefill, self.decode)
    }
}

/// The caller looks at the text by itself.
struct Silent;

impl super::Observer for Silent {}
