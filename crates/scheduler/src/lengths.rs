//! Output lengths: predicted from public data, or known to an oracle.
use crate::config::{BadConfig, Config, LengthSource};
use crate::policy::{Policy, Rank, View, build_policy};
use crate::request::RequestId;

/// The true output lengths. Only a simulator can implement this; a server does not know them.
pub trait Truth: Send {
    /// Number of tokens that `id` will generate.
    fn output_tokens(&self, id: RequestId) -> u32;
}

/// A policy with access to the true output lengths. No other type stores a [`Truth`].
pub struct OraclePolicy {
    policy: Box<dyn Policy>,
    truth: Box<dyn Truth>,
}

/// Predicts output lengths.
pub trait Lengths: Send {
    /// Predicts the total number of tokens that this request will generate. Called once, on arrival.
    fn expect(&self, r: &View) -> u32;
    /// Called when a request finished with `generated` tokens.
    fn observe(&mut self, _generated: u32) {}
}

/// Predicts that every request generates `max_new` tokens.
struct MaxNew;

impl Lengths for MaxNew {
    fn expect(&self, r: &View) -> u32 {
        r.max_new
    }
}

/// Predicts the mean over all finished requests, rounded up. Integer arithmetic gives the same result on every
/// machine.
#[derive(Default)]
struct RunningMean {
    tokens: u64,
    requests: u64,
}

impl Lengths for RunningMean {
    fn expect(&self, r: &View) -> u32 {
        match self.requests {
            0 => r.max_new,
            n => u32::try_from(self.tokens.div_ceil(n)).unwrap_or(u32::MAX),
        }
    }
    fn observe(&mut self, generated: u32) {
        self.tokens += u64::from(generated);
        self.requests += 1;
    }
}

/// A policy together with its source of output lengths.
pub(crate) enum Order {
    Predicted { policy: Box<dyn Policy>, lengths: Box<dyn Lengths> },
    Oracle(OraclePolicy),
}

impl Order {
    pub fn build(config: &Config, truth: Option<Box<dyn Truth>>) -> Result<Order, BadConfig> {
        let policy = build_policy(config)?;
        let lengths: Box<dyn Lengths> = match (config.lengths, truth) {
            (LengthSource::Oracle, Some(truth)) => return Ok(Order::Oracle(OraclePolicy { policy, truth })),
            (LengthSource::Oracle, None) => {
                return Err(BadConfig::Truth(
                    config.lengths,
                    "only a simulator knows the true lengths: use max_new or running_mean",
                ));
            }
            (_, Some(_)) => {
                return Err(BadConfig::Truth(
                    config.lengths,
                    "true lengths were given: use oracle, or give none",
                ));
            }
            (LengthSource::MaxNew, None) => Box::new(MaxNew),
            (LengthSource::RunningMean, None) => Box::new(RunningMean::default()),
        };
        Ok(Order::Predicted { policy, lengths })
    }

    /// Number of tokens that `r` is expected to generate, from 1 to its `max_new`.
    pub fn expect(&self, r: &View) -> u32 {
        let expected = match self {
            Order::Predicted { lengths, .. } => lengths.expect(r),
            Order::Oracle(oracle) => oracle.truth.output_tokens(r.id),
        };
        expected.clamp(1, r.max_new.max(1))
    }

    pub fn observe(&mut self, generated: u32) {
        if let Order::Predicted { lengths, .. } = self {
            lengths.observe(generated);
        }
    }

    pub fn rank(&self, r: &View) -> Rank {
        self.policy().rank(r)
    }

    pub fn policy(&self) -> &dyn Policy {
        match self {
            Order::Predicted { policy, .. } => &**policy,
            Order::Oracle(oracle) => &*oracle.policy,
        }
    }
}
