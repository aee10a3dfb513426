//! Policies: one file each, its source cited. This one is the list, and what a policy may know.
//!
//! A policy is a rank, and smaller runs first. A rank may change only when the request itself does (it computed a
//! token, it lost its cache): then the queue is an ordered map and never sorted anew. Where a textbook's rule has a
//! "now" in it (slack, waiting time), now is common to all who are compared, and drops out.
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

/// What a policy may know of a request. The true output length is not in here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Which one.
    pub id: RequestId,
    /// When it arrived.
    pub arrival_ns: u64,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens whose K and V it holds.
    pub cached_tokens: u32,
    /// Tokens it has generated.
    pub generated: u32,
    /// Tokens it may generate.
    pub max_new: u32,
    /// Tokens it is expected to generate in all; more than it has while it goes on.
    pub expected_new: u32,
    /// When it should have finished.
    pub deadline_ns: Option<u64>,
    /// Larger is more urgent.
    pub priority: i32,
}

impl View {
    /// Tokens to compute before the next token can be sampled beside it: 0 for a request that decodes.
    pub fn prefill_left(&self) -> u32 {
        (self.prompt_tokens + self.generated).saturating_sub(self.cached_tokens + 1)
    }
    /// Tokens it is expected still to sample. At least 1: it has not ended.
    pub fn decode_left(&self) -> u32 {
        self.expected_new.saturating_sub(self.generated).max(1)
    }
    /// Expected work that remains, prefill included.
    pub fn work_left_ns(&self, work: TokenWork) -> u64 {
        let prefill = u64::from(self.prefill_left()).saturating_mul(work.prefill_ns);
        prefill.saturating_add(u64::from(self.decode_left()).saturating_mul(work.decode_ns))
    }
    /// The same request as it arrived: nothing computed, nothing generated.
    pub fn as_it_arrived(mut self) -> View {
        self.cached_tokens = 0;
        self.generated = 0;
        self
    }
}

/// A rule of order.
pub trait Policy: Send {
    /// The name that chooses it.
    fn name(&self) -> &'static str;
    /// Its place. A pure function of the view.
    fn rank(&self, r: &View) -> Rank;
    /// May a waiting request take the place of a running one that ranks behind it? Every policy has its
    /// lowest-ranked request preempted when space runs out.
    fn preempts(&self) -> bool {
        false
    }
}

/// Builds a policy from its parameters in the configuration.
pub type BuildPolicy = fn(&Config) -> Box<dyn Policy>;

/// Name and builder of every policy. A new policy: one file and one line.
pub const POLICIES: &[(&str, BuildPolicy)] = &[
    ("fcfs", |_| Box::new(fcfs::Fcfs)),
    ("sjf", |c| Box::new(sjf::Sjf { work: c.work })),
    ("srpt", |c| Box::new(srpt::Srpt { work: c.work })),
    ("edf", |_| Box::new(edf::Edf)),
    ("laxity", |c| Box::new(laxity::Laxity { work: c.work })),
    ("priority", |c| Box::new(priority::Priority { ageing_ns: c.ageing_ns })),
];

/// The policy that the configuration names.
pub fn build_policy(config: &Config) -> Result<Box<dyn Policy>, BadConfig> {
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
