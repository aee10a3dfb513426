//! Per-request results.
use super::Objectives;
use crate::request::Request;
use serde::Serialize;
use std::io::{self, Write};

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestOutcome {
    Finished,
    /// Refused by the scheduler.
    Refused,
    Cancelled,
    #[default]
    Unfinished,
    /// A follow-up whose parent did not finish.
    NeverArrived,
}

impl RequestOutcome {
    pub fn name(self) -> &'static str {
        match self {
            RequestOutcome::Finished => "finished",
            RequestOutcome::Refused => "refused",
            RequestOutcome::Cancelled => "cancelled",
            RequestOutcome::Unfinished => "unfinished",
            RequestOutcome::NeverArrived => "never_arrived",
        }
    }
}

/// One request, in virtual time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestRow {
    pub id: u64,
    /// The actual arrival; for a follow-up, after its parent. The earliest one of a request that never arrived.
    pub arrival_ns: u64,
    /// First admission; not changed by a preemption.
    pub admitted_ns: Option<u64>,
    pub first_token_ns: Option<u64>,
    pub finished_ns: Option<u64>,
    pub prompt_tokens: u32,
    /// Generated tokens.
    pub output_tokens: u32,
    /// Prompt tokens found in the cache at the first admission.
    pub hit_tokens: u32,
    pub preemptions: u32,
    pub deadline_ns: Option<u64>,
    pub outcome: RequestOutcome,
}

/// The phase of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Prefill,
    Decode,
}

/// A time span in which a request was part of every step. Between spans it waited or was preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Activity {
    pub request: u64,
    pub phase: Phase,
    pub from_ns: u64,
    pub to_ns: u64,
}

impl RequestRow {
    /// The row of a request that has not arrived yet.
    pub(crate) fn expected(request: &Request) -> RequestRow {
        RequestRow {
            id: request.id,
            arrival_ns: request.arrival_ns,
            prompt_tokens: request.prompt_tokens,
            deadline_ns: request.deadline_ns,
            outcome: RequestOutcome::NeverArrived,
            ..RequestRow::default()
        }
    }
    fn since_arrival_s(&self, moment: Option<u64>) -> Option<f64> {
        Some(moment?.saturating_sub(self.arrival_ns) as f64 / 1e9)
    }
    pub fn queue_s(&self) -> Option<f64> {
        self.since_arrival_s(self.admitted_ns)
    }
    pub fn ttft_s(&self) -> Option<f64> {
        self.since_arrival_s(self.first_token_ns)
    }
    pub fn end_to_end_s(&self) -> Option<f64> {
        self.since_arrival_s(self.finished_ns)
    }
    /// `None` for fewer than two tokens.
    pub fn tpot_s(&self) -> Option<f64> {
        let tokens = self.output_tokens.checked_sub(1).filter(|n| *n > 0)?;
        Some(self.finished_ns?.saturating_sub(self.first_token_ns?) as f64 / 1e9 / f64::from(tokens))
    }
    /// Returns whether it finished after its deadline.
    pub(crate) fn is_late(&self) -> bool {
        self.outcome == RequestOutcome::Finished
            && matches!((self.finished_ns, self.deadline_ns), (Some(end), Some(deadline)) if end > deadline)
    }
    /// Returns whether it finished and met every objective. A single token has no TPOT and meets that objective.
    pub fn meets(&self, objectives: &Objectives) -> bool {
        let within = |took: Option<f64>, bound: Option<f64>| match (took, bound) {
            (Some(took), Some(bound)) => took <= bound,
            _ => true,
        };
        self.outcome == RequestOutcome::Finished
            && within(self.ttft_s(), objectives.ttft_s)
            && within(self.tpot_s(), objectives.tpot_s)
    }
}

/// Writes one line per request after a line of column names. Values that do not exist are left empty.
///
/// # Errors
/// Only I/O errors of `out`.
pub fn write_csv(mut out: impl Write, rows: &[RequestRow]) -> io::Result<()> {
    writeln!(
        out,
        "id,arrival_ns,admitted_ns,first_token_ns,finished_ns,prompt_tokens,output_tokens,hit_tokens,preemptions,deadline_ns,outcome"
    )?;
    let optional = |n: Option<u64>| n.map_or(String::new(), |n| n.to_string());
    for row in rows {
        writeln!(
            out,
            "{},{},{},{},{},{},{},{},{},{},{}",
            row.id,
            row.arrival_ns,
            optional(row.admitted_ns),
            optional(row.first_token_ns),
            optional(row.finished_ns),
            row.prompt_tokens,
            row.output_tokens,
            row.hit_tokens,
            row.preemptions,
            optional(row.deadline_ns),
            row.outcome.name(),
        )?;
    }
    Ok(())
}
