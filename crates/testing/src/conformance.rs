//! The conformance suite for backends: [`run`] tests what attention computes, [`refusals`] what a backend must
//! refuse, [`transfers`] that cells are the same wherever they are imported.
//!
//! Cases are sampled over plan shape × K storage × V storage × heads × head_dim × length × layer sharing × strides ×
//! soft-cap, such that any two values of any two axes occur together in some case. Every case drives a session and
//! the [reference model](crate::reference) side by side. What a query must see comes from the model's visibility
//! rule, never from the plan's reads; what it must compute is scalar f64 attention over exactly those rows.
//!
//! Storage and arithmetic are tested separately, so that the loss of a coarse dtype cannot hide a wrong sum. A stored
//! row, read back, must be as close to the written row as its dtype permits (`rows.rs` has the bounds), and attention
//! over the rows *as they were read back* must be exact except for f32 rounding. Outputs and the gaps between strided
//! rows are filled with NaN before a step, abandoned steps leave NaN in the cells they wrote, and every comparison
//! fails on NaN.
use kvist_device::{Backend, DType, Storage};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

mod cases;
mod paths;
mod refusals;
mod rig;
mod rows;
mod shapes;
mod transfers;

pub use refusals::{refusals, refusals_in};
pub use transfers::Ends;

/// What to run, and with which tolerances.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Seed of the case sample and of all values.
    pub seed: u64,
    /// Allowed error of an output element, as a fraction of `(1 + S) × V`: S is the largest |scale|·‖q‖·‖k‖ and V the
    /// largest |v| that its query sees. A score of size S has an f32 rounding error of that relative size, which its
    /// weight inherits; sums of up to 300 weighted values add theirs. The tolerance applies to every storage, because
    /// the expected values are computed from the stored rows; rotation adds log₂(head_dim) more roundings.
    pub attention: f64,
    /// The same tolerance where K or V is q8 or q4. Kernels that multiply integers round queries and weights first,
    /// and set here by how much.
    pub packed: f64,
    /// The same where K or V is q4, for kernels that round more beside codes of four bits.
    pub q4: Option<f64>,
    /// Stored rows must come back bit for bit, whatever the storage. For backends that store f32 only.
    pub exact_rows: bool,
    /// Run only the case of this number.
    pub only: Option<usize>,
    /// Run only every n-th case, for kernels that have passed all of them before.
    pub one_in: usize,
    /// The storages that the backend has, among those of the suite. Any two values of the axes still occur together.
    pub storages: fn(Storage) -> bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            seed: 1,
            attention: 2e-7,
            packed: 2e-7,
            q4: None,
            exact_rows: false,
            only: None,
            one_in: 1,
            storages: |_| true,
        }
    }
}

impl Options {
    /// The defaults, overridden by the environment variables `KVIST_SEED` and `KVIST_CASE`.
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

/// What was run, and how close the results were.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    pub seed: u64,
    pub n_cases: usize,
    pub n_steps: usize,
    pub n_outputs: usize,
    /// Largest fraction of the attention tolerance that an output used.
    pub worst_output: f64,
    /// Largest fraction of its storage's bound that a stored row used.
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

/// Maximum number of reported lines per failing case.
const LINES_PER_CASE: usize = 4;

/// Runs every sampled case. `Err` is a table of all failing cases, with the seed.
pub fn run(backend: &dyn Backend, options: &Options) -> Result<Report, String> {
    let mut report = Report { seed: options.seed, ..Report::default() };
    report.n_cases = for_each_case(backend.id(), options, |case, number| {
        let found = rig::run(backend, case, options, number);
        report.n_steps += found.n_steps;
        report.n_outputs += found.n_outputs;
        report.worst_output = report.worst_output.max(found.worst_output);
        report.worst_row = report.worst_row.max(found.worst_row);
        found.bad
    })?;
    Ok(report)
}

/// Exports random cells of pools of one backend, imports them into pools of the same or of another one, and compares
/// the stored rows, the bytes that are exported again, and what attention reads: within 1e-3, and with q4 between backends
/// whose bits differ within [`Options::q4`] if it is given. Both must store K and V alike. Returns the number of cases;
/// `Err` is a table of all failing ones, with the seed.
pub fn transfers(ends: Ends<'_>, options: &Options) -> Result<usize, String> {
    let id = format!("{} to {}", ends.from.id(), ends.to.id());
    for_each_case(&id, options, |case, number| {
        let coarse = !ends.same_bits && [case.k.dtype, case.v.dtype].contains(&DType::Q4);
        let tolerance = options.q4.filter(|_| coarse).map_or(1e-3, |allowed| allowed as f32);
        transfers::run(ends, case, options.seed ^ number, tolerance)
    })
}

/// Runs `check` on every sampled case that the options ask for, and returns the number of cases.
fn for_each_case(
    id: &str,
    options: &Options,
    mut check: impl FnMut(&cases::Case, u64) -> Vec<String>,
) -> Result<usize, String> {
    let (mut n_cases, mut n_bad, mut table) = (0, 0, String::new());
    for (number, case) in cases::sample(options.seed, options.storages).iter().enumerate() {
        if options.only.is_some_and(|only| only != number) || !number.is_multiple_of(options.one_in) {
            continue;
        }
        n_cases += 1;
        let done = catch_unwind(AssertUnwindSafe(|| check(case, number as u64)));
        let bad = done.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or(panic.downcast_ref::<&str>().map(|text| text.to_string()));
            vec![format!("panicked: {}", text.unwrap_or_default())]
        });
        if !bad.is_empty() {
            n_bad += 1;
            table += &format!("case {number}: {case}\n");
            bad.iter().take(LINES_PER_CASE).for_each(|line| table += &format!("    {line}\n"));
            if bad.len() > LINES_PER_CASE {
                table += &format!("    and {} more\n", bad.len() - LINES_PER_CASE);
            }
        }
    }
    match n_bad {
        0 => Ok(n_cases),
        _ => Err(format!("{id}: {n_bad} of {n_cases} cases are bad, seed {}\n{table}", options.seed)),
    }
}
