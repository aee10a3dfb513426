//! `kvist bench speculate`: measures how much each drafter gains, in turns with plain decoding.
use super::machine::{Machine, Spread, Watch};
use super::measure::{KvArgs, RunsArgs};
use crate::options::*;
use crate::{interrupt, json, output};
use anyhow::Context;
use clap::ValueHint;
use kvist_cache::SeqId;
use kvist_engine::Error;
use kvist_engine::executor::SampledToken;
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::session::ModelSession;
use kvist_engine::speculate::*;
use kvist_model::Model;
use kvist_simulator::statistics::percentile;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// is right with probability P at each token
    #[arg(long, value_name = "HOW,HOW,…", default_value = "ngram,suffix,auto", value_delimiter = ',', value_parser = parse_how)]
    modes: Vec<How>,
    /// The text whose parts are continued, as UTF-8
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    text: PathBuf,
    /// Decode the text itself instead of what the model would write: for texts that the model cannot write
    #[arg(long)]
    follow: bool,
    /// Tokens of each prompt, from evenly spaced places of the text
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    prompt_tokens: u32,
    /// Tokens that follow each prompt
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..=65536))]
    tokens: u32,
    /// Prompts of a run
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    prompts: u32,
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

/// A prompt and what follows it.
struct Case {
    prompt: Vec<u32>,
    text: Vec<u32>,
}

/// What one mode did in one run.
struct Run {
    elapsed: Duration,
    counts: Counts,
    rows: u64,
    texts: Vec<Vec<u32>>,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let opened = args.model.open(quiet)?;
    let tokenizer =
        opened.tokenizer().context("this model has no tokenizer (no tokenizer.json next to it)")?;
    let text = read_text(&args.text)?;
    let cases = cases(&tokenizer.encode(&text, false)?, &args)?;
    // The modes decide what --draft-model is: a model or a head.
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
    let context = args.prompt_tokens + args.tokens + args.speculation.draft_tokens + 1;
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
    let (model, _) = args.model.load_for(opened, &config, 1, quiet)?;
    let draft = draft.map(|draft| draft.load(&model, &config, quiet)).transpose()?;
    interrupt::listen();
    let mut bench = Bench {
        args: &args,
        session: session(&args, &model, &config)?,
        model,
        cases,
        costs: Costs::default(),
    };
    let watch = Watch::start();

    // A warm-up run. It also determines what follows each prompt.
    let plain = bench.run(None)?;
    if !args.follow {
        bench.cases.iter_mut().zip(&plain.texts).for_each(|(case, text)| case.text.clone_from(text));
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

/// Prompts from evenly spaced places of the text, and what follows them there.
fn cases(tokens: &[u32], args: &Args) -> anyhow::Result<Vec<Case>> {
    let (prompt, whole) = (args.prompt_tokens as usize, (args.prompt_tokens + args.tokens) as usize);
    if tokens.len() < whole {
        return Err(wrong_usage(format!(
            "the text has {} tokens; --prompt-tokens and --tokens need {whole}: give a longer --text",
            tokens.len()
        )));
    }
    let last = tokens.len() - whole;
    let case = |i: u32| {
        let at = last * i as usize / args.prompts.max(2).saturating_sub(1) as usize;
        let (prompt, text) = tokens[at.min(last)..at.min(last) + whole].split_at(prompt);
        Case { prompt: prompt.into(), text: text.into() }
    };
    Ok((0..args.prompts).map(case).collect())
}

struct Bench<'a> {
    args: &'a Args,
    model: Arc<Model>,
    session: ModelSession,
    cases: Vec<Case>,
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
                let oracle = Oracle { cases: Vec::new(), right, vocab, state: 1 };
                let cases = self.cases.iter().map(|case| [&case.prompt[..], &case.text].concat()).collect();
                let bounds = self.args.speculation.bounds();
                let drafters: Vec<Box<dyn Drafter>> = vec![Box::new(Oracle { cases, ..oracle })];
                Ok(Speculator::new(drafters, SpeculationConfig { bounds, adaptive: false }))
            }
        }
    }

    /// Decodes what follows every prompt. Prompts are not part of the time.
    fn run(&mut self, mut speculator: Option<&mut Speculator>) -> anyhow::Result<Run> {
        let mut run = Run { elapsed: Duration::ZERO, counts: Counts::default(), rows: 0, texts: Vec::new() };
        for (id, case) in self.cases.iter().enumerate() {
            self.session.clear()?;
            self.session.set_taps(speculator.as_ref().map_or(&[], |speculator| speculator.taps()))?;
            self.session.prefill_watched(SeqId::ONLY, &case.prompt, &mut |session, computed| {
                if let Some(speculator) = &mut speculator {
                    let text = (id as u64, computed.start as u32, &case.prompt[..]);
                    session.report_features(text, 0..computed.len(), speculator)?;
                }
                Ok(true)
            })?;
            let mut sampler = Sampler::new(SamplerConfig::greedy())?;
            let (follow, n) = (self.args.follow, self.args.tokens as usize);
            let mut known = case.prompt.clone();
            let first = if follow { case.text[0] } else { sampler.sample(self.session.logits_row(0))? };
            known.push(first);
            let started = Instant::now();
            let mut drafts = vec![Draft::default()];
            while known.len() < case.prompt.len() + n {
                let done = known.len() - case.prompt.len();
                if let Some(speculator) = &mut speculator {
                    let text =
                        DraftContext { id: id as u64, salt: "", tokens: &known, max_new: (n - done) as u32 };
                    let limit = self.args.speculation.draft_tokens;
                    speculator.propose(&[text], 0, limit, false, &mut drafts)?;
                }
                let (mut verified, mut drawn) = (Verified::default(), done);
                let mut choose = |row: kvist_device::RowResult<'_>| {
                    let sampled = sampler.take(row)?;
                    let token = if follow { case.text[drawn] } else { sampled };
                    drawn += 1;
                    Ok::<_, Error>(SampledToken { token, finished: drawn == n })
                };
                let last = known[known.len() - 1];
                let pass = Instant::now();
                let tree = &drafts[0].tree;
                self.session.forward_draft(SeqId::ONLY, last, tree, &mut choose, &mut verified)?;
                let elapsed = pass.elapsed();
                self.costs.record(tree.len() + 1, elapsed);
                run.rows += tree.len() as u64 + 1;
                run.counts.record(tree, &verified);
                if let Some(speculator) = &mut speculator {
                    speculator.passed(tree.len() + 1, elapsed);
                    speculator.record(&drafts[0], &verified);
                }
                let first = known.len() as u32 - 1;
                known.extend(&verified.tokens);
                if let Some(speculator) = &mut speculator {
                    let text = (id as u64, first, &known[..]);
                    self.session.report_features(text, verified.rows(), speculator)?;
                }
            }
            run.elapsed += started.elapsed();
            if let Some(speculator) = &mut speculator {
                speculator.forget(id as u64);
            }
            run.texts.push(known.split_off(case.prompt.len()));
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
    let n = f64::from(args.prompts) * f64::from(args.tokens - 1);
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
        prompts: args.prompts,
        prompt_tokens: args.prompt_tokens,
        tokens: args.tokens,
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

/// Knows the texts, and proposes chains whose tokens are right with a given probability each.
struct Oracle {
    cases: Vec<Vec<u32>>,
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
        for DraftRequest { id, tokens, bounds, tree, .. } in requests {
            let mut right = true;
            for i in 0..bounds.tokens.min(bounds.depth) as usize {
                let truth = self.cases[*id as usize].get(tokens.len() + i).copied().unwrap_or_default();
                right &= self.uniform() < self.right;
                let token = if right { truth } else { (truth + 1) % self.vocab };
                tree.push(i.checked_sub(1).map(|parent| parent as u32), token, self.right);
            }
        }
        Ok(())
    }
}
