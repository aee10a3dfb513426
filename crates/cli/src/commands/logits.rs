//! `kvist logits`: numbers to compare with other runtimes. Needs no tokenizer.
use crate::options::*;
use crate::{interrupt, json, output, progress};
use anyhow::Context;
use clap::ValueHint;
use kvist_cache::SeqId;
use kvist_engine::generate::{GenerateArgs, GenerationEnd, Limits, Speculation, generate};
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_engine::speculate::Counts;
use kvist_model::top_two;
use serde::Serialize;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    keep: KeepArgs,
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
    #[command(flatten)]
    speculation: SpeculationArgs,
    /// With --generate: recompute the whole text for every token instead of reading the cache
    #[arg(long, conflicts_with = "keep", requires = "generate")]
    no_cache: bool,
    /// Print one JSON document on stdout
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
    /// Why generation ended: anything but `max_tokens` means that some tokens are missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    finish: Option<&'static str>,
    /// What `--speculate` achieved.
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<Counts>,
    /// The likeliest next token after each input token, and its lead over the second.
    #[serde(skip_serializing_if = "Option::is_none")]
    likeliest: Option<Vec<(u32, f32)>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    out: Option<PathBuf>,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let tokens = args.tokens()?;
    let opened = args.model.open_without_texts(quiet)?;
    args.speculation.check_no_cache(args.no_cache)?;
    if args.speculation.is_on() && args.generate.is_none() {
        return Err(wrong_usage("--speculate drafts tokens that are generated: give --generate"));
    }
    let needed = tokens.len() as u64 + u64::from(args.generate.unwrap_or(0)) + args.speculation.room();
    let mut config = args.cache.for_all_rows().config(opened.config(), needed)?;
    args.keep.prepare(&mut config, args.cache.kind.as_deref())?;
    args.speculation.prepare(&mut config, args.cache.kind.as_deref(), args.cache.context)?;
    config.max_rows = config.max_step_tokens;
    kvist_engine::check_prompt(&config, tokens.len())?;
    // Open the file first, so that an error comes before hours of work.
    let file = args.out.as_deref().map(output::FileInParts::create).transpose()?;
    let draft = args.speculation.open_draft(&opened, &args.model, quiet)?;
    let (model, _, draft) =
        args.speculation.load(&args.model, opened, draft, &config, tokens.len(), quiet)?;
    let mut speculator = args.speculation.speculator(draft.as_ref(), &model, &config, 1)?;
    interrupt::listen();
    let mut session = ModelSession::new(&model, &registry(&args.model.compute.get()?), &config)?;
    let mut report = Report {
        version: json::VERSION,
        tokens,
        generated: None,
        finish: None,
        speculation: None,
        likeliest: None,
        out: args.out.clone(),
    };
    let mut cut_short = None;

    if let (Some(path), Some(mut file)) = (&args.out, file) {
        report.likeliest = Some(write_logits(&mut session, &report.tokens, path, &mut file, quiet)?);
        file.finish()?;
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
        let what = GenerateArgs {
            session: &mut session,
            seq: SeqId::ONLY,
            before: &[],
            prompt: &report.tokens,
            tokenizer: None,
            sampler: &mut greedy,
            limits: &limits,
            speculation: speculator.as_mut().map(|speculator| Speculation { speculator }),
        };
        let out = generate(what, &mut UntilInterrupted)?;
        if out.tokens.len() < limits.max_tokens {
            let why =
                if out.finish == GenerationEnd::CacheFull { "the cache is full" } else { "interrupted" };
            cut_short = Some(format!("{} of {max_tokens} tokens were generated: {why}", out.tokens.len()));
        }
        report.finish = Some(out.finish.name());
        report.generated = Some(out.tokens);
        report.speculation = speculator.map(|speculator| speculator.counts().clone());
    }
    if args.json {
        output::show_json(&report)?;
    } else if let Some(generated) = &report.generated {
        let ids: Vec<String> = generated.iter().map(u32::to_string).collect();
        output::show(&(ids.join(",") + "\n"))?;
    }
    if let (Some(path), false) = (&args.out, quiet || args.json) {
        output::note(&format!("wrote the logits of {} tokens to {}", report.tokens.len(), path.display()));
    }
    // Fail if the output is incomplete: a comparison must not use a part as the whole.
    cut_short.map_or(Ok(()), |what| Err(anyhow::anyhow!(what)))
}

/// Writes the logits after every token to `file`. Returns the likeliest next tokens, each with its lead.
fn write_logits(
    session: &mut ModelSession,
    tokens: &[u32],
    path: &Path,
    file: &mut output::FileInParts,
    quiet: bool,
) -> anyhow::Result<Vec<(u32, f32)>> {
    let vocab = session.model().config().vocab;
    file.write(&header(tokens.len(), vocab)?)?;
    let mut likeliest = Vec::new();
    let bar = progress::bar("reading", tokens.len() as u64, quiet);
    for chunk in tokens.chunks(session.config().max_step_tokens as usize) {
        session.forward(&[SequenceInput::chain(SeqId::ONLY, chunk)], LogitRows::All)?;
        // Written row by row: all rows together can be larger than the model.
        for x in session.logits() {
            file.write(&x.to_le_bytes())?;
        }
        likeliest.extend(session.logits().chunks(vocab).filter_map(top_two));
        bar.inc(chunk.len() as u64);
        if interrupt::interrupted() {
            anyhow::bail!("interrupted; {} was not written", path.display());
        }
    }
    bar.finish_and_clear();
    Ok(likeliest)
}

/// The beginning of a safetensors file with one tensor.
fn header(tokens: usize, vocab: usize) -> anyhow::Result<Vec<u8>> {
    let bytes =
        tokens.checked_mul(vocab).and_then(|n| n.checked_mul(4)).context("that many logits overflow")?;
    let tensor = serde_json::json!({ "dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, bytes] });
    let mut text = serde_json::json!({ "logits": tensor }).to_string();
    text += &" ".repeat(text.len().next_multiple_of(8) - text.len());
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text.bytes());
    Ok(header)
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
