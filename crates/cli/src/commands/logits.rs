//! `kvist logits`: numbers to compare with other runtimes. Needs no tokenizer.
use crate::options::*;
use crate::{interrupt, json, output, progress};
use clap::ValueHint;
use kvist_cache::SeqId;
use kvist_engine::generate::{Limits, generate};
use kvist_engine::model::top_two;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::session::{Feed, ModelSession, Want};
use safetensors::tensor::{Dtype, TensorView};
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// Token ids: 1,2,3
    #[arg(long, required_unless_present = "tokens_file", value_parser = parse_tokens)]
    tokens: Option<std::vec::Vec<u32>>,
    /// Read the ids from a file, separated by commas or white space
    #[arg(long, conflicts_with = "tokens", value_hint = ValueHint::FilePath)]
    tokens_file: Option<PathBuf>,
    /// Write the logits of every token to this safetensors file: `logits`, [n_tokens, vocab] f32
    #[arg(long, required_unless_present = "generate", value_hint = ValueHint::FilePath)]
    out: Option<PathBuf>,
    /// Continue greedily by this many tokens through the cache
    #[arg(long, value_name = "TOKENS")]
    generate: Option<u32>,
    /// Recompute the whole text for every token instead of reading the cache
    #[arg(long)]
    no_cache: bool,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
}

/// `kvist logits --json`
#[derive(Serialize)]
struct Report {
    version: u32,
    tokens: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generated: Option<Vec<u32>>,
    /// The likeliest next token after each input token, and its lead over the second.
    #[serde(skip_serializing_if = "Option::is_none")]
    likeliest: Option<Vec<(u32, f32)>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    out: Option<PathBuf>,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let tokens = args.tokens()?;
    interrupt::listen();
    let model = args.model.load(quiet)?;
    let registry = registry(model.decoder().compute());
    let needed = tokens.len() as u64 + u64::from(args.generate.unwrap_or(0));
    let mut config = args.cache.config(model.decoder().config(), needed)?;
    config.max_rows = config.max_step_tokens;
    kvist_engine::check_prompt(&config, tokens.len())?;
    let mut session = ModelSession::new(&model, &registry, &config)?;
    let mut report =
        Report { version: json::VERSION, tokens, generated: None, likeliest: None, out: args.out.clone() };

    if let Some(path) = &args.out {
        let vocab = model.decoder().config().vocab;
        let mut logits: Vec<u8> = Vec::new();
        let mut likeliest = Vec::new();
        let bar = progress::bar("reading", report.tokens.len() as u64, quiet);
        for chunk in report.tokens.chunks(config.max_step_tokens as usize) {
            session.forward(&[Feed::chain(SeqId::ONLY, chunk)], Want::All)?;
            logits.extend(session.logits().iter().flat_map(|x| x.to_le_bytes()));
            likeliest.extend(session.logits().chunks(vocab).filter_map(top_two));
            bar.inc(chunk.len() as u64);
            if interrupt::interrupted() {
                anyhow::bail!("interrupted; {} was not written", path.display());
            }
        }
        bar.finish_and_clear();
        let view = TensorView::new(Dtype::F32, vec![report.tokens.len(), vocab], &logits)?;
        let file = safetensors::serialize([("logits", view)], None)?;
        output::write_file(path, &file)?;
        report.likeliest = Some(likeliest);
        session.clear()?;
    }
    if let Some(max_tokens) = args.generate {
        let mut greedy = Sampler::new(SamplerConfig::greedy())?;
        let limits = Limits {
            max_tokens: max_tokens as usize,
            stop: Vec::new(),
            ignore_eos: true,
            no_cache: args.no_cache,
        };
        let out = generate(
            &mut session,
            SeqId::ONLY,
            &report.tokens,
            None,
            &mut greedy,
            &limits,
            &mut UntilInterrupted,
        )?;
        report.generated = Some(out.tokens);
    }
    if args.json {
        return output::show_json(&report);
    }
    if let Some(generated) = &report.generated {
        let ids: Vec<String> = generated.iter().map(u32::to_string).collect();
        output::show(&(ids.join(",") + "\n"))?;
    }
    if let (Some(path), false) = (&args.out, quiet) {
        output::note(&format!("wrote the logits of {} tokens to {}", report.tokens.len(), path.display()));
    }
    Ok(())
}

struct UntilInterrupted;
impl kvist_engine::generate::Observer for UntilInterrupted {
    fn prefilled(&mut self, _: usize) -> bool {
        !interrupt::interrupted()
    }
    fn sampled(&mut self) -> bool {
        !interrupt::interrupted()
    }
}

impl Args {
    fn tokens(&self) -> anyhow::Result<Vec<u32>> {
        let tokens = match (&self.tokens, &self.tokens_file) {
            (Some(tokens), _) => tokens.clone(),
            (None, Some(path)) => {
                let text = read_text(path)?;
                let ids: Vec<&str> =
                    text.split(|c: char| c == ',' || c.is_whitespace()).filter(|t| !t.is_empty()).collect();
                parse_tokens(&ids.join(",")).map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))?
            }
            (None, None) => Vec::new(),
        };
        if tokens.is_empty() { Err(wrong_usage("no tokens: give --tokens 1,2,3")) } else { Ok(tokens) }
    }
}
