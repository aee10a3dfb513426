//! Continuations of the parts of a text, pass by pass: `bench speculate` times them, and `eval --speculate` counts what drafts
//! achieve.
use crate::options::wrong_usage;
use kvist_cache::SeqId;
use kvist_device::RowResult;
use kvist_engine::Error;
use kvist_engine::executor::SampledToken;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::session::ModelSession;
use kvist_engine::speculate::*;
use std::time::{Duration, Instant};

/// Which parts of a text are continued.
#[derive(clap::Args, Clone, Debug)]
pub struct PartsArgs {
    /// Tokens of each prompt, from evenly spaced places of the text
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub prompt_tokens: u32,
    /// Tokens that follow each prompt
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..=65536))]
    pub tokens: u32,
    /// Prompts of a run
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub prompts: u32,
}

/// A prompt and what follows it.
pub struct Part {
    pub prompt: Vec<u32>,
    pub text: Vec<u32>,
}

impl PartsArgs {
    /// Tokens of a cache for one part at a time and its drafts.
    pub fn context(&self, draft_tokens: u32) -> u32 {
        self.prompt_tokens + self.tokens + draft_tokens + 1
    }

    /// Prompts from evenly spaced places of the text, and what follows them there.
    pub fn cut(&self, tokens: &[u32]) -> anyhow::Result<Vec<Part>> {
        let (prompt, whole) = (self.prompt_tokens as usize, (self.prompt_tokens + self.tokens) as usize);
        if tokens.len() < whole {
            return Err(wrong_usage(format!(
                "the text has {} tokens; --prompt-tokens and --tokens need {whole}: give a longer --text",
                tokens.len()
            )));
        }
        let last = tokens.len() - whole;
        let part = |i: u32| {
            let at = last * i as usize / self.prompts.max(2).saturating_sub(1) as usize;
            let (prompt, text) = tokens[at.min(last)..at.min(last) + whole].split_at(prompt);
            Part { prompt: prompt.into(), text: text.into() }
        };
        Ok((0..self.prompts).map(part).collect())
    }
}

/// How far a part is continued.
pub struct Continuation<'e> {
    /// Most tokens.
    pub tokens: usize,
    /// Decode the text itself instead of what the model would write.
    pub follow: bool,
    /// Tokens that end a continuation.
    pub ends: &'e [u32],
}

impl Continuation<'_> {
    /// Decodes what follows a prompt, greedily. `watch` sees prompt and continuation before every pass, and the pass; it returns
    /// false to stop. Gives the continuation and the time that it took; the prompt is part of neither.
    pub fn decode(
        &self,
        session: &mut ModelSession,
        mut speculator: Option<&mut Speculator>,
        (id, part): (u64, &Part),
        watch: &mut dyn FnMut(&[u32], &DraftedPass) -> bool,
    ) -> anyhow::Result<(Vec<u32>, Duration)> {
        session.clear()?;
        session.set_taps(speculator.as_ref().map_or(&[], |speculator| speculator.taps()))?;
        session.prefill_watched(SeqId::ONLY, &part.prompt, &mut |session, computed| {
            if let Some(speculator) = &mut speculator {
                let text = (id, computed.start as u32, &part.prompt[..]);
                session.report_features(text, 0..computed.len(), speculator)?;
            }
            Ok(true)
        })?;
        let mut sampler = Sampler::new(SamplerConfig::greedy())?;
        let n = self.tokens;
        let mut known = part.prompt.clone();
        let first = if self.follow { part.text[0] } else { sampler.sample(session.logits_row(0))? };
        known.push(first);
        let mut ended = self.ends.contains(&first);
        let started = Instant::now();
        while !ended {
            let done = known.len() - part.prompt.len();
            let mut drawn = done;
            let mut choose = |row: RowResult<'_>| {
                let sampled = sampler.take(row)?;
                let token = if self.follow { part.text[drawn] } else { sampled };
                drawn += 1;
                Ok::<_, Error>(SampledToken { token, finished: drawn == n || self.ends.contains(&token) })
            };
            let mut pass = match &mut speculator {
                Some(speculator) => {
                    let text = DraftContext { id, salt: "", tokens: &known, max_new: (n - done) as u32 };
                    DraftedPass::propose(session, speculator, text)?
                }
                None => DraftedPass::without_draft(&known)?,
            };
            pass.run(session, SeqId::ONLY, &mut choose)?;
            ended = !watch(&known, &pass) || pass.verified.finished;
            known.extend(&pass.verified.tokens);
            if let Some(speculator) = &mut speculator {
                pass.settle(session, speculator, &known);
                if let Some(failure) = &speculator.counts().failure {
                    anyhow::bail!("a drafter failed: {failure}");
                }
            }
        }
        let elapsed = started.elapsed();
        if let Some(speculator) = &mut speculator {
            speculator.forget(id);
        }
        Ok((known.split_off(part.prompt.len()), elapsed))
    }
}
