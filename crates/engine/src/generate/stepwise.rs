//! A generation whose caller asks for one pass at a time, and may do other things with the session in between.
use super::{Draw, Generating, GenerationEnd, Limits};
use crate::sampler::Sampler;
use crate::session::{LogitRows, ModelSession, SequenceInput};
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
    /// Tokens of `text` that the session has computed.
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
        let text = Generating::new(session, prompt.clone(), model.tokenizer(), limits, written);
        Ok(Stepwise { seq, sampler, text, start, fed: 0, prefill: Duration::ZERO, decode: Duration::ZERO })
    }

    /// Runs one pass: the next part of the prompt, of at most `max_step_tokens`, or the last token. Returns false if the
    /// text has ended; then nothing was computed. After an `Err` the sequence is as it was before the pass, and the same
    /// step can be tried again.
    pub fn step(&mut self, session: &mut ModelSession) -> Result<bool, Error> {
        if self.text.finish.is_some() {
            return Ok(false);
        }
        let expected = self.start + self.fed as u32;
        match session.cache().next_position(self.seq) {
            None => return Err(Refused::UnknownSequence(self.seq).into()),
            Some(got) if got != expected => {
                return Err(Refused::NotAtEnd { seq: self.seq, expected: got, got: expected }.into());
            }
            Some(_) => {}
        }
        let started = Instant::now();
        let decodes = self.fed >= self.text.prompt;
        let longest = session.config().max_step_tokens.max(1) as usize;
        let end = self.text.known.len().min(self.fed + longest);
        let is_last = end == self.text.known.len();
        let want = if is_last { LogitRows::LastOfEach } else { LogitRows::None };
        match session.forward(&[SequenceInput::chain(self.seq, &self.text.known[self.fed..end])], want) {
            Err(Error::Step(StepError::Refused(Refused::NoSpace { .. }))) if decodes => {
                self.end(session, GenerationEnd::CacheFull)?;
            }
            other => {
                other?;
                self.fed = end;
                if is_last {
                    self.choose(session)?;
                }
            }
        }
        *(if decodes { &mut self.decode } else { &mut self.prefill }) += started.elapsed();
        Ok(true)
    }

    fn choose(&mut self, session: &mut ModelSession) -> Result<(), Error> {
        if self.text.limits.max_tokens == 0 {
            return self.end(session, GenerationEnd::MaxTokens);
        }
        let model = session.model().clone();
        let mut draw =
            Draw { sampler: &mut self.sampler, tokenizer: model.tokenizer(), observer: &mut Silent };
        self.text.choose(RowResult::Logits(session.logits_mut()), &mut draw)?;
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
        self.fed.min(self.text.prompt)
    }
    pub fn prompt_tokens(&self) -> usize {
        self.text.prompt
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
