//! `--measure`: the loss of each pair of dtypes on this model, measured as `kvist eval` does.
use super::Args;
use super::ladder::Rung;
use crate::options::{ModelArgs, read_text, registry, wrong_usage};
use crate::{interrupt, memory, progress, scoring};
use anyhow::Context;
use kvist_device::{Bytes, MemoryBudget, Registry, Storage};
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_model::Opened;
use kvist_model::weights::WeightFormat;

/// Held-out text of the embedded model, the default of --text.
const TEXT: &str = include_str!("../../../../../tools/tiny-model/val.txt");

pub struct Measured {
    /// Scored tokens, and the size of a window.
    pub tokens: usize,
    pub window_tokens: u32,
    pub weights: WeightFormat,
    /// Mean KL of the rungs that fit into memory together with a cache in f32.
    kl: Vec<(Rung, f64)>,
}

impl Measured {
    pub fn kl_of(&self, rung: &Rung) -> Option<f64> {
        let same = |(known, _): &&(Rung, f64)| (known.k, known.v) == (rung.k, rung.v);
        self.kl.iter().find(same).map(|(_, kl)| *kl)
    }
}

/// Measures in the memory of this machine, whatever the plan is for. Each rung uses a cache of the simplest kind: the
/// kind does not change logits.
pub fn measure(
    args: &Args,
    scored: u32,
    cache: &CacheConfig,
    ladder: &[Rung],
    quiet: bool,
) -> anyhow::Result<Measured> {
    let text = args.text.as_deref().map_or_else(|| Ok(TEXT.into()), read_text)?;
    let mut model = ModelArgs {
        source: args.source.clone(),
        weights: args.weights,
        no_mmap: false,
        memory: None,
        guess_pretokenizer: false,
        chat_template_kwargs: None,
        compute: args.compute.clone(),
    };
    let opened = model.open(quiet).context("--measure runs the model, and needs its weights")?;
    let mut tokens = scoring::tokens(&opened, &text).context("--measure")?;
    // The last token of a window is not scored, because nothing follows it.
    tokens.truncate((scored as usize).saturating_add(1));
    if tokens.len() < 2 {
        return Err(wrong_usage("--text: at least two tokens are needed"));
    }
    let window_tokens = (tokens.len() as u32).min(opened.config().context);
    let under_test = |rung: &Rung| CacheConfig { k: rung.k, v: rung.v, ..in_windows(cache, window_tokens) };
    let reference = scoring::reference(&in_windows(cache, window_tokens), Storage::F32);

    let registry = registry(&args.compute.get()?);
    let budget = memory::available().map_or_else(MemoryBudget::unlimited, MemoryBudget::new);
    let bytes = |config: &CacheConfig| {
        MemoryPlan::of_session(opened.config(), &registry, config)
            .map_or(u64::MAX, |plan| plan.session_bound())
    };
    let both_caches = |rung: &Rung| bytes(&under_test(rung)).saturating_add(bytes(&reference));
    let needed: Vec<u64> = ladder.iter().map(both_caches).collect();
    let min = needed.iter().copied().min().unwrap_or(0);
    let (format, free) =
        choose_format(&opened, &registry, args.weights, needed.iter().copied().max().unwrap_or(0), &budget)?;
    anyhow::ensure!(
        min <= free,
        "--measure: two caches of {window_tokens} tokens need {} (working memory included), {} are free besides the \
         weights; try --measure with fewer tokens, or a smaller --chunk",
        Bytes(min),
        Bytes(free)
    );
    model.weights = format;
    let model = model.load(opened, Some(window_tokens), &budget, quiet)?;
    interrupt::listen();
    let n_measured = needed.iter().filter(|bytes| **bytes <= free).count();
    let bar = progress::bar("measuring", (n_measured * tokens.len()) as u64, quiet);
    let mut measured = Measured { tokens: 0, window_tokens, weights: format, kl: Vec::new() };
    for (rung, _) in ladder.iter().zip(&needed).filter(|(_, needed)| **needed <= free) {
        let (summary, interrupted) =
            scoring::score(&model, &registry, &under_test(rung), &reference, &tokens, &bar)?;
        anyhow::ensure!(!interrupted, "--measure was interrupted");
        measured.tokens = summary.tokens;
        measured.kl.push((*rung, summary.kl_mean));
    }
    bar.finish_and_clear();
    Ok(measured)
}

/// The format of the weights in memory, and the memory that is free besides them. It is f32 if that fits together with
/// the caches, otherwise the requested format: products with packed weights round their input, and that noise would
/// hide the loss of f16 and q8.
fn choose_format(
    opened: &Opened,
    registry: &Registry,
    asked: WeightFormat,
    caches: u64,
    budget: &MemoryBudget,
) -> anyhow::Result<(WeightFormat, u64)> {
    match MemoryPlan::free_after(opened, registry, WeightFormat::F32, budget) {
        Ok(free) if free >= caches => Ok((WeightFormat::F32, free)),
        _ => Ok((
            asked,
            MemoryPlan::free_after(opened, registry, asked, budget).context("--measure runs the model")?,
        )),
    }
}

/// A cache for windows of the text, with logits for every token.
fn in_windows(cache: &CacheConfig, window_tokens: u32) -> CacheConfig {
    let step = cache.max_step_tokens.min(window_tokens);
    CacheConfig {
        kind: "contiguous".into(),
        context_tokens: window_tokens,
        max_step_tokens: step,
        max_rows: step,
        ..cache.clone()
    }
}
