//! `kvist eval`: what a cache costs in quality, as numbers: the same text through the cache under test and through
//! a reference cache, token by token.
use crate::options::*;
use crate::{interrupt, json, output, progress};
use anyhow::Context;
use clap::ValueHint;
use kvist_backend::Storage;
use kvist_engine::divergence::Divergence;
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{Feed, ModelSession, Want};
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The text, UTF-8; a NUL byte ends a document
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    text: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// Storage of K and V in the reference cache
    #[arg(long, default_value = "f32", value_name = "DTYPE")]
    reference: Storage,
    /// Score at most this many tokens; 0 scores all
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    limit: usize,
    /// One JSON document
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
    /// The text was not scored to its end.
    interrupted: bool,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let text = read_text(&args.text)?;
    interrupt::listen();
    let model = args.model.load(quiet)?;
    let tokenizer = model.tokenizer().context("this model has no tokenizer (tokenizer.json beside it)")?;
    let mut tokens = Vec::new();
    for document in text.split('\0').filter(|d| !d.is_empty()) {
        tokens.extend(tokenizer.encode(document, true)?);
        tokens.extend(tokenizer.eos());
    }
    let architecture = model.decoder().config();
    let context = args.cache.context.unwrap_or(architecture.context);
    let mut cache = args.cache.clone();
    cache.context = Some(context);
    let mut config = cache.config(architecture, u64::from(context))?;
    config.max_rows = config.max_step_tokens;
    // The reference sees everything the model lets it see.
    let reference = CacheConfig {
        kind: "contiguous".into(),
        k: args.reference,
        v: args.reference,
        window: None,
        sinks: 0,
        ..config.clone()
    };
    if args.limit > 0 {
        tokens.truncate(args.limit + 1);
    }
    if tokens.len() < 2 || context < 2 {
        return Err(wrong_usage("there must be two tokens at least, in the text and in --context"));
    }
    let registry = registry(model.decoder().compute());
    let mut under_test = ModelSession::new(&model, &registry, &config)?;
    let mut expected = ModelSession::new(&model, &registry, &reference)?;
    let mut divergence = Divergence::default();
    let bar = progress::bar("scoring", tokens.len() as u64, quiet);
    let mut stopped = false;
    for window in tokens.chunks(context as usize).filter(|w| w.len() > 1) {
        under_test.clear()?;
        expected.clear()?;
        let mut at = 0;
        for chunk in window.chunks(config.max_step_tokens as usize) {
            under_test.forward(&[Feed::chain(kvist_cache::SeqId::ONLY, chunk)], Want::All)?;
            expected.forward(&[Feed::chain(kvist_cache::SeqId::ONLY, chunk)], Want::All)?;
            for row in 0..chunk.len() {
                if let Some(next) = window.get(at + row + 1) {
                    divergence.add(expected.logits_row(row), under_test.logits_row(row), *next)?;
                }
            }
            at += chunk.len();
            bar.inc(chunk.len() as u64);
        }
        if interrupt::interrupted() {
            stopped = true;
            break;
        }
    }
    bar.finish_and_clear();
    let d = divergence.summary().context("nothing was scored")?;
    let plan = kvist_engine::memory::MemoryPlan::of_session(architecture, &registry, &config)?;
    let report = Report {
        version: json::VERSION,
        model: model.name().to_string(),
        text: args.text.clone(),
        cache: (&config).into(),
        reference: (&reference).into(),
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

impl Report {
    fn text(&self) -> String {
        let c = &self.cache;
        format!(
            "{} tokens in windows of {}{}\n\
             cache            {}:{}, K {}, V {}, {} per token\n\
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
            bytes(self.kv_bytes_per_token),
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
