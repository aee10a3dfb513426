//! `kvist simulate replay`: runs the events of a recording through the scheduler and the cache bookkeeping again, with
//! a cache made as the log's header says. The decisions must equal the recorded ones, to the byte.
//!
//! Tokens and times come from the recording: nothing is executed, and nothing is random. The recording is read line by
//! line, and only the decisions of one iteration are kept in memory.
use super::costs;
use crate::{json, output};
use anyhow::{Context, bail};
use clap::ValueHint;
use kvist_scheduler::{LengthSource, Replay, Replayed, SchedulerCounters};
use kvist_simulator::cost::{BatchShape, MeasuredTable, StepCost};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// A recording (--record) of the simulator or of the server, or a scheduler's event log
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    recording: PathBuf,
    /// Compare with the decision log of this file; without it, with the decisions in the recording
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    decisions: Option<PathBuf>,
    /// Write the decision log of the replay
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Compare the recorded step times with those of a measured table (docs/traces.md)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    costs: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The keys that distinguish event lines from decision lines. All other lines are skipped.
#[derive(Deserialize)]
struct Keys {
    format: Option<String>,
    n: Option<IgnoredAny>,
    step: Option<IgnoredAny>,
    blocks: Option<IgnoredAny>,
    config: Option<Lengths>,
}

#[derive(Deserialize)]
struct Lengths {
    lengths: LengthSource,
}

/// `kvist simulate replay --json`
#[derive(Serialize, Default)]
pub struct Summary {
    version: u32,
    recording: String,
    events: u64,
    /// Iterations that ran a step.
    steps: u64,
    decisions: u64,
    /// Decisions equal to the recorded ones, to the byte; a difference is an error. 0: there were none to compare with.
    compared: u64,
    /// Mean time between the end of a step and the start of the next, if that follows at once.
    between_steps_ms: f64,
    /// Absent if the recording has no drafts.
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<Speculated>,
    #[serde(skip_serializing_if = "Option::is_none")]
    costs: Option<Predicted>,
}

#[derive(Serialize)]
struct Speculated {
    drafts: u64,
    draft_tokens: u64,
    accepted_tokens: u64,
}

impl Summary {
    /// What the recorded steps took, over what the table says. `None` without a table, or without steps.
    pub fn slowdown(&self) -> Option<f64> {
        let all = &self.costs.as_ref()?.all;
        let factor = all.recorded_s / all.foretold_s;
        (factor.is_finite() && factor > 0.0).then_some(factor)
    }
}

/// Predictions of a table for the recorded steps.
#[derive(Serialize)]
pub struct Predicted {
    table: String,
    prefill: Sum,
    decode: Sum,
    mixed: Sum,
    all: Sum,
    /// Steps beyond what was measured.
    outside: u64,
    #[serde(skip)]
    costs: MeasuredTable,
}

#[derive(Serialize, Default)]
struct Sum {
    steps: u64,
    recorded_s: f64,
    foretold_s: f64,
    /// Predicted over recorded, less one.
    error: f64,
    /// Sum of the absolute errors of single steps, over the recorded time.
    error_of_steps: f64,
    #[serde(skip)]
    off_s: f64,
}

impl Sum {
    fn add(&mut self, recorded_ns: u64, predicted_ns: u64) {
        let (recorded, predicted) = (recorded_ns as f64 / 1e9, predicted_ns as f64 / 1e9);
        self.steps += 1;
        self.recorded_s += recorded;
        self.foretold_s += predicted;
        self.off_s += (predicted - recorded).abs();
        if self.recorded_s > 0.0 {
            self.error = self.foretold_s / self.recorded_s - 1.0;
            self.error_of_steps = self.off_s / self.recorded_s;
        }
    }
}

impl Predicted {
    fn new(costs: MeasuredTable) -> Predicted {
        let sum = Sum::default;
        let (prefill, decode, mixed, all) = (sum(), sum(), sum(), sum());
        Predicted { table: costs.name(), prefill, decode, mixed, all, outside: 0, costs }
    }

    fn add(&mut self, replayed: &Replayed<'_>) {
        if replayed.batch.steps != 1 || replayed.outcome.failed {
            return; // only a simulation runs several steps as one, and it knows their cost
        }
        let shape = BatchShape::of(&replayed.batch);
        let (recorded, predicted) = (replayed.outcome.elapsed_ns, self.costs.step_ns(&shape));
        let sum = match (shape.prefill_tokens, shape.decode_sequences) {
            (_, 0) => &mut self.prefill,
            (0, _) => &mut self.decode,
            _ => &mut self.mixed,
        };
        sum.add(recorded, predicted);
        self.all.add(recorded, predicted);
        self.outside += u64::from(!self.costs.covers(&shape));
    }
}

/// The source of the recorded decisions.
enum Recorded {
    /// In the recording, after the events that caused them.
    Between,
    Apart {
        file: PathBuf,
        lines: Lines<BufReader<File>>,
        line: usize,
    },
}

struct Compared {
    recorded: Recorded,
    /// Decisions of the replay that were not yet compared with the recording.
    pending: VecDeque<String>,
    /// How many of them the last event caused.
    newest: usize,
    any: bool,
    n: u64,
}

impl Compared {
    /// Compares the next recorded decision, from `line` of `file`.
    fn next(&mut self, file: &Path, line: usize, recorded: &str) -> anyhow::Result<()> {
        self.any = true;
        self.n += 1;
        match self.pending.pop_front() {
            Some(here) if here == recorded => Ok(()),
            here => bail!(
                "{}, line {line}: the replay decides differently\n  recorded {recorded}\n  replayed {}",
                file.display(),
                here.as_deref().unwrap_or("nothing more")
            ),
        }
    }

    /// Adds the decisions of an iteration.
    fn decided(&mut self, lines: &str) -> anyhow::Result<()> {
        let before = self.pending.len();
        self.pending.extend(lines.lines().map(str::to_owned));
        self.newest = self.pending.len() - before;
        while let Recorded::Apart { file, lines, line } = &mut self.recorded {
            if self.pending.is_empty() {
                break;
            }
            let Some(text) = lines.next().transpose().with_context(|| cannot_read(file))? else {
                bail!(
                    "{} ends after line {line}, but the replay continues: {}",
                    file.display(),
                    self.pending[0]
                )
            };
            *line += 1;
            let (file, line) = (file.clone(), *line);
            self.next(&file, line, &text)?;
        }
        Ok(())
    }

    /// Checks that nothing is left to compare.
    fn end(&mut self) -> anyhow::Result<()> {
        if let Recorded::Apart { file, lines, line } = &mut self.recorded {
            if let Some(more) = lines.next().transpose().with_context(|| cannot_read(file))? {
                bail!("{}, line {}: recorded but not replayed: {more}", file.display(), *line + 1)
            }
            return Ok(());
        }
        match self.pending.front().filter(|_| self.any) {
            // If the server was killed, the decisions of the last event may be missing.
            Some(more) if self.pending.len() > self.newest => {
                bail!("the recording ends, and the replay has more: {more}")
            }
            _ => Ok(()),
        }
    }
}

fn cannot_read(file: &Path) -> String {
    format!("cannot read {}", file.display())
}

fn open(file: &Path) -> anyhow::Result<Lines<BufReader<File>>> {
    Ok(BufReader::new(File::open(file).with_context(|| cannot_read(file))?).lines())
}

pub fn run(args: Args, _quiet: bool) -> anyhow::Result<()> {
    let mut predicted = args.costs.as_deref().map(costs::table).transpose()?.map(Predicted::new);
    let recorded = match &args.decisions {
        None => Recorded::Between,
        Some(file) => Recorded::Apart { file: file.clone(), lines: open(file)?, line: 0 },
    };
    let mut out = args.output.as_deref().map(output::FileInParts::create).transpose()?;
    let mut decided = |lines: &str| out.as_mut().map_or(Ok(()), |out| out.write(lines.as_bytes()));
    let lines = open(&args.recording)?;
    let mut ran = |replayed: Replayed<'_>| predicted.iter_mut().for_each(|it| it.add(&replayed));
    let mut summary = follow(&args.recording, lines, recorded, &mut ran, &mut decided)?;
    summary.costs = predicted;
    if let Some(out) = out {
        out.finish()?;
    }
    if args.json { output::show_json(&summary) } else { output::show(&summary.text()) }
}

/// Replays a recording in memory that contains its decisions.
pub fn check(name: &str, recording: &str, table: &MeasuredTable) -> anyhow::Result<Summary> {
    let lines = recording.lines().map(|line| Ok(line.to_owned()));
    let mut predicted = Predicted::new(table.clone());
    let mut ran = |replayed: Replayed<'_>| predicted.add(&replayed);
    let mut summary = follow(Path::new(name), lines, Recorded::Between, &mut ran, &mut |_| Ok(()))?;
    summary.costs = Some(predicted);
    Ok(summary)
}

/// Replays the recording in `file`, and passes every step that ran to `ran`.
pub fn each_step(file: &Path, ran: &mut dyn FnMut(Replayed<'_>)) -> anyhow::Result<()> {
    follow(file, open(file)?, Recorded::Between, ran, &mut |_| Ok(())).map(|_| ())
}

/// Begins with the header of an event log.
fn begin(header: &str, keys: &Keys) -> anyhow::Result<Replay> {
    if keys.format.as_deref() == Some("kvist-decisions") {
        bail!("a decision log without its events: give the event log, and this file with --decisions")
    }
    if keys.config.as_ref().is_some_and(|config| config.lengths == LengthSource::Oracle) {
        bail!("it was recorded with --lengths oracle (or noisy), and no log contains the true lengths")
    }
    Ok(Replay::begin(header, None, None)?)
}

/// Replays the events among `lines` of `file`, passes the steps that ran to `ran` and the decisions to `decided`, and
/// compares them with `recorded`.
fn follow(
    file: &Path,
    lines: impl Iterator<Item = std::io::Result<String>>,
    recorded: Recorded,
    ran: &mut dyn FnMut(Replayed<'_>),
    decided: &mut dyn FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Summary> {
    let name = file.display().to_string();
    let mut compared = Compared { recorded, pending: VecDeque::new(), newest: 0, any: false, n: 0 };
    let mut summary = Summary { version: json::VERSION, recording: name.clone(), ..Summary::default() };
    let mut replay: Option<Replay> = None;
    let mut gaps = Gaps::default();
    let mut lines = lines.enumerate().peekable();
    while let Some((i, text)) = lines.next() {
        let (text, line) = (text.with_context(|| cannot_read(file))?, i + 1);
        let at = || format!("{name}, line {line}");
        let keys: Keys = match serde_json::from_str(&text) {
            Ok(keys) => keys,
            // A server that was killed leaves a partial last line.
            Err(e) if e.is_eof() && replay.is_some() && lines.peek().is_none() => {
                output::note(&format!("{}: the last line is cut off and is ignored", at()));
                break;
            }
            Err(e) => return Err(e).with_context(|| format!("{}: not a line of a recording", at())),
        };
        match (&mut replay, keys.format.as_deref()) {
            (_, Some("kvist-recording")) => continue,
            (None, _) => replay = Some(begin(&text, &keys).with_context(at)?),
            (Some(_), Some("kvist-events")) => {
                bail!("{}: a second event log begins; give the logs one by one", at())
            }
            (Some(replay), None) if keys.n.is_some() => {
                let mut noted = |replayed: Replayed<'_>| {
                    gaps.add(replayed.now_ns, replayed.outcome.elapsed_ns);
                    summary.steps += u64::from(replayed.batch.steps);
                    ran(replayed);
                };
                replay.event(&text, Some(&mut noted)).with_context(at)?;
                gaps.set_continues(replay.scheduler().n_running() > 0);
                summary.events += 1;
            }
            (Some(_), _) => {
                let decision = keys.format.is_some() || (keys.step.is_some() && keys.blocks.is_none());
                if decision && matches!(compared.recorded, Recorded::Between) {
                    compared.next(file, line, &text)?;
                }
            }
        }
        let Some(replay) = &mut replay else { continue };
        let lines = replay.decisions();
        summary.decisions += lines.lines().count() as u64;
        decided(&lines)?;
        compared.decided(&lines)?;
    }
    let Some(replay) = replay else {
        bail!(
            "{name} contains no event log: give a recording (--record), or a log that begins with kvist-events"
        );
    };
    compared.end()?;
    let SchedulerCounters { drafts, draft_tokens, accepted_tokens, .. } = *replay.scheduler().counters();
    summary.speculation = (drafts > 0).then_some(Speculated { drafts, draft_tokens, accepted_tokens });
    // The first line of the log is its header, not a decision.
    summary.decisions = summary.decisions.saturating_sub(1);
    summary.compared = compared.n.saturating_sub(1);
    summary.between_steps_ms = gaps.mean_ms();
    Ok(summary)
}

/// Times between a step and the next one, if that follows at once.
#[derive(Default)]
struct Gaps {
    /// The end of the last step.
    ended_ns: Option<u64>,
    continues: bool,
    n: u64,
    sum_ns: u64,
}

impl Gaps {
    fn add(&mut self, now_ns: u64, elapsed_ns: u64) {
        if let Some(ended_ns) = self.ended_ns.filter(|_| self.continues) {
            self.n += 1;
            self.sum_ns += now_ns.saturating_sub(ended_ns);
        }
        self.ended_ns = Some(now_ns.saturating_add(elapsed_ns));
    }
    fn set_continues(&mut self, continues: bool) {
        self.continues = continues;
    }
    fn mean_ms(&self) -> f64 {
        self.sum_ns as f64 / self.n.max(1) as f64 / 1e6
    }
}

impl Summary {
    pub fn text(&self) -> String {
        let same = match self.compared {
            0 => "nothing to compare with",
            _ => "identical",
        };
        // In a simulation virtual time passes only in steps.
        let between = match self.between_steps_ms {
            0.0 => String::new(),
            ms => format!(", {ms:.3} ms between them"),
        };
        let mut text = format!(
            "events           {}, {} steps{between}\ndecisions        {}, {same}\n",
            self.events, self.steps, self.decisions
        );
        if let Some(Speculated { drafts, draft_tokens, accepted_tokens }) = self.speculation {
            text +=
                &format!("drafts           {drafts}; {accepted_tokens} of {draft_tokens} tokens accepted\n");
        }
        let Some(costs) = &self.costs else { return text };
        text += &format!("\n{}\n\n", costs.table);
        text += "                    steps   recorded  predicted    in sum   per step\n";
        for (name, sum) in [
            ("prefill", &costs.prefill),
            ("decode", &costs.decode),
            ("mixed", &costs.mixed),
            ("all", &costs.all),
        ] {
            text += &format!(
                "{name:<16} {:>8} {:>8.3} s {:>8.3} s {:>+8.1}% {:>9.1}%\n",
                sum.steps,
                sum.recorded_s,
                sum.foretold_s,
                sum.error * 100.0,
                sum.error_of_steps * 100.0
            );
        }
        if costs.outside > 0 {
            text += &format!(
                "{} steps lie outside the measured range: their times are extrapolated\n",
                costs.outside
            );
        }
        text
    }
}
