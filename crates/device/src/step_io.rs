//! The inputs of a step, and the tickets of submissions.
use crate::error::DeviceError;
use crate::mass::MassQueries;
use crate::rows::{RowOutput, WantedRow};
use kvist_cache::{LayerId, StepId, StepPlan};

/// The largest step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    pub max_tokens: usize,
    /// Most wanted rows.
    pub max_rows: usize,
}

/// The inputs of a step. A network copies what it needs before [`Network::submit`](crate::Network::submit) returns.
#[derive(Clone, Copy, Debug)]
pub struct StepInputs<'a> {
    /// The tokens of the plan's spans, in batch order. They must lie inside the vocabulary.
    pub tokens: &'a [u32],
    /// The wanted rows with what each is asked for, ascending; at most [`StepLimits::max_rows`].
    pub rows: &'a [WantedRow],
    /// Layers whose output, the residual stream after them, is returned. [`EMBEDDING`] stands for the input of the first layer.
    pub taps: &'a [LayerId],
    pub given: Given<'a>,
    /// Also return how much attention each cell receives ([`StepOutput::mass`](crate::StepOutput::mass)), from these
    /// queries. Only devices that [say so](crate::Footprint::returns_attention_mass) accept this.
    pub mass: Option<MassQueries>,
}

/// As a tap: the residual stream that enters the first layer, which is the scaled embedding. No layer has this number.
pub const EMBEDDING: LayerId = LayerId(u16::MAX);

/// What a draft head reads in addition to its tokens, a row per token. Other models get nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Given<'a> {
    #[default]
    Nothing,
    /// Outputs of the target's tapped layers, side by side: `[n_tokens, taps × hidden]`.
    Features(&'a [f32]),
    /// The head's own hidden states, its tap 0: `[n_tokens, hidden]`.
    States(&'a [f32]),
}

impl StepInputs<'_> {
    /// Checks what every device relies on: one token per planned token, nothing beyond the limits, and valid parameters
    /// of samples.
    pub fn check(&self, plan: &StepPlan, limits: &StepLimits) -> Result<(), DeviceError> {
        let n = plan.n_tokens() as usize;
        if self.tokens.len() != n || n > limits.max_tokens {
            let expected = vec![n.min(limits.max_tokens)];
            return Err(DeviceError::Shape {
                what: "tokens of a step",
                expected,
                elements: self.tokens.len(),
            });
        }
        if self.rows.len() > limits.max_rows {
            let (index, len) = (self.rows.len() - 1, limits.max_rows);
            return Err(DeviceError::OutOfRange { what: "row of logits", index, len });
        }
        for WantedRow { row, output } in self.rows {
            if *row as usize >= n {
                return Err(DeviceError::OutOfRange { what: "row", index: *row as usize, len: n });
            }
            if let RowOutput::Sample(params) = output {
                params.check().map_err(|what| DeviceError::Unsupported(what.into()))?;
            }
        }
        Ok(())
    }
}

/// Identifies a submission to a device. Tickets of one network ascend;
/// [`Network::last_submission`](crate::Network::last_submission) is the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

impl Ticket {
    /// Precedes all submissions. A transfer that follows it waits for none.
    pub const START: Ticket = Ticket(0);
}

/// Every layer of this step has run. [`InFlight::finish`](crate::InFlight::finish) compares the id with its own step's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayersRan(pub StepId);
