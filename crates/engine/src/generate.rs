//! Text generation over a session: prefill, then decode token by token until an end condition is met.
use crate::sampler::Sampler;
use crate::session::{LogitRows, ModelSession, SequenceInput};
use crate::text::StopMatcher;
use kvist_cache::{Refused, SeqId};
use kvist_device::StepError;
use kvist_model::Error;
use kvist_model::tokenizer::{TextStream, Tokenizer};
use std::time::{Duration, Instant};

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model produced an end token.
    EndOfText,
    /// This stop string was generated. It is not part of the text.
    Stop(String),
    MaxTokens,
    /// No free cell is left for another token.
    CacheFull,
    Cancelled,
}

impl Finish {
    /// Machine-readable name: `end_of_text`, `stop`, `max_tokens`, `cache_full` or `cancelled`.
    pub fn name(&self) -> &'static str {
        match self {
            Finish::EndOfText => "end_of_text",
            Finish::Stop(_) => "stop",
            Finish::MaxTokens => "max_tokens",
            Finish::CacheFull => "cache_full",
            Finish::Cancelled => "cancelled",
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
    pub finish: Finish,
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

/// Feeds `prompt` to `seq`, then samples until an end condition is met. Without a tokenizer the text stays empty and
/// stop strings are not matched. The last sampled token is not in the cache; the next input has to begin with it.
pub fn generate(
    session: &mut ModelSession,
    seq: SeqId,
    prompt: &[u32],
    tokenizer: Option<&Tokenizer>,
    sampler: &mut Sampler,
    limits: &Limits,
    observer: &mut dyn Observer,
) -> Result<Generation, Error> {
    let started = Instant::now();
    let eos = session.model().end_tokens().to_vec();
    let mut out = Output::new(tokenizer, prompt, limits, observer.written());
    let done = session.prefill(seq, prompt, &mut |n| observer.prefilled(n))?;
    let prefill = started.elapsed();
    let started = Instant::now();
    let mut tokens: Vec<u32> = Vec::new();
    sampler.observe(prompt);
    let finish = if done < prompt.len() {
        Finish::Cancelled
    } else {
        loop {
            if tokens.len() >= limits.max_tokens {
                break Finish::MaxTokens;
            }
            if let Some(last) = tokens.last() {
                let next = if limits.no_cache {
                    let history = [prompt, tokens.as_slice()].concat();
                    session.clear().and_then(|()| session.prefill(seq, &history, &mut |_| true)).map(drop)
                } else {
                    session.forward(
                        &[SequenceInput::chain(seq, std::slice::from_ref(last))],
                        LogitRows::LastOfEach,
                    )
                };
                match next {
                    Err(Error::Step(StepError::Refused(Refused::NoSpace { .. }))) => break Finish::CacheFull,
                    other => other?,
                }
            }
            let token = sampler.sample(session.logits_row(0))?;
            sampler.observe(&[token]);
            tokens.push(token);
            if eos.contains(&token) && !limits.ignore_eos {
                break Finish::EndOfText;
            }
            if let Some(stop) = out.push(token)? {
                break Finish::Stop(stop);
            }
            if !out.flush_to(observer) || !observer.sampled() {
                break Finish::Cancelled;
            }
        }
    };
    out.finish(&finish)?;
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

/// Turns tokens into final text.
struct Output<'t> {
    stream: Option<TextStream<'t>>,
    stops: StopMatcher,
    text: String,
    shown: usize,
}

impl<'t> Output<'t> {
    fn new(tokenizer: Option<&'t Tokenizer>, prompt: &[u32], limits: &Limits, written: &[u32]) -> Self {
        let stream = tokenizer.map(|t| t.stream_after(prompt, written));
        Output { stream, stops: StopMatcher::new(&limits.stop), text: String::new(), shown: 0 }
    }
    /// Adds a token. Returns the stop string that it completed, if any.
    fn push(&mut self, token: u32) -> Result<Option<String>, Error> {
        let Some(stream) = &mut self.stream else { return Ok(None) };
        let piece = stream.push(token)?;
        Ok(self.stops.push(&piece, &mut self.text))
    }
    /// Appends the text held back, unless a stop string ended the generation.
    fn finish(&mut self, finish: &Finish) -> Result<(), Error> {
        if !matches!(finish, Finish::Stop(_)) {
            if let Some(stream) = &mut self.stream {
                let rest = stream.finish()?;
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
