//! Text generation over a session: prefill, then decode token by token until an end condition is met.
use crate::executor::SampledToken;
use crate::sampler::Sampler;
use crate::session::{LogitRows, ModelSession, SequenceInput};
use crate::speculate::{DraftContext, DraftedPass, Speculator, end_speculation};
use crate::text::StopMatcher;
use kvist_cache::{Refused, SeqId};
use kvist_device::{RowResult, StepError};
use kvist_model::Error;
use kvist_model::tokenizer::{TextState, Tokenizer};
use std::time::{Duration, Instant};
pub use stepwise::Stepwise;

mod stepwise;

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GenerationEnd {
    /// The model produced an end token.
    EndOfText,
    /// This stop string was generated. It is not part of the text.
    Stop(String),
    MaxTokens,
    /// No free cell is left for another token.
    CacheFull,
    Cancelled,
}

impl GenerationEnd {
    /// Machine-readable name: `end_of_text`, `stop`, `max_tokens`, `cache_full` or `cancelled`.
    pub fn name(&self) -> &'static str {
        match self {
            GenerationEnd::EndOfText => "end_of_text",
            GenerationEnd::Stop(_) => "stop",
            GenerationEnd::MaxTokens => "max_tokens",
            GenerationEnd::CacheFull => "cache_full",
            GenerationEnd::Cancelled => "cancelled",
        }
    }
}

/// When to stop, and how to compute.
#[derive(Clone, Debug)]
pub struct Limits {
    pub max_tokens: usize,
    pub stop: Vec<String>,
    pub ignore_eos: bool,
    /// Recompute the whole history for every token instead of reading it from the cache. This is the baseline for
    /// measuring a cache.
    pub no_cache: bool,
}

/// The generated text and its timings.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Every sampled token, including an end token.
    pub tokens: Vec<u32>,
    pub text: String,
    pub finish: GenerationEnd,
    pub prompt_tokens: usize,
    pub prefill: Duration,
    pub decode: Duration,
}

impl Generation {
    /// Decode speed in tokens per second. The first token counts as prefill.
    pub fn decode_rate(&self) -> f64 {
        rate(self.tokens.len().saturating_sub(1), self.decode)
    }
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prompt_tokens, self.prefill)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// Callbacks during a generation. Every default implementation does nothing.
pub trait Observer {
    /// Prompt tokens fed so far. Return false to stop.
    fn prefilled(&mut self, _tokens: usize) -> bool {
        true
    }
    /// A token was sampled, whether or not it produced text. Return false to stop.
    fn sampled(&mut self) -> bool {
        true
    }
    /// Final text: whole characters, and no part of a stop string. Return false to stop.
    fn text(&mut self, _text: &str) -> bool {
        true
    }
    /// Final reasoning text, if the model's format separates reasoning from the answer. Only
    /// [`generate_answer`](crate::answer::generate_answer) calls this. Return false to stop.
    fn reasoning(&mut self, _text: &str) -> bool {
        true
    }
    /// Control tokens to write out as text, as in [`Tokenizer::stream_with`]. Called once, before generation starts.
    fn written(&self) -> &[u32] {
        &[]
    }
}

impl Observer for () {}

/// What to generate, and how.
pub struct GenerateArgs<'g> {
    pub session: &'g mut ModelSession,
    pub seq: SeqId,
    /// The tokens that the sequence has already.
    pub before: &'g [u32],
    /// What follows them.
    pub prompt: &'g [u32],
    /// Without a tokenizer the text stays empty and stop strings are not matched.
    pub tokenizer: Option<&'g Tokenizer>,
    pub sampler: &'g mut Sampler,
    pub limits: &'g Limits,
    /// Drafts: the same tokens in fewer passes.
    pub speculation: Option<Speculation<'g>>,
}

/// Drafts for a generation.
pub struct Speculation<'s> {
    pub speculator: &'s mut Speculator,
}

/// Feeds the prompt to the sequence, then samples until an end condition is met. The last sampled token is not in the
/// cache; the next input has to begin with it. For drafters the text's id is that of the sequence; it is not reported as
/// ended, so that a chat can go on with it.
pub fn generate(args: GenerateArgs<'_>, observer: &mut dyn Observer) -> Result<Generation, Error> {
    let GenerateArgs { session, seq, before, prompt, tokenizer, sampler, limits, mut speculation } = args;
    let started = Instant::now();
    let known = [before, prompt].concat();
    if let Some(Speculation { speculator }) = &speculation {
        session.set_taps(speculator.taps())?;
    }
    let done = session.prefill_watched(seq, prompt, &mut |session, computed| {
        if let Some(Speculation { speculator }) = &mut speculation {
            let text = (u64::from(seq.0), (before.len() + computed.start) as u32, &known[..]);
            if let Err(error) = session.report_features(text, 0..computed.len(), speculator) {
                end_speculation(speculator, &error);
            }
        }
        Ok(observer.prefilled(computed.end))
    })?;
    let prefill = started.elapsed();
    let started = Instant::now();
    sampler.observe(prompt);
    let n_prompt = known.len();
    let mut text = Generating::new(session, known, tokenizer, limits, observer.written());
    let finish = if done < prompt.len() {
        GenerationEnd::Cancelled
    } else if limits.max_tokens == 0 {
        GenerationEnd::MaxTokens
    } else {
        let mut draw = Draw { sampler, tokenizer, observer };
        text.choose(RowResult::Logits(session.logits_mut()), &mut draw)?;
        loop {
            if let Some(finish) = text.finish.take() {
                break finish;
            }
            let next = match &mut speculation {
                Some(Speculation { speculator }) if !limits.no_cache => {
                    drafted_pass(session, seq, &mut text, speculator, &mut draw)
                }
                _ => plain_pass(session, seq, &mut text, &mut draw),
            };
            match next {
                Err(Error::Step(StepError::Refused(Refused::NoSpace { .. }))) => {
                    break GenerationEnd::CacheFull;
                }
                other => other?,
            }
        }
    };
    let Generating { known, mut out, .. } = text;
    let tokens = known[n_prompt..].to_vec();
    out.finish(&finish, tokenizer)?;
    out.flush_to(observer);
    Ok(Generation {
        tokens,
        text: out.text,
        finish,
        prompt_tokens: prompt.len(),
        prefill,
        decode: started.elapsed(),
    })
}

/// Computes the last token, or the whole text again if the cache is not used, and draws the next one.
fn plain_pass(
    session: &mut ModelSession,
    seq: SeqId,
    text: &mut Generating,
    draw: &mut Draw<'_>,
) -> Result<(), Error> {
    if text.limits.no_cache {
        session.clear()?;
        session.prefill(seq, &text.known, &mut |_| true)?;
    } else {
        let last = text.known.len() - 1;
        let input = SequenceInput::chain(seq, &text.known[last..]);
        session.forward(&[input], LogitRows::LastOfEach)?;
    }
    text.choose(RowResult::Logits(session.logits_mut()), draw).map(drop)
}

/// One pass with a draft.
fn drafted_pass(
    session: &mut ModelSession,
    seq: SeqId,
    text: &mut Generating,
    speculator: &mut Speculator,
    draw: &mut Draw<'_>,
) -> Result<(), Error> {
    let max_new = text.limits.max_tokens - (text.known.len() - text.prompt);
    let max_new = u32::try_from(max_new).unwrap_or(u32::MAX);
    let known = DraftContext { id: u64::from(seq.0), salt: "", tokens: &text.known, max_new };
    let mut pass = DraftedPass::propose(session, speculator, known)?;
    pass.run(session, seq, &mut |row| text.choose(row, draw))?;
    pass.settle(session, speculator, &text.known);
    Ok(())
}

/// A text that is being generated.
struct Generating {
    /// Prompt and answer.
    known: Vec<u32>,
    prompt: usize,
    eos: Vec<u32>,
    limits: Limits,
    out: Output,
    finish: Option<GenerationEnd>,
}

/// What draws the tokens of a text, decodes them, and hears of them.
struct Draw<'d> {
    sampler: &'d mut Sampler,
    tokenizer: Option<&'d Tokenizer>,
    observer: &'d mut dyn Observer,
}

impl Generating {
    /// A text that continues `known`, whose end is `prompt`.
    fn new(
        session: &ModelSession,
        known: Vec<u32>,
        tokenizer: Option<&Tokenizer>,
        limits: &Limits,
        written: &[u32],
    ) -> Self {
        Generating {
            prompt: known.len(),
            eos: session.model().end_tokens().to_vec(),
            limits: limits.clone(),
            out: Output::new(tokenizer, &known, limits, written),
            known,
            finish: None,
        }
    }

    /// Draws the next token from `row`, and notes whether the text ends with it.
    fn choose(&mut self, row: RowResult<'_>, draw: &mut Draw<'_>) -> Result<SampledToken, Error> {
        let token = draw.sampler.take(row)?;
        draw.sampler.observe(&[token]);
        self.known.push(token);
        self.finish = if self.eos.contains(&token) && !self.limits.ignore_eos {
            Some(GenerationEnd::EndOfText)
        } else if let Some(stop) = self.out.push(token, draw.tokenizer)? {
            Some(GenerationEnd::Stop(stop))
        } else if !self.out.flush_to(draw.observer) || !draw.observer.sampled() {
            Some(GenerationEnd::Cancelled)
        } else if self.known.len() - self.prompt >= self.limits.max_tokens {
            Some(GenerationEnd::MaxTokens)
        } else {
            None
        };
        Ok(SampledToken { token, finished: self.finish.is_some() })
    }
}

/// Turns tokens into final text. Every call gets the same tokenizer, or none.
struct Output {
    state: TextState,
    stops: StopMatcher,
    text: String,
    shown: usize,
}

impl Output {
    fn new(tokenizer: Option<&Tokenizer>, prompt: &[u32], limits: &Limits, written: &[u32]) -> Self {
        let state = tokenizer.map(|tokenizer| TextState::after(tokenizer, prompt, written));
        let state = state.unwrap_or_default();
        Output { state, stops: StopMatcher::new(&limits.stop), text: String::new(), shown: 0 }
    }
    /// Adds a token. Returns the stop string that it completed, if any.
    fn push(&mut self, token: u32, tokenizer: Option<&Tokenizer>) -> Result<Option<String>, Error> {
        let Some(tokenizer) = tokenizer else { return Ok(None) };
        let piece = self.state.push(tokenizer, token)?;
        Ok(self.stops.push(&piece, &mut self.text))
    }
    /// Appends the text held back, unless a stop string ended the generation.
    fn finish(&mut self, finish: &GenerationEnd, tokenizer: Option<&Tokenizer>) -> Result<(), Error> {
        if !matches!(finish, GenerationEnd::Stop(_)) {
            if let Some(tokenizer) = tokenizer {
                let rest = self.state.finish(tokenizer)?;
                self.stops.push(&rest, &mut self.text);
            }
            self.stops.finish(&mut self.text);
        }
        Ok(())
    }
    fn flush_to(&mut self, observer: &mut dyn Observer) -> bool {
        let new = &self.text[self.shown..];
        self.shown = self.text.len();
        new.is_empty() || observer.text(new)
    }
}
