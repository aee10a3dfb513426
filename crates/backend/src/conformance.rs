//! The suite any backend runs: [`run`] for what attention computes, [`refusals`] for what it must refuse.
//!
//! Cases are sampled over plan shape × K storage × V storage × heads × head_dim × length × layer sharing × strides ×
//! soft-cap, such that any two values of any two axes meet in some case. Every case drives a session and the
//! [twin](kvist_cache::twin) side by side. What a query must see comes from the twin's visibility rule, never from
//! the plan's reads; what it must compute is scalar f64 attention over exactly those rows.
//!
//! Storage and arithmetic are judged apart, so that the loss of a coarse dtype cannot hide a wrong sum: a stored row,
//! read back, must be as close to the row written as its dtype permits (`rows.rs` has the bounds), and attention over the rows
//! *as they were read back* must be exact but for f32 rounding. Outputs and the gaps between strided rows are
//! poisoned before, abandoned steps leave NaN in the cells they wrote, and every comparison is written so that a NaN
//! fails it.
use crate::Backend;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

mod cases;
mod refusals;
mod rig;
mod rows;
mod shapes;

pub use refusals::refusals;

/// What to run, and how exact to be.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Of the sample and of every value.
    pub seed: u64,
    /// Error of an output element allowed, as a part of `(1 + S) × V`: S is the largest |scale|·‖q‖·‖k‖ and V the
    /// largest |v| its query sees. A score of size S carries an f32 rounding error of that relative size, which its
    /// weight inherits; sums of up to 300 weighted values add theirs. It holds for every storage, because the
    /// expected values are computed from the rows as they are stored; rotation adds log₂(head_dim) roundings more.
    pub attention: f64,
    /// The same where K or V is q8 or q4. Kernels that multiply integers round queries and weights to do so, and
    /// say here how much.
    pub packed: f64,
    /// Stored rows must come back bit for bit, whatever the storage: for a backend that stores f32 only.
    pub exact_rows: bool,
    /// Run the case of this number alone.
    pub only: Option<usize>,
    /// Run one case in so many: for a second look at kernels that have passed all of them.
    pub one_in: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { seed: 1, attention: 2e-7, packed: 2e-7, exact_rows: false, only: None, one_in: 1 }
    }
}

impl Options {
    /// The default, or what the variables `KVIST_SEED` and `KVIST_CASE` say.
    pub fn from_env() -> Self {
        let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
        let default = Options::default();
        Options {
            seed: number("KVIST_SEED").unwrap_or(default.seed),
            only: number("KVIST_CASE").map(|case: u64| case as usize),
            ..default
        }
    }
}

/// What was run, and how close it was.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    pub seed: u64,
    pub n_cases: usize,
    pub n_steps: usize,
    pub n_outputs: usize,
    /// Largest part of the attention tolerance that an output used up.
    pub worst_output: f64,
    /// Largest part of its storage's bound that a stored row used up.
    pub worst_row: f64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { seed, n_cases, n_steps, n_outputs, worst_output, worst_row } = self;
        write!(
            f,
            "seed {seed}: {n_cases} cases, {n_steps} steps, {n_outputs} outputs; of the tolerance used at most {:.0} % by an output, {:.0} % by a stored row",
            worst_output * 100.0,
            worst_row * 100.0
        )
    }
}

/// Lines of one bad case that are worth reading.
const LINES_PER_CASE: usize = 4;

/// Run every sampled case; `Err` is a table of every bad one, with the seed.
pub fn run(backend: &dyn Backend, options: &Options) -> Result<Report, String> {
    let mut report = Report { seed: options.seed, ..Report::default() };
    let mut table = String::new();
    let mut n_bad = 0;
    for (number, case) in cases::sample(options.seed).iter().enumerate() {
        if options.only.is_some_and(|only| only != number) || !number.is_multiple_of(options.one_in) {
            continue;
        }
        report.n_cases += 1;
        let done = catch_unwind(AssertUnwindSafe(|| rig::run(backend, case, options, number as u64)));
        let bad = match done {
            Ok(found) => {
                report.n_steps += found.n_steps;
                report.n_outputs += found.n_outputs;
                report.worst_output = report.worst_output.max(found.worst_output);
                report.worst_row = report.worst_row.max(found.worst_row);
                found.bad
            }
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or(panic.downcast_ref::<&str>().map(|text| text.to_string()));
                vec![format!("panicked: {}", text.unwrap_or_default())]
            }
        };
        if !bad.is_empty() {
            n_bad += 1;
            table += &format!("case {number}: {case}\n");
            bad.iter().take(LINES_PER_CASE).for_each(|line| table += &format!("    {line}\n"));
            if bad.len() > LINES_PER_CASE {
                table += &format!("    and {} more\n", bad.len() - LINES_PER_CASE);
            }
        }
    }
    if n_bad == 0 {
        return Ok(report);
    }
    let id = backend.id();
    Err(format!("{id}: {n_bad} of {} cases are bad, seed {}\n{table}", report.n_cases, options.seed))
}
