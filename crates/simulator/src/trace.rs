//! Readers for traces of real requests: published formats and kvist's own format.
//!
//! Each reader handles one format. The format is detected from the content or forced by name; gzip and zstd are
//! detected by their first bytes. A bad row is an error that names the file, line, field, the value found and what was
//! expected; [`ReadOptions::lenient`] counts such rows instead.
//!
//! Guarantees: requests keep the order of the file, no file makes a reader panic, and memory use depends on the
//! requests and one line of at most 32 MiB, not on what a file claims. Readers do not guess: a missing field gets no
//! default, and a count of zero is not rounded up.
mod azure;
mod bailian;
mod burstgpt;
mod mooncake;
mod native;
mod row;
mod source;

use crate::request::Request;
use row::RowError;
use source::Lines;
use std::io::{self, Read};
use std::path::Path;

pub use native::write;

/// The trace format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// JSON lines of Mooncake: `timestamp` in ms, one id per 512 tokens of the prompt.
    Mooncake,
    /// CSV of Azure's public dataset: `TIMESTAMP,ContextTokens,GeneratedTokens`.
    Azure,
    /// CSV of BurstGPT; a response of 0 tokens is a failed request.
    BurstGpt,
    /// JSON lines of Qwen-Bailian: `timestamp` in seconds, one id per 16 tokens, chats with parents.
    Bailian,
    /// kvist's own JSON lines, which can express every field of a [`Request`]. Described in docs/traces.md.
    Native,
}

impl Format {
    pub const ALL: [Format; 5] =
        [Format::Mooncake, Format::Azure, Format::BurstGpt, Format::Bailian, Format::Native];

    /// The name used in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            Format::Mooncake => "mooncake",
            Format::Azure => "azure",
            Format::BurstGpt => "burstgpt",
            Format::Bailian => "bailian",
            Format::Native => "kvist",
        }
    }

    pub fn by_name(name: &str) -> Option<Format> {
        Format::ALL.into_iter().find(|format| format.name() == name)
    }
}

/// Options for reading.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadOptions {
    /// `None`: detect from the first line.
    pub format: Option<Format>,
    /// Count and skip bad rows instead of failing at the first.
    pub lenient: bool,
    /// Stop after this many requests.
    pub limit: Option<usize>,
    /// A later turn of a chat arrives no earlier than its predecessor finishes, if the format identifies the
    /// predecessor (Bailian, BurstGPT with sessions). Without this option every request arrives at its recorded time.
    /// kvist's own format stores parents explicitly and is not affected.
    pub follow_parents: bool,
}

/// The contents of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    pub format: Format,
    /// In file order. Arrival times are relative to the earliest request, except in kvist's own format, where they are
    /// kept as written.
    pub requests: Vec<Request>,
    /// Requests that failed according to the file. Not included in `requests`.
    pub failed_rows: u64,
    pub skipped: Skipped,
}

/// Rows that a lenient reader skipped.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Skipped {
    pub rows: u64,
    /// The error messages of the first five.
    pub first: Vec<String>,
}

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("{file}: cannot read it: {source}")]
    Io { file: String, source: io::Error },
    #[error("{file}, line {line}: field `{field}`: found {found}; expected {expected}{advice}")]
    Row { file: String, line: u64, field: String, found: String, expected: String, advice: &'static str },
    #[error(
        "{file}: unknown trace format: the first line is {found}; give the format by name if it is one of {known}"
    )]
    UnknownFormat { file: String, found: String, known: String },
    #[error("{file}: no request in it{detail}")]
    Empty { file: String, detail: String },
}

impl Trace {
    /// Reads `path`.
    ///
    /// # Errors
    /// [`TraceError`]; also if the file has no request at all.
    pub fn read(path: &Path, options: &ReadOptions) -> Result<Trace, TraceError> {
        let name = path.display().to_string();
        let file =
            std::fs::File::open(path).map_err(|source| TraceError::Io { file: name.clone(), source })?;
        Trace::read_from(&name, file, options)
    }

    /// Reads from `input`. `name` is used in error messages.
    ///
    /// # Errors
    /// As [`Trace::read`].
    pub fn read_from(name: &str, input: impl Read, options: &ReadOptions) -> Result<Trace, TraceError> {
        let io = |source| TraceError::Io { file: name.into(), source };
        let mut lines = Lines::new(source::decompressed(input).map_err(io)?);
        let mut reading = Reading { name, options, begun: None };
        while let Some((number, line)) = lines.next().map_err(io)? {
            match line {
                Ok(line) if line.trim().is_empty() => {}
                Ok(line) => {
                    if !reading.line(number, line)? {
                        break;
                    }
                }
                Err(error) => reading.bad(number, error)?,
            }
        }
        reading.finish()
    }

    /// Sorts by arrival; requests with equal times keep file order. A follow-up is sorted by its earliest arrival and
    /// may therefore come before its parent.
    pub fn into_arrival_order(self) -> Vec<Request> {
        let mut requests = self.requests;
        requests.sort_by_key(|request| request.arrival_ns);
        requests
    }
}

/// A parsed row.
enum Row {
    Request {
        /// Relative to the file's own time origin.
        time_ns: u64,
        request: Request,
    },
    /// The file marks the request as failed.
    Failed,
    /// A row that describes the file itself.
    Header,
}

trait RowReader {
    /// Parses one row. `id` becomes the id of the request unless the file specifies one.
    fn row(&mut self, line: &str, id: u64) -> Result<Row, RowError>;
    /// Returns whether the first line of a file names its columns: it made the reader, and is no row.
    fn has_header(&self) -> bool {
        false
    }
    /// Returns whether times are relative to the first request, whatever the file's origin is.
    fn counts_from_first(&self) -> bool {
        true
    }
}

struct Reading<'a> {
    name: &'a str,
    options: &'a ReadOptions,
    begun: Option<Begun>,
}

struct Begun {
    trace: Trace,
    reader: Box<dyn RowReader>,
}

impl Reading<'_> {
    /// Returns false once enough requests were read.
    fn line(&mut self, number: u64, line: &str) -> Result<bool, TraceError> {
        let mut is_header = false;
        if self.begun.is_none() {
            let (format, reader) = self.begin(number, line)?;
            is_header = reader.has_header();
            let trace = Trace { format, requests: Vec::new(), failed_rows: 0, skipped: Skipped::default() };
            self.begun = Some(Begun { trace, reader });
        }
        let limit = self.options.limit.unwrap_or(usize::MAX);
        let Some(Begun { trace, reader }) = &mut self.begun else { return Ok(true) };
        if is_header || limit == 0 {
            return Ok(limit > 0);
        }
        match reader.row(line, trace.requests.len() as u64) {
            Ok(Row::Request { time_ns, mut request }) => {
                request.arrival_ns = time_ns;
                trace.requests.push(request);
            }
            Ok(Row::Failed) => trace.failed_rows += 1,
            Ok(Row::Header) => {}
            Err(error) => self.bad(number, error)?,
        }
        Ok(self.begun.as_ref().is_none_or(|begun| begun.trace.requests.len() < limit))
    }

    /// Creates the reader for a file that begins with `line`. Errors here are never skipped by a lenient reader:
    /// without the first line the others cannot be interpreted.
    fn begin(&self, number: u64, line: &str) -> Result<(Format, Box<dyn RowReader>), TraceError> {
        let Some(format) = self.options.format.or_else(|| recognise(line)) else {
            return Err(TraceError::UnknownFormat {
                file: self.name.into(),
                found: row::shortened(line),
                known: Format::ALL.map(Format::name).join(", "),
            });
        };
        let follow = self.options.follow_parents;
        let reader: Result<Box<dyn RowReader>, RowError> = match format {
            Format::Mooncake => Ok(Box::new(mooncake::Mooncake)),
            Format::Bailian => Ok(Box::new(bailian::Bailian::new(follow))),
            Format::Native => Ok(Box::new(native::Native::default())),
            Format::Azure => azure::Azure::new(line).map(|reader| Box::new(reader) as _),
            Format::BurstGpt => burstgpt::BurstGpt::new(line, follow).map(|reader| Box::new(reader) as _),
        };
        reader.map(|reader| (format, reader)).map_err(|error| self.error(number, error))
    }

    fn error(&self, line: u64, error: RowError) -> TraceError {
        let advice = if self.begun.is_none() || self.options.lenient {
            ""
        } else {
            "; fix the row, or read leniently, which skips such rows and counts them"
        };
        let RowError { field, found, expected } = error;
        TraceError::Row { file: self.name.into(), line, field, found, expected, advice }
    }

    /// Counts a bad row, or returns its error.
    fn bad(&mut self, line: u64, error: RowError) -> Result<(), TraceError> {
        let error = self.error(line, error);
        match &mut self.begun {
            Some(Begun { trace, .. }) if self.options.lenient => {
                trace.skipped.rows += 1;
                if trace.skipped.first.len() < 5 {
                    trace.skipped.first.push(error.to_string());
                }
                Ok(())
            }
            _ => Err(error),
        }
    }

    fn finish(self) -> Result<Trace, TraceError> {
        let empty = |detail: String| TraceError::Empty { file: self.name.into(), detail };
        let Some(Begun { mut trace, reader }) = self.begun else {
            return Err(empty(": it is empty".into()));
        };
        if trace.requests.is_empty() {
            let mut detail =
                format!(": {} rows failed, {} were skipped", trace.failed_rows, trace.skipped.rows);
            if let Some(first) = trace.skipped.first.first() {
                detail += &format!(", the first because of {first}");
            }
            return Err(empty(detail));
        }
        if reader.counts_from_first() {
            let first_ns = trace.requests.iter().map(|request| request.arrival_ns).min().unwrap_or(0);
            for request in &mut trace.requests {
                request.arrival_ns -= first_ns;
            }
        }
        Ok(trace)
    }
}

/// Detects the format of a file that begins with `line`.
fn recognise(line: &str) -> Option<Format> {
    let has = |name: &str| line.contains(name);
    if line.trim_start().starts_with('{') {
        if has("\"kvist-trace\"") {
            Some(Format::Native)
        } else if has("\"chat_id\"") {
            Some(Format::Bailian)
        } else if has("\"input_length\"") && has("\"hash_ids\"") {
            Some(Format::Mooncake)
        } else {
            None
        }
    } else if has("ContextTokens") && has("TIMESTAMP") {
        Some(Format::Azure)
    } else if has("Request tokens") && has("Timestamp") {
        Some(Format::BurstGpt)
    } else {
        None
    }
}
