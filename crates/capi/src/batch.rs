//! Batches: the serving engine without HTTP. Many texts at a time, a prefix index that shares equal beginnings, and tiers below.
mod ffi;
mod job;
mod tiers;

use crate::drafts::{self, Drafts};
use crate::model::{Model, tokenizer};
use crate::session::TextConfig;
use crate::status::{Failure, Outcome, bad_file, kvist_status};
use job::Job;
use kvist_engine::frozen::{EnginePrefix, FrozenPrefix};
use kvist_engine::keep::KeepConfig;
use kvist_engine::kvist_device::{DeviceError, Recent};
use kvist_engine::kvist_model::{Error, Model as Weights};
use kvist_engine::kvist_scheduler::Retention;
use kvist_engine::memory::{CacheConfig, RECENT_SEQUENCES};
use kvist_engine::sampler::Sampler;
use kvist_engine::serving::{self, Engine, EngineConfig, EngineStats, Rejected, ResizeError, TierOptions};
use kvist_engine::speculate::step_draft_tokens;
use kvist_engine::text::Stops;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tiers::BatchTiers;
use tokio::runtime::Builder;

pub(crate) struct Batch {
    weights: Arc<Weights>,
    engine: Engine,
    /// `None` without tiers, and while the batch is being dropped.
    tiers: Option<BatchTiers>,
    has_index: bool,
    /// Texts may be longer than the cache.
    keeps_some: bool,
}

/// What an engine is made with, beside its configuration.
struct Beside {
    keep: Option<KeepConfig>,
    prefix: Option<Arc<FrozenPrefix>>,
    tiers: TierOptions,
    drafts: Option<Drafts>,
}

/// What a text asks of the batch, beside how it is generated.
struct Place {
    salt: Arc<str>,
    priority: i32,
    retain: Option<Retention>,
}

/// The largest capacity in tokens, as for `kvist serve`.
const MAX_CONTEXT: u32 = u32::MAX / 2;

fn stopped() -> Failure {
    Failure::new(
        kvist_status::KVIST_INTERNAL_ERROR,
        "the thread of the batch has stopped, by a defect of kvist: free the batch",
    )
}

/// Waits for a future of the engine, which may use timers.
fn block_on<T>(future: impl Future<Output = T>) -> Outcome<T> {
    let runtime = Builder::new_current_thread().enable_time().build();
    let runtime = runtime.map_err(|why| {
        Failure::new(kvist_status::KVIST_OUT_OF_MEMORY, format!("cannot wait for the batch: {why}"))
    })?;
    Ok(runtime.block_on(future))
}

fn check_capacity(name: &str, tokens: u32) -> Outcome<()> {
    match tokens {
        1..=MAX_CONTEXT => Ok(()),
        _ => Err(Failure::argument(format!("{name} is {tokens}: use 1 to {MAX_CONTEXT}"))),
    }
}

/// A cache that stores K and V as a file has them.
fn as_in_file(config: &mut CacheConfig, prefix: &FrozenPrefix) {
    let origin = &prefix.origin().cache;
    // Names that this kvist does not know are refused later, by the comparison with the file.
    config.k = origin.k.parse().unwrap_or(config.k);
    config.v = origin.v.parse().unwrap_or(config.v);
    // Storages without recent groups have 0 of them, and are compared as such.
    if origin.recent > 0 {
        config.recent = Recent { tokens: origin.recent, sequences: RECENT_SEQUENCES };
    }
}

impl Batch {
    fn start(model: &Model, mut config: EngineConfig, beside: Beside) -> Outcome<Self> {
        let Beside { keep, prefix, tiers, drafts } = beside;
        if keep.is_some() && (prefix.is_some() || tiers.is_on()) {
            return Err(Failure::argument(
                "keep: what it leaves of a text is in no index, prefix or tier: leave out keep, or prefix and the tiers",
            ));
        }
        if keep.is_some() && drafts.is_some() {
            return Err(Failure::argument(
                "speculate: drafts that are rejected would count in what keep keeps: leave one out",
            ));
        }
        check_capacity("context_tokens", config.paged.cache.context_tokens)?;
        config.scheduler.check().map_err(|why| Failure::argument(why.to_string()))?;
        if let Some(Drafts { options, .. }) = &drafts {
            options.check_cache(config.paged.cache.context_tokens).map_err(drafts::named)?;
            config.max_draft_tokens = step_draft_tokens(options.tokens, &config.scheduler);
        }
        config.fit();
        if let Some(keep) = keep {
            config.keep_only(keep);
        }
        tiers::check(&tiers)?;
        if let Some(prefix) = prefix {
            let origin = model.origin.of(&model.weights, &config.paged.block_aligned())?;
            config.prefix = Some(EnginePrefix { prefix, salt: "".into(), origin });
        }
        let tiers = tiers.is_on().then(|| BatchTiers::open(&tiers, model, &mut config)).transpose()?;
        if let Some(drafts) = drafts {
            let plan = config.paged.plan(model.weights.config(), &model.registry)?;
            let texts = config.scheduler.max_batch;
            let made = drafts.speculator(model, &config.paged.cache, texts, plan.session_bound())?;
            config.speculator = Some(made);
        }
        let has_index = config.paged.prefix.is_some();
        let engine = Engine::start(model.weights.clone(), &model.registry, config).map_err(bad_file)?;
        Ok(Batch { weights: model.weights.clone(), engine, tiers, has_index, keeps_some: keep.is_some() })
    }

    fn encode(&self, text: &str) -> Outcome<Vec<u32>> {
        Ok(tokenizer(&self.weights)?.encode(text, true)?)
    }

    /// Queues a text. Never blocks.
    fn submit(&self, tokens: &[u32], text: TextConfig, place: Place) -> Outcome<Job> {
        let vocab = self.weights.config().vocab;
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt.into());
        }
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(Error::TokenOutsideVocabulary { token, vocab }.into());
        }
        Sampler::new(text.sampler)?; // refuses bad parameters
        if place.retain.is_some() && !self.has_index {
            return Err(Failure::argument(
                "retain_s: prompts are retained in the prefix index: leave out no_prefix_index and keep",
            ));
        }
        let n_prompt = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let max_new = match text.max_tokens {
            0 => self.longest().saturating_sub(n_prompt).max(1),
            most => most,
        };
        let job = serving::Job {
            sampling: text.sampler,
            stop: Arc::new(Stops::new(&text.stop)),
            ignore_eos: text.ignore_end,
            priority: place.priority,
            salt: place.salt,
            retain: place.retain,
            ..serving::Job::new(tokens, max_new)
        };
        let handle = self.engine.submit(job).map_err(|why| match why {
            Rejected::Full { .. } => Failure::new(kvist_status::KVIST_BUSY, why.to_string()),
            // A batch that can be used does not drain.
            Rejected::Draining => stopped(),
        })?;
        Ok(Job::new(handle, n_prompt, text.max_tokens))
    }

    /// Tokens of the longest text, prompt and answer together: the last one that is drawn needs no cell.
    fn longest(&self) -> u32 {
        let capacity = u32::try_from(self.engine.capacity_tokens()).unwrap_or(u32::MAX);
        let most = if self.keeps_some { self.weights.config().context } else { capacity };
        most.saturating_add(1)
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    /// Returns the blocks that left the cache, and how many tiers have not got their note.
    fn forget(&self, salt: &str) -> Outcome<(usize, usize)> {
        let forgotten = block_on(self.engine.forget(salt))?.ok_or_else(stopped)?;
        Ok((forgotten.blocks, forgotten.untold.len()))
    }

    /// Returns the new capacity in tokens.
    fn resize(&self, tokens: u32, patience: Duration) -> Outcome<u64> {
        check_capacity("tokens", tokens)?;
        let before = self.engine.capacity_tokens();
        block_on(self.engine.resize(tokens, patience))?.map_err(|why| {
            let status = match &why {
                ResizeError::Ended => return stopped(),
                ResizeError::Refused(_) | ResizeError::Prefix { .. } => kvist_status::KVIST_REFUSED,
                ResizeError::Device(DeviceError::OutOfBudget(_) | DeviceError::OutOfMemory { .. }) => {
                    kvist_status::KVIST_OUT_OF_MEMORY
                }
                ResizeError::Device(_) => kvist_status::KVIST_UNSUPPORTED,
            };
            Failure::new(status, format!("the cache keeps its {before} tokens: {why}"))
        })
    }
}

impl Drop for Batch {
    /// Cancels what runs, ends the thread, and writes what is on its way to the tiers.
    fn drop(&mut self) {
        self.engine.drain();
        self.engine.cancel_all();
        if let Some(tiers) = &self.tiers {
            tiers.flush(&self.engine);
        }
        self.engine.stop();
        // Jobs have the engine too, so it does not end by itself.
        serving::ready_within(Duration::MAX, self.engine.until_ended());
        if let Some(tiers) = self.tiers.take() {
            tiers.close();
        }
    }
}
