//! Measured step times, with interpolation between them.
//!
//! The file is JSON:
//!
//! ```json
//! { "format": "kvist-step-cost", "version": 1, "machine": "one H100 SXM", "model": "llama-3.1-8b bf16",
//!   "shared_ns": 4500000,
//!   "prefill": { "tokens":    [1, 512, 8192], "context": [0, 32768], "ns": [[4.6e6, 4.8e6], [1.1e7, 1.3e7], [1.6e8, 2.0e8]] },
//!   "decode":  { "sequences": [1, 64, 256],   "context": [0, 32768], "ns": [[4.6e6, 5.9e6], [5.2e6, 9.0e7], [7.0e6, 3.4e8]] } }
//! ```
//!
//! `ns[i][j]` is the time of a step of `tokens[i]` prompt tokens (or `sequences[i]` decoding sequences) whose
//! sequences have `context[j]` tokens of context on average, including the new ones. `shared_ns` (0 if absent) is the
//! part that a mixed step pays only once although both grids contain it: reading the weights, starting the threads. As
//! long as a step is not full, that part grows with the work on either side. A grid `shared` describes it more
//! precisely, if present: `ns[i][j]` of `tokens[i]` together with `sequences[j]`. A grid `drafts` says what verifying
//! drafts costs, if present: `ns[i][j]` of one sequence that computes `rows[i]` tokens, the last known one and its
//! drafts, at `context[j]`. `setting` records the settings of the
//! measurement. Unknown fields are ignored.
mod file;

pub use file::{DecodeAxes, DraftAxes, PrefillAxes, Setting, SharedAxes, TableFile};

use super::{BatchShape, LONGEST_STEP_NS, StepCost, whole_ns};

/// Times at the grid points of two axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// Prompt tokens or decoding sequences, strictly increasing.
    rows: Vec<f64>,
    /// Mean context of a sequence in tokens, strictly increasing.
    columns: Vec<f64>,
    /// [rows, columns]
    ns: Vec<f64>,
}

/// Why a file is not a valid table.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{file}: {what}; docs/traces.md describes the format of step costs")]
pub struct TableError {
    pub file: String,
    pub what: String,
}

/// Step times by bilinear interpolation between measured steps. Beyond the last measurement the last slope is
/// extrapolated; [`MeasuredTable::covers`] says whether that happens.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredTable {
    machine: String,
    model: String,
    setting: Option<Setting>,
    prefill: Grid,
    decode: Grid,
    /// By prompt tokens and decoding sequences.
    shared: Grid,
    /// By tokens of one sequence, the last known one and its drafts, and its context.
    drafts: Option<Grid>,
}

/// The measured range of a table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// Prompt tokens per step.
    pub prefill_tokens: f64,
    /// Decoding sequences per step.
    pub sequences: f64,
    /// Tokens of one sequence that verifies drafts; `None` if that was not measured.
    pub draft_rows: Option<f64>,
    /// Tokens of context per sequence, for both prefill and decode.
    pub context_tokens: f64,
}

impl Grid {
    /// `ns[i][j]` belongs to `rows[i]` and `columns[j]`.
    ///
    /// # Errors
    /// A description of the error: an axis is empty or does not increase, a row has the wrong length, or a time is
    /// negative or not finite.
    pub fn new(rows: Vec<f64>, columns: Vec<f64>, ns: &[Vec<f64>]) -> Result<Grid, String> {
        for (name, axis) in [("first axis", &rows), ("`context`", &columns)] {
            if axis.is_empty() {
                return Err(format!("the {name} is empty: it needs at least one value"));
            }
            if let Some(bad) = axis.iter().find(|v| !v.is_finite() || **v < 0.0) {
                return Err(format!("the {name} contains {bad}: counts are finite and not negative"));
            }
            if let Some(pair) = axis.windows(2).find(|pair| pair[0] >= pair[1]) {
                return Err(format!(
                    "the {name} goes from {} to {}: list it in increasing order, each value once",
                    pair[0], pair[1]
                ));
            }
        }
        if ns.len() != rows.len() {
            return Err(format!(
                "`ns` has {} rows, and the first axis {} values: give one row per value",
                ns.len(),
                rows.len()
            ));
        }
        let mut flat = Vec::with_capacity(rows.len() * columns.len());
        for (i, row) in ns.iter().enumerate() {
            if row.len() != columns.len() {
                return Err(format!(
                    "`ns[{i}]` has {} times, and `context` {} values: give one time per value",
                    row.len(),
                    columns.len()
                ));
            }
            if let Some(bad) = row.iter().find(|t| !is_time(**t)) {
                return Err(format!("`ns[{i}]` contains {bad}: a time is from 0 to 2^53 ns"));
            }
            flat.extend_from_slice(row);
        }
        Ok(Grid { rows, columns, ns: flat })
    }

    /// Time at (row, column), never negative.
    pub fn at(&self, row: f64, column: f64) -> f64 {
        let (i, u) = cell(&self.rows, row);
        let (j, v) = cell(&self.columns, column);
        let next_i = (i + 1).min(self.rows.len() - 1);
        let next_j = (j + 1).min(self.columns.len() - 1);
        let ns = |i: usize, j: usize| self.ns[i * self.columns.len() + j];
        let low = ns(i, j) + v * (ns(i, next_j) - ns(i, j));
        let high = ns(next_i, j) + v * (ns(next_i, next_j) - ns(next_i, j));
        (low + u * (high - low)).max(0.0)
    }

    /// Like [`Grid::at`], but constant beyond the last measurement instead of extrapolated.
    fn within(&self, row: f64, column: f64) -> f64 {
        let onto = |axis: &[f64], x: f64| match axis {
            [first, .., last] => x.clamp(*first, *last),
            _ => x,
        };
        self.at(onto(&self.rows, row), onto(&self.columns, column))
    }

    /// Returns whether the point lies within the measurements.
    pub fn covers(&self, row: f64, column: f64) -> bool {
        let within = |axis: &[f64], x: f64| {
            axis.first().is_some_and(|a| *a <= x) && axis.last().is_some_and(|b| x <= *b)
        };
        within(&self.rows, row) && within(&self.columns, column)
    }
}

fn is_time(ns: f64) -> bool {
    (0.0..=LONGEST_STEP_NS as f64).contains(&ns)
}

/// The beginning of a possibly long text.
fn shortened(text: &str) -> String {
    let short: String = text.chars().take(200).collect();
    if short.len() < text.len() { short + "…" } else { short }
}

/// The interval of `axis` in which to interpolate `x`, and the relative position in it: above 1 after the last value,
/// below 0 before the first. An axis with one value is constant.
fn cell(axis: &[f64], x: f64) -> (usize, f64) {
    if axis.len() == 1 {
        return (0, 0.0);
    }
    let i = axis.partition_point(|a| *a <= x).clamp(1, axis.len() - 1) - 1;
    (i, (x - axis[i]) / (axis[i + 1] - axis[i]))
}

impl MeasuredTable {
    /// Parses the text of a file. `file` is its name, for errors.
    ///
    /// # Errors
    /// [`TableError`] names the field, what was found and what to give.
    pub fn parse(file: &str, text: &str) -> Result<MeasuredTable, TableError> {
        let wrong = |what: String| TableError { file: file.into(), what };
        let parsed: TableFile = serde_json::from_str(text)
            .map_err(|e| wrong(format!("not a table of step costs: {}", shortened(&e.to_string()))))?;
        MeasuredTable::new(file, parsed)
    }

    /// Builds a table from a parsed file or from a measurement.
    ///
    /// # Errors
    /// As [`MeasuredTable::parse`].
    pub fn new(file: &str, parsed: TableFile) -> Result<MeasuredTable, TableError> {
        let wrong = |what: String| TableError { file: file.into(), what };
        if parsed.format != TableFile::FORMAT {
            return Err(wrong(format!(
                "`format` is \"{}\": expected \"kvist-step-cost\"",
                shortened(&parsed.format)
            )));
        }
        if parsed.version != TableFile::VERSION {
            return Err(wrong(format!("`version` is {}: this program reads version 1", parsed.version)));
        }
        if !is_time(parsed.shared_ns) {
            return Err(wrong(format!("`shared_ns` is {}: a time is from 0 to 2^53 ns", parsed.shared_ns)));
        }
        let grid = |name: &str, rows, columns, ns: &[Vec<f64>]| {
            Grid::new(rows, columns, ns).map_err(|what| wrong(format!("`{name}`: {what}")))
        };
        let (prefill, decode) = (parsed.prefill, parsed.decode);
        let shared = parsed.shared.unwrap_or_else(|| SharedAxes {
            tokens: vec![1.0],
            sequences: vec![1.0],
            ns: vec![vec![parsed.shared_ns]],
        });
        Ok(MeasuredTable {
            prefill: grid("prefill", prefill.tokens, prefill.context, &prefill.ns)?,
            decode: grid("decode", decode.sequences, decode.context, &decode.ns)?,
            shared: grid("shared", shared.tokens, shared.sequences, &shared.ns)?,
            drafts: parsed
                .drafts
                .map(|drafts| grid("drafts", drafts.rows, drafts.context, &drafts.ns))
                .transpose()?,
            machine: parsed.machine,
            model: parsed.model,
            setting: parsed.setting,
        })
    }

    /// The model's name in the file. May be empty.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The settings of the measurement, if the file has them.
    pub fn setting(&self) -> Option<&Setting> {
        self.setting.as_ref()
    }

    /// The measured range. Times beyond it are extrapolated.
    pub fn range(&self) -> Range {
        let last = |axis: &[f64]| axis.last().copied().unwrap_or(0.0);
        Range {
            prefill_tokens: last(&self.prefill.rows),
            sequences: last(&self.decode.rows),
            draft_rows: self.drafts.as_ref().map(|drafts| last(&drafts.rows)),
            context_tokens: last(&self.prefill.columns).min(last(&self.decode.columns)),
        }
    }

    /// Returns whether the step lies within the measurements. Otherwise its time is extrapolated.
    pub fn covers(&self, batch: &BatchShape) -> bool {
        let (prefill, decode) = contexts(batch);
        (batch.prefill_tokens == 0 || self.prefill.covers(batch.prefill_tokens as f64, prefill))
            && (batch.decode_sequences == 0 || self.decode.covers(batch.decode_rows() as f64, decode))
    }

    /// Time of the decoding sequences of a step. Draft tokens cost as much as so many more sequences, times what the grid
    /// `drafts` says about tokens of one sequence, compared with those of different ones: they share a context. A step with
    /// drafts never takes less than without.
    fn decode_ns(&self, batch: &BatchShape, context: f64) -> f64 {
        let (sequences, rows) = (batch.decode_sequences as f64, batch.decode_rows() as f64);
        let ns = self.decode.at(rows, context);
        if batch.draft_tokens == 0 {
            return ns;
        }
        let growth = |grid: &Grid| grid.at(rows / sequences, context) / grid.at(1.0, context);
        let share = self.drafts.as_ref().map_or(1.0, |drafts| growth(drafts) / growth(&self.decode));
        let share = if share.is_finite() { share } else { 1.0 };
        (ns * share).max(self.decode.at(sequences, context))
    }
}

/// Mean context of the sequences in prefill, and of those in decode.
fn contexts(batch: &BatchShape) -> (f64, f64) {
    let mean = |total: u64, n: u64| if n == 0 { 0.0 } else { total as f64 / n as f64 };
    (
        mean(batch.prefill_context_tokens, batch.prefill_sequences),
        mean(batch.decode_context_tokens, batch.decode_sequences),
    )
}

impl StepCost for MeasuredTable {
    fn step_ns(&self, batch: &BatchShape) -> u64 {
        let (prefill_context, decode_context) = contexts(batch);
        let prefill =
            (batch.prefill_tokens > 0).then(|| self.prefill.at(batch.prefill_tokens as f64, prefill_context));
        let decode = (batch.decode_sequences > 0).then(|| self.decode_ns(batch, decode_context));
        match (prefill, decode) {
            (None, None) => 0,
            (Some(ns), None) | (None, Some(ns)) => whole_ns(ns),
            // A mixed step is never cheaper than the more expensive of its two parts.
            (Some(p), Some(d)) => {
                let both = self.shared.within(batch.prefill_tokens as f64, batch.decode_rows() as f64);
                whole_ns((p + d - both).max(p).max(d))
            }
        }
    }

    fn name(&self) -> String {
        let or = |text: &str, otherwise: &str| {
            if text.is_empty() { otherwise.to_string() } else { text.to_string() }
        };
        format!(
            "measured: {} on {}",
            or(&self.model, "an unnamed model"),
            or(&self.machine, "an unnamed machine")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{ "format": "kvist-step-cost", "version": 1, "machine": "M", "model": "N", "shared_ns": 50,
        "prefill": { "tokens": [1, 101], "context": [0, 1000], "ns": [[100, 200], [1100, 2200]] },
        "decode": { "sequences": [1, 11], "context": [0, 1000], "ns": [[60, 160], [160, 1160]] } }"#;

    fn shape(
        prefill_tokens: u64,
        prefill_context: u64,
        decode_sequences: u64,
        decode_context: u64,
    ) -> BatchShape {
        BatchShape {
            prefill_tokens,
            prefill_sequences: u64::from(prefill_tokens > 0),
            prefill_context_tokens: prefill_context,
            decode_sequences,
            decode_context_tokens: decode_context * decode_sequences,
            ..BatchShape::default()
        }
    }

    #[test]
    fn between_and_beyond_the_measurements() {
        let table = MeasuredTable::parse("t", GOOD).unwrap();
        for (batch, ns, covered) in [
            (shape(0, 0, 0, 0), 0, true),
            (shape(1, 0, 0, 0), 100, true),
            (shape(101, 1000, 0, 0), 2200, true),
            (shape(51, 500, 0, 0), 900, true), // the mean of the four corners
            (shape(201, 0, 0, 0), 2100, false), // the last slope is extrapolated
            (shape(0, 0, 1, 2000), 260, false), // along the context axis too
            (shape(0, 0, 6, 0), 110, true),    // context is a mean, not a sum
            (shape(1, 0, 1, 0), 110, true),    // the shared part is counted once
            (shape(101, 1000, 1, 0), 2210, true), // never less than the more expensive part
        ] {
            assert_eq!(table.step_ns(&batch), ns, "{batch:?}");
            assert_eq!(table.covers(&batch), covered, "{batch:?}");
        }
        assert_eq!(table.name(), "measured: N on M");
    }

    #[test]
    fn what_a_mixed_step_pays_once_depends_on_both_sides() {
        let shared = r#""shared": { "tokens": [1, 101], "sequences": [1, 11], "ns": [[0, 40], [80, 120]] }, "prefill""#;
        let table = MeasuredTable::parse("t", &GOOD.replacen("\"prefill\"", shared, 1)).unwrap();
        for (batch, ns) in [
            (shape(1, 0, 1, 0), 160),                 // no work at all
            (shape(51, 0, 6, 0), 600 + 110 - 60),     // the mean of the four corners, not the constant 50
            (shape(101, 0, 11, 0), 1100 + 160 - 120), // the last corner
            (shape(201, 0, 21, 0), 2100 + 260 - 120), // constant beyond the last corner
        ] {
            assert_eq!(table.step_ns(&batch), ns, "{batch:?}");
        }
        let beyond =
            Range { prefill_tokens: 101.0, sequences: 11.0, draft_rows: None, context_tokens: 1000.0 };
        assert_eq!(table.range(), beyond);
        let bad = GOOD.replacen("\"prefill\"", &shared.replace("[80, 120]", "[80]"), 1);
        let error = MeasuredTable::parse("t", &bad).unwrap_err().to_string();
        assert!(error.contains("`shared`: `ns[1]` has 1 times"), "{error}");
    }

    /// Draft tokens cost what sequences cost, and less where the table says what they share.
    #[test]
    fn what_drafts_cost() {
        let verifying =
            |sequences: u64, drafts: u64| BatchShape { draft_tokens: drafts, ..shape(0, 0, sequences, 0) };
        let plain = MeasuredTable::parse("t", GOOD).unwrap();
        let drafts = r#""drafts": { "rows": [1, 11], "context": [0, 1000], "ns": [[120, 300], [220, 400]] }, "prefill""#;
        let table = MeasuredTable::parse("t", &GOOD.replacen("\"prefill\"", drafts, 1)).unwrap();
        assert_eq!((plain.range().draft_rows, table.range().draft_rows), (None, Some(11.0)));
        for (batch, without, with) in [
            (verifying(1, 0), 60, 60),
            (verifying(6, 0), 110, 110),
            // As many tokens as eleven sequences: 160, times (220 / 120) / (160 / 60).
            (verifying(1, 10), 160, 110),
            // Six tokens of each of two sequences: 170, times (170 / 120) / (110 / 60).
            (verifying(2, 10), 170, 131),
        ] {
            assert_eq!((plain.step_ns(&batch), table.step_ns(&batch)), (without, with), "{batch:?}");
        }
        // Never less than without drafts.
        let free = drafts.replace("[220, 400]", "[0, 0]");
        let table = MeasuredTable::parse("t", &GOOD.replacen("\"prefill\"", &free, 1)).unwrap();
        assert_eq!(table.step_ns(&verifying(1, 10)), 60);
        let bad = GOOD.replacen("\"prefill\"", &drafts.replace("[220, 400]", "[220]"), 1);
        let error = MeasuredTable::parse("t", &bad).unwrap_err().to_string();
        assert!(error.contains("`drafts`: `ns[1]` has 1 times"), "{error}");
    }

    /// A written table is read back unchanged.
    #[test]
    fn a_table_comes_back() {
        let file: TableFile = serde_json::from_str(GOOD).unwrap();
        let file = TableFile {
            setting: Some(Setting { k: "q8".into(), block_tokens: 16, ..Setting::default() }),
            shared: Some(SharedAxes {
                tokens: vec![1.0],
                sequences: vec![1.0, 2.0],
                ns: vec![vec![0.1, 1e6]],
            }),
            drafts: Some(DraftAxes {
                rows: vec![1.0, 2.0],
                context: vec![0.0],
                ns: vec![vec![0.1], vec![0.2]],
            }),
            ..file
        };
        let text = serde_json::to_string(&file).unwrap();
        assert_eq!(serde_json::from_str::<TableFile>(&text).unwrap(), file);
        assert_eq!(MeasuredTable::parse("t", &text).unwrap(), MeasuredTable::new("t", file).unwrap());
    }

    #[test]
    fn files_that_are_no_tables() {
        for (from, to, says) in [
            ("kvist-step-cost", "csv", "`format` is \"csv\""),
            ("\"version\": 1", "\"version\": 2", "`version` is 2"),
            ("[1, 101]", "[101, 1]", "goes from 101 to 1"),
            ("[1, 101]", "[]", "is empty"),
            ("[1, 101]", "[1, 101, 102]", "`ns` has 2 rows, and the first axis 3 values"),
            ("[100, 200]", "[100]", "`ns[0]` has 1 times"),
            ("[100, 200]", "[100, -200]", "contains -200"),
            ("[100, 200]", "[100, 1e17]", "contains 100000000000000000: a time is from 0 to 2^53 ns"),
            ("\"shared_ns\": 50", "\"shared_ns\": -1", "`shared_ns` is -1"),
            ("\"decode\"", "\"encode\"", "missing field `decode`"),
            ("[100, 200]", "[100, \"x\"]", "invalid type"),
        ] {
            let error = MeasuredTable::parse("t.json", &GOOD.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(error.contains(says) && error.starts_with("t.json: "), "{from} -> {to}: {error}");
        }
    }
}
