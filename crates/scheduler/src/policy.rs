//! Scheduling policies, one file each, with its source cited. This file has the list of policies and the data they may
//! use.
//!
//! A policy maps a request to a rank; the smallest rank runs first. The rank may change only when the request itself
//! changes (a token was computed, its cache was lost). The queue is therefore an ordered map and is never re-sorted.
//! Where a textbook rule contains the current time (slack, waiting time), that term is the same for all requests being
//! compared and cancels out.
mod edf;
mod fcfs;
mod laxity;
mod priority;
mod sjf;
mod srpt;

use crate::config::{BadConfig, Config, TokenWork};
use crate::request::RequestId;

/// Smaller runs first. Ties go to the earlier arrival.
pub type Rank = i64;

/// What a policy may know about a request. The true output length is not included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The request.
    pub id: RequestId,
    /// When it arrived.
    pub arrival_ns: u64,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Tokens whose K and V are in the cache.
    pub cached_tokens: u32,
    /// Tokens generated so far.
    pub generated: u32,
    /// Maximum tokens to generate.
    pub max_new: u32,
    /// Expected total of generated tokens, estimated on arrival.
    pub expected_new: u32,
    /// When it should be finished.
    pub deadline_ns: Option<u64>,
    /// Larger is more urgent.
    pub priority: i32,
}

impl View {
    /// Tokens left to prefill. Excludes the last known token, which is computed in the step that samples the next one;
    /// so this is 0 for a decoding request.
    pub fn prefill_left(&self) -> u32 {
        (self.prompt_tokens + self.generated).saturating_sub(self.cached_tokens + 1)
    }
    /// Tokens it is expected to generate from now on. At least 1, because it has not ended.
    pub fn decode_left(&self) -> u32 {
        self.expected_new.saturating_sub(self.generated).max(1)
    }
    /// Expected remaining work in nanoseconds, including prefill.
    pub fn work_left_ns(&self, work: TokenWork) -> u64 {
        let prefill = u64::from(self.prefill_left()).saturating_mul(work.prefill_ns);
        prefill.saturating_add(u64::from(self.decode_left()).saturating_mul(work.decode_ns))
    }
    /// The same request as on arrival: nothing computed, nothing generated.
    pub fn as_it_arrived(mut self) -> View {
        self.cached_tokens = 0;
        self.generated = 0;
        self
    }
}

/// A scheduling policy.
pub trait SchedulingPolicy: Send {
    /// The name that selects it in the configuration.
    fn name(&self) -> &'static str;
    /// The rank of a request. A pure function of the view.
    fn rank(&self, r: &View) -> Rank;
    /// Returns whether a waiting request may preempt a running one of lower rank. Independent of this, every policy
    /// preempts the lowest-ranked request when memory runs out.
    fn preempts(&self) -> bool {
        false
    }
}

/// Builds a policy from its parameters in the configuration.
pub type BuildPolicy = fn(&Config) -> Box<dyn SchedulingPolicy>;

/// Name and builder of every policy. To add a policy, add one file and one line here.
pub const POLICIES: &[(&str, BuildPolicy)] = &[
    ("fcfs", |_| Box::new(fcfs::Fcfs)),
    ("sjf", |c| Box::new(sjf::Sjf { work: c.work })),
    ("srpt", |c| Box::new(srpt::Srpt { work: c.work })),
    ("edf", |_| Box::new(edf::Edf)),
    ("laxity", |c| Box::new(laxity::Laxity { work: c.work })),
    ("priority", |c| Box::new(priority::Priority { ageing_ns: c.ageing_ns })),
];

/// Builds the policy named in the configuration.
pub fn build_policy(config: &Config) -> Result<Box<dyn SchedulingPolicy>, BadConfig> {
    match POLICIES.iter().find(|(name, _)| *name == config.policy) {
        Some((_, build)) => Ok(build(config)),
        None => {
            let names: Vec<&str> = POLICIES.iter().map(|(name, _)| *name).collect();
            Err(BadConfig::UnknownPolicy(config.policy.clone(), names.join(", ")))
        }
    }
}

fn rank_of(ns: u64) -> Rank {
    Rank::try_from(ns).unwrap_or(Rank::MAX)
}
