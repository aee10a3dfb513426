//! Chooses a cache: of those that fit, the one whose dtypes lose least.
use super::Args;
use super::candidates::{Asked, Candidate, Command};
use super::command_line;
use super::ladder::{self, Rung};
use super::measure::Measured;
use serde::Serialize;

/// `recommendation` of `kvist plan --json`
#[derive(Serialize)]
pub struct Recommendation {
    pub memory_bytes: u64,
    pub kl: Kl,
    pub candidates: Vec<Row>,
    /// Null if none fits.
    pub run: Option<Pick>,
    pub serve: Option<Pick>,
    /// Candidates for `serve` have tiers.
    #[serde(skip)]
    pub has_tiers: bool,
}

/// The source of the candidates' KL.
#[derive(Serialize)]
pub struct Kl {
    /// True if it was measured on the model of this plan.
    pub of_this_model: bool,
    pub models: Vec<String>,
    pub measured_on: String,
}

/// One row of the table.
#[derive(Serialize)]
pub struct Row {
    pub command: Command,
    pub kind: &'static str,
    pub k: String,
    pub v: String,
    pub kv_bytes_per_token: u64,
    pub kv_bits_per_value: f64,
    pub total_bytes: u64,
    pub fits: bool,
    pub context_fits_tokens: u32,
    /// Mean in nats for each of [`Kl::models`]; null if not measured.
    pub kl_means: Vec<Option<f64>>,
    /// The largest of them, by which candidates are ranked.
    pub kl_mean: Option<f64>,
    #[serde(skip)]
    pub candidate: Candidate,
}

/// A recommended cache, with its command line.
#[derive(Serialize)]
pub struct Pick {
    pub kind: &'static str,
    pub k: String,
    pub v: String,
    pub total_bytes: u64,
    pub kl_mean: Option<f64>,
    pub command_line: String,
    #[serde(skip)]
    pub candidate: Candidate,
}

impl Kl {
    pub fn reference() -> Self {
        Kl {
            of_this_model: false,
            models: ladder::MODELS.map(String::from).to_vec(),
            measured_on: ladder::MEASURED_ON.into(),
        }
    }

    pub fn measured(model: &str, args: &Args, measured: &Measured) -> Self {
        let text = match &args.text {
            Some(path) => path.display().to_string(),
            None => "the embedded model's held-out text".into(),
        };
        Kl {
            of_this_model: true,
            models: vec![model.into()],
            measured_on: format!(
                "{} tokens of {text} in windows of {}, weights held {}",
                measured.tokens,
                measured.window_tokens,
                match measured.weights.to_string().as_str() {
                    "as-stored" => "as stored".into(),
                    form => format!("as {form}"),
                }
            ),
        }
    }
}

impl Recommendation {
    /// `kl` returns the KL of a rung of the ladder.
    pub fn of(
        args: &Args,
        asked: &Asked,
        source: Kl,
        candidates: Vec<Candidate>,
        kl: &dyn Fn(&Rung) -> Vec<Option<f64>>,
    ) -> Self {
        let row = |candidate: Candidate| Row::new(asked, kl(&candidate.rung), candidate);
        let rows: Vec<Row> = candidates.into_iter().map(row).collect();
        let pick = |command| best(&rows, command).map(|row| Pick::new(args, row));
        Recommendation {
            memory_bytes: asked.memory_bytes,
            kl: source,
            run: pick(Command::Run),
            serve: pick(Command::Serve),
            candidates: rows,
            has_tiers: asked.tiers.is_on(),
        }
    }
}

/// The row with the least KL that fits; of equal rows the first, which has the simplest kind. Unmeasured rows come
/// last.
fn best(rows: &[Row], command: Command) -> Option<&Row> {
    let fits = rows.iter().filter(|row| row.fits && row.command == command);
    let kl = |row: &Row| row.kl_mean.unwrap_or(f64::INFINITY);
    fits.min_by(|a, b| kl(a).total_cmp(&kl(b)))
}

impl Row {
    fn new(asked: &Asked, kl_means: Vec<Option<f64>>, candidate: Candidate) -> Self {
        Row {
            command: candidate.command,
            kind: candidate.kind,
            k: candidate.rung.k.to_string(),
            v: candidate.rung.v.to_string(),
            kv_bytes_per_token: candidate.plan.kv_bytes_per_token,
            kv_bits_per_value: candidate.plan.kv_bits_per_value(asked.model),
            total_bytes: candidate.total_bytes,
            fits: candidate.fits,
            context_fits_tokens: candidate.context_fits_tokens,
            kl_mean: kl_means.iter().copied().flatten().reduce(f64::max),
            kl_means,
            candidate,
        }
    }
}

impl Pick {
    fn new(args: &Args, row: &Row) -> Self {
        Pick {
            kind: row.kind,
            k: row.k.clone(),
            v: row.v.clone(),
            total_bytes: row.total_bytes,
            kl_mean: row.kl_mean,
            command_line: command_line::of(args, &row.candidate),
            candidate: row.candidate.clone(),
        }
    }
}
