//! `kvist bench speculate`: measures how much each drafter gains, in turns with plain decoding.
use super::machine::{Machine, Spread, Watch};
use super::measure::{KvArgs, RunsArgs};
use crate::continuations::*;
use crate::options::*;
use crate::{interrupt, json, output};
use anyhow::Context;
use clap::ValueHint;
use kvist_engine::Error;
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::ModelSession;
use kvist_engine::speculate::*;
use kvist_model::Model;
use kvist_simulator::statistics::percentile;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[derive(clap::Args)]
#[command(mut_arg("runs", |runs| runs.default_value("10")), mut_arg("speculate", |arg| arg.hide(true)))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    kv: KvArgs,
    #[command(flatten)]
    measure: RunsArgs,
    #[command(flatten)]
    speculation: SpeculationArgs,
    /// What to compare with plain decoding: auto, ngram, suffix, draft, eagle, and oracle=P, which knows the text and
    /// is right with probability P at each node, in chains with --draft-width 1
    #[arg(long, value_name = "HOW,HOW,…", default_value = "ngram,suffix,auto", value_delimiter = ',', value_parser = parse_how)]
    modes: Vec<How>,
    /// The text whose parts are continued, as UTF-8
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    text: PathBuf,
    /// Decode the text itself instead of what the model would write: for texts that the model cannot write
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    parts: PartsArgs,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Drafter(Mode),
    Oracle(f32),
}

fn parse_how(text: &str) -> Result<How, String> {
    if let Some(share) = text.strip_prefix("oracle=") {
        let right = share.parse().ok().filter(|share| (0.0..=1.0).contains(share));
        return right
            .map(How::Oracle)
            .ok_or_else(|| format!("`{text}`: give a probability, as in oracle=0.7"));
    }
    match <Mode as clap::ValueEnum>::from_str(text, false) {
        Ok(Mode::Off) => Err("off is always measured".into()),
        Ok(mode) => Ok(How::Drafter(mode)),
        Err(_) => Err(format!("`{text}` is no drafter: auto, ngram, suffix, draft, eagle or oracle=P")),
    }
}

#[derive(Serialize)]
struct Row {
    version: u32,
    what: &'static str,
    model: String,
    how: String,
    /// Whether the text was decoded, or what the model writes.
    follow: bool,
    prompts: u32,
    prompt_tokens: u32,
    tokens: u32,
    tokens_per_s: f64,
    tokens_per_pass: f64,
    #[serde(flatten)]
    spread: Spread,
    speculation: Counts,
    /// Time of plain decoding over this time, run by run: median, least and most.
    speedup: f64,
    speedup_min: f64,
    speedup_max: f64,
    /// Tokens per pass, times the time of a pass of one row over that of one with the mean number of rows.
    bound: f64,
    /// Both give the same tokens.
    same_text: bool,
    machine: Machine,
}

/// What one mode did in one run.
struct Run {
    elapsed: Duration,
    counts: Counts,
    rows: u64,
    texts: Vec<Vec<u32>>,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    if args.speculation.is_on() {
        return Err(wrong_usage("--modes says what is measured: leave --speculate out"));
    }
    let uses_draft = |how: &How| matches!(how, How::Drafter(Mode::Draft | Mode::Eagle | Mode::Auto));
    if args.speculation.draft_model.is_some() && !args.modes.iter().any(uses_draft) {
        return Err(wrong_usage("--draft-model is used with draft, eagle or auto in --modes"));
    }
    let opened = args.model.open(quiet)?;
    let tokenizer =
        opened.tokenizer().context("this model has no tokenizer (no tokenizer.json next to it)")?;
    let text = read_text(&args.text)?;
    let parts = args.parts.cut(&tokenizer.encode(&text, false)?)?;
    // Which of the modes says what --draft-model is.
    let asked = |mode| args.modes.contains(&How::Drafter(mode)).then_some(mode);
    let wants_draft = match (asked(Mode::Draft), asked(Mode::Eagle)) {
        (Some(_), Some(_)) => {
            return Err(wrong_usage(
                "--modes draft and eagle need different --draft-model: measure one of them",
            ));
        }
        (draft, eagle) => {
            draft.or(eagle).or(asked(Mode::Auto).filter(|_| args.speculation.draft_model.is_some()))
        }
    };
    let context = args.parts.context(args.speculation.draft_tokens);
    let mut config = CacheConfig {
        kind: "tree".into(),
        k: args.kv.k,
        v: args.kv.v,
        max_step_tokens: 256.min(context),
        ..CacheConfig::new(context)
    };
    let with = |mode| SpeculationArgs { speculate: mode, ..args.speculation.clone() };
    with(Mode::Auto).prepare(&mut config, Some("tree"), None)?;
    let draft = match wants_draft {
        Some(mode) => with(mode).open_draft(&opened, &args.model, quiet)?,
        None => None,
    };
    let (model, _, draft) = args.speculation.load(&args.model, opened, draft, &config, 1, quiet)?;
    interrupt::listen();
    let mut bench = Bench {
        args: &args,
        session: session(&args, &model, &config)?,
        model,
        parts,
        costs: Costs::default(),
    };
    let watch = Watch::start();

    // A warm-up run. It also determines what follows each prompt.
    let plain = bench.run(None)?;
    if !args.follow {
        bench.parts.iter_mut().zip(&plain.texts).for_each(|(part, text)| part.text.clone_from(text));
    }
    let mut off: Vec<Run> = Vec::new();
    let mut others: Vec<Vec<Run>> = args.modes.iter().map(|_| Vec::new()).collect();
    let mut speculators = Vec::new();
    for how in &args.modes {
        speculators.push(bench.speculator(*how, draft.as_ref(), &config)?);
    }
    for (speculator, _) in speculators.iter_mut().zip(&args.modes) {
        bench.run(Some(speculator))?; // `auto` learns the times of passes
    }
    for _ in 0..args.measure.runs {
        off.push(bench.run(None)?);
        for (speculator, runs) in speculators.iter_mut().zip(&mut others) {
            runs.push(bench.run(Some(speculator))?);
        }
        if interrupt::interrupted() {
            break;
        }
    }
    let machine = watch.machine(&args.model.compute.get()?);
    if !args.measure.json {
        output::show(&format!("{}, {machine}\n", bench.model.name()))?;
    }
    for (how, runs) in args.modes.iter().zip(&others) {
        show(&bench, *how, &off, runs, &machine)?;
    }
    Ok(())
}

fn session(args: &Args, model: &Arc<Model>, config: &CacheConfig) -> anyhow::Result<ModelSession> {
    Ok(ModelSession::new(model, &registry(&args.model.compute.get()?), config)?)
}

struct Bench<'a> {
    args: &'a Args,
    model: Arc<Model>,
    session: ModelSession,
    parts: Vec<Part>,
    /// Times of passes by rows, over all runs.
    costs: Costs,
}

impl Bench<'_> {
    fn speculator(
        &self,
        how: How,
        draft: Option<&LoadedDraft>,
        config: &CacheConfig,
    ) -> anyhow::Result<Speculator> {
        match how {
            How::Drafter(mode) => {
                let args = SpeculationArgs { speculate: mode, ..self.args.speculation.clone() };
                let speculator = args.speculator(draft, &self.model, config, 1)?;
                speculator.context("a drafter was asked for")
            }
            How::Oracle(right) => {
                let vocab = self.model.config().vocab as u32;
                let oracle = Oracle { texts: Vec::new(), right, vocab, state: 1 };
                let texts = self.parts.iter().map(|part| [&part.prompt[..], &part.text].concat()).collect();
                let bounds = self.args.speculation.bounds();
                let drafters: Vec<Box<dyn Drafter>> = vec![Box::new(Oracle { texts, ..oracle })];
                Ok(Speculator::new(drafters, SpeculationConfig { bounds, adaptive: false }))
            }
        }
    }

    /// Decodes what follows every prompt. Prompts are not part of the time.
    fn run(&mut self, mut speculator: Option<&mut Speculator>) -> anyhow::Result<Run> {
        let mut run = Run { elapsed: Duration::ZERO, counts: Counts::default(), rows: 0, texts: Vec::new() };
        let continuation =
            Continuation { tokens: self.args.parts.tokens as usize, follow: self.args.follow, ends: &[] };
        for (id, part) in (0..).zip(&self.parts) {
            let costs = &mut self.costs;
            let mut watch = |_: &[u32], pass: &DraftedPass| {
                let tree = &pass.draft.tree;
                costs.record(tree.len() + 1, pass.elapsed);
                run.rows += tree.len() as u64 + 1;
                run.counts.record(tree, &pass.verified);
                true
            };
            let speculator = speculator.as_deref_mut();
            let (text, elapsed) =
                continuation.decode(&mut self.session, speculator, (id, part), &mut watch)?;
            run.elapsed += elapsed;
            run.texts.push(text);
        }
        Ok(run)
    }
}

fn show(bench: &Bench<'_>, how: How, off: &[Run], runs: &[Run], machine: &Machine) -> anyhow::Result<()> {
    let args = bench.args;
    let ratios = off.iter().zip(runs).map(|(off, run)| off.elapsed.as_secs_f64() / run.elapsed.as_secs_f64());
    let mut ratios: Vec<f64> = ratios.collect();
    ratios.sort_by(f64::total_cmp);
    let at = |share| percentile(&ratios, share).unwrap_or_default();
    let Some(last) = runs.last() else { return Ok(()) };
    let times: Vec<Duration> = runs.iter().map(|run| run.elapsed).collect();
    let spread = Spread::of(&times);
    let n = f64::from(args.parts.prompts) * f64::from(args.parts.tokens - 1);
    let passes = last.counts.target_passes.max(1) as f64;
    let rows = (last.rows as f64 / passes).round() as usize;
    let cost = |rows| bench.costs.seconds(rows).unwrap_or(1.0);
    let row = Row {
        version: json::VERSION,
        what: "speculate",
        model: bench.model.name().into(),
        how: match how {
            How::Drafter(mode) => format!("{mode:?}").to_lowercase(),
            How::Oracle(right) => format!("oracle={right}"),
        },
        follow: args.follow,
        prompts: args.parts.prompts,
        prompt_tokens: args.parts.prompt_tokens,
        tokens: args.parts.tokens,
        tokens_per_s: n / (spread.median_ms / 1e3),
        tokens_per_pass: n / passes,
        speculation: last.counts.clone(),
        speedup: at(0.5),
        speedup_min: at(0.0),
        speedup_max: at(1.0),
        bound: n / passes * cost(1) / cost(rows),
        same_text: off.iter().zip(runs).all(|(off, run)| off.texts == run.texts),
        spread,
        machine: machine.clone(),
    };
    if args.measure.json {
        return output::show_json_line(&row);
    }
    let Counts { drafted, accepted, .. } = row.speculation;
    output::show(&format!(
        "{:12} {:7.1} tokens/s  {:.2}x plain ({:.2} to {:.2}; bound {:.2}x)  {:.2} tokens per pass of {rows} rows  \
         {accepted} of {drafted} accepted{}\n",
        row.how,
        row.tokens_per_s,
        row.speedup,
        row.speedup_min,
        row.speedup_max,
        row.bound,
        row.tokens_per_pass,
        if row.same_text { "" } else { "  ANOTHER TEXT" },
    ))
}

/// Knows the texts, and proposes trees along them. Of the children of a node, the first is right with a given probability; if it
/// is not, the second is with the same probability, and so on. After a level without a right child, wrong ones follow.
struct Oracle {
    texts: Vec<Vec<u32>>,
    right: f32,
    vocab: u32,
    state: u64,
}

impl Oracle {
    /// A number in [0, 1) (SplitMix64: Steele et al., 2014).
    fn uniform(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
    }
}

impl Drafter for Oracle {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        'requests: for DraftRequest { id, tokens, bounds, tree, .. } in requests {
            let (mut right, mut parent) = (true, None);
            for i in 0..bounds.depth as usize {
                let truth = self.texts[*id as usize].get(tokens.len() + i).copied().unwrap_or_default();
                let (mut found, mut first, mut probability) = (None, None, self.right);
                for child in 0..bounds.width {
                    if tree.len() == bounds.tokens as usize {
                        continue 'requests;
                    }
                    let is_right = right && found.is_none() && self.uniform() < self.right;
                    let token = if is_right { truth } else { (truth + 1 + child) % self.vocab };
                    let node = tree.push(parent, token, probability);
                    first = first.or(Some(node));
                    found = found.or(is_right.then_some(node));
                    probability *= 1.0 - self.right;
                }
                right = found.is_some();
                parent = found.or(first);
            }
        }
        Ok(())
    }
}
