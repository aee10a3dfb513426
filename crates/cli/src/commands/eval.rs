//! `kvist eval`: measures the quality loss of a cache: the same text through the cache under test and through a
//! reference cache, token by token. With `--speculate`, how often drafts are accepted.
mod acceptance;
mod tree;

use crate::continuations::PartsArgs;
use crate::options::*;
use crate::{interrupt, json, output, progress, scoring};
use clap::ValueHint;
use kvist_device::{Bytes, Registry, Storage};
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_model::config::ModelConfig;
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Args)]
#[command(mut_arg("speculate", |arg| arg.help("Measure drafters instead: how many draft tokens are accepted, by depth")))]
#[command(mut_arg("prompts", |arg| arg.default_value("16").help("With --speculate: how many prompts").requires("speculate")))]
#[command(mut_arg("prompt_tokens", |arg| arg.requires("speculate")), mut_arg("tokens", |arg| arg.requires("speculate")))]
pub struct Args {
    /// The text, UTF-8; a NUL byte ends a document
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    text: PathBuf,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    keep: KeepArgs,
    /// Storage of K and V in the reference cache [default: f32]
    #[arg(long, value_name = "DTYPE")]
    reference: Option<Storage>,
    #[command(flatten)]
    speculation: SpeculationArgs,
    #[command(flatten)]
    parts: PartsArgs,
    /// With --speculate: draw the verified draft whose accepted path is longest
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    plot: Option<PathBuf>,
    /// Score, or take prompts from, at most this many tokens; 0 takes all
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    limit: usize,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// `kvist eval --json`
#[derive(Serialize)]
struct Report {
    version: u32,
    model: String,
    text: PathBuf,
    cache: json::CacheShape,
    reference: json::CacheShape,
    kv_bytes_per_token: u64,
    tokens: usize,
    perplexity: f64,
    perplexity_reference: f64,
    kl_mean: f64,
    kl_p99: f64,
    kl_max: f64,
    top1_agreement: f64,
    /// True if the text was not scored to its end.
    interrupted: bool,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    if args.speculation.is_on() {
        if let Some(keep) = args.keep.keep {
            return Err(wrong_usage(format!("--speculate and --keep {keep}: leave one out")));
        }
        return match args.reference {
            None => acceptance::run(&args, quiet),
            Some(_) => Err(wrong_usage("--speculate compares with no cache: leave --reference out")),
        };
    }
    if args.plot.is_some() {
        return Err(wrong_usage("--plot draws a draft: give --speculate"));
    }
    let text = read_text(&args.text)?;
    let opened = args.model.open(quiet)?;
    let mut tokens = scoring::tokens(&opened, &text)?;
    let architecture = opened.config();
    let context = args.cache.context.unwrap_or(architecture.context);
    let mut cache = args.cache.for_all_rows();
    cache.context = Some(context);
    let mut config = cache.config(architecture, u64::from(context))?;
    args.keep.prepare(&mut config, args.cache.kind.as_deref())?;
    config.max_rows = config.max_step_tokens;
    let reference = scoring::reference(&config, args.reference.unwrap_or(Storage::F32));
    if args.limit > 0 {
        tokens.truncate(args.limit + 1);
    }
    if tokens.len() < 2 || context < 2 {
        return Err(wrong_usage("at least two tokens are needed, in the text and in --context"));
    }
    let registry = registry(&args.model.compute.get()?);
    let budget = args.model.budget()?;
    let free = MemoryPlan::free_after(&opened, &registry, args.model.weights, &budget)?;
    let plan = fit(architecture, &registry, &config, &reference, free, budget.total())?;
    let model = args.model.load(opened, Some(context), &budget, quiet)?;
    interrupt::listen();
    let bar = progress::bar("scoring", tokens.len() as u64, quiet);
    let (d, stopped) = scoring::score(&model, &registry, &config, &reference, &tokens, &bar)?;
    bar.finish_and_clear();
    let report = Report {
        version: json::VERSION,
        model: model.name().to_string(),
        text: args.text.clone(),
        cache: json::CacheShape::new(&config, model.config()),
        reference: json::CacheShape::new(&reference, model.config()),
        kv_bytes_per_token: plan.kv_bytes_per_token,
        tokens: d.tokens,
        perplexity: d.perplexity,
        perplexity_reference: d.perplexity_reference,
        kl_mean: d.kl_mean,
        kl_p99: d.kl_p99,
        kl_max: d.kl_max,
        top1_agreement: d.top1_agreement,
        interrupted: stopped,
    };
    if args.json { output::show_json(&report) } else { output::show(&report.text()) }
}

/// The plan of the cache under test, if both caches fit into `free` together; otherwise an error with a suggestion that
/// fits.
fn fit(
    model: &ModelConfig,
    registry: &Registry,
    config: &CacheConfig,
    reference: &CacheConfig,
    free: u64,
    total: u64,
) -> anyhow::Result<MemoryPlan> {
    let bounds = |context: u32, chunk: u32, storage: Storage| -> anyhow::Result<(MemoryPlan, u64, u64)> {
        let max_step_tokens = chunk.min(context);
        let shape = |base: &CacheConfig| CacheConfig {
            context_tokens: context,
            max_step_tokens,
            max_rows: max_step_tokens,
            ..base.clone()
        };
        let plan = MemoryPlan::of_session(model, registry, &shape(config))?;
        let reference = CacheConfig { k: storage, v: storage.for_values(), ..shape(reference) };
        let reference_plan = MemoryPlan::of_session(model, registry, &reference)?;
        let (a, b) = (plan.session_bound(), reference_plan.session_bound());
        Ok((plan, a, b))
    };
    let (context, chunk) = (config.context_tokens, config.max_step_tokens);
    let (plan, a, b) = bounds(context, chunk, reference.k)?;
    if a.checked_add(b).is_some_and(|sum| sum <= free) {
        return Ok(plan);
    }
    // Try smaller steps first (no change in the result), then a smaller reference (little change), then a shorter
    // context.
    let fits = |context, chunk, storage| {
        bounds(context, chunk, storage).is_ok_and(|(_, a, b)| a.checked_add(b).is_some_and(|sum| sum <= free))
    };
    let chunks = [chunk, 256, 64, 16].map(|n| n.min(chunk));
    let halves = (0..32).map(|n| context >> n).take_while(|context| *context >= 2);
    let mut choices = halves.flat_map(|context| {
        let storages = [reference.k, Storage::F16];
        storages.into_iter().flat_map(move |storage| chunks.map(|chunk| (context, chunk, storage)))
    });
    let advice = choices.find(|(context, chunk, storage)| fits(*context, *chunk, *storage));
    let advice = advice.map(|(c, n, s)| {
        let parts = [
            (c < context).then(|| format!("--context {c}")),
            (n < chunk).then(|| format!("--chunk {n}")),
            (s != reference.k).then(|| format!("--reference {s}")),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
    });
    anyhow::bail!(
        "the cache under test needs {} and the reference {} (working memory included); {} of {} are free; try {}",
        Bytes(a),
        Bytes(b),
        Bytes(free),
        Bytes(total),
        advice.unwrap_or_else(|| "a smaller model, or more memory with --memory".into())
    )
}

impl Report {
    fn text(&self) -> String {
        let c = &self.cache;
        format!(
            "{} tokens in windows of {}{}\n\
             cache            {}:{}, K {}, V {}, {} per token{}\n\
             perplexity       {:.4} (reference K {} V {}: {:.4})\n\
             KL divergence    mean {:.3e}, p99 {:.3e}, max {:.3e} nats\n\
             top-1 agreement  {:.3} %\n",
            self.tokens,
            c.context_tokens,
            if self.interrupted { " (interrupted)" } else { "" },
            c.backend,
            c.kind,
            c.k,
            c.v,
            Bytes(self.kv_bytes_per_token),
            c.keep.as_ref().map_or(String::new(), |keep| format!(", keeps {keep}")),
            self.perplexity,
            self.reference.k,
            self.reference.v,
            self.perplexity_reference,
            self.kl_mean,
            self.kl_p99,
            self.kl_max,
            100.0 * self.top1_agreement,
        )
    }
}
