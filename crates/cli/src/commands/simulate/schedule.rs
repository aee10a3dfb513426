//! Scheduler options.
use super::spec;
use clap::ValueEnum;
use kvist_scheduler::{Admission, Config, LengthSource, Preempted, PrefixOrder, TokenWork};
use kvist_simulator::request::Request;
use std::time::Duration;

const SCHEDULER: &str = "Scheduler";

#[derive(clap::Args, Clone)]
pub struct ScheduleArgs {
    /// Who goes first: fcfs, sjf, srpt, edf, laxity, priority
    #[arg(long, default_value = "fcfs", value_name = "NAME", help_heading = SCHEDULER)]
    pub schedule: String,
    /// Where a policy that weighs work has the lengths of answers from
    #[arg(long, value_enum, default_value_t = Lengths::MaxNew, help_heading = SCHEDULER)]
    lengths: Lengths,
    /// Tokens that users allow an answer, at least [default: its true length]
    #[arg(long, value_name = "N", help_heading = SCHEDULER)]
    max_new: Option<u32>,
    /// Within which time of its arrival a request that says nothing of it should finish: 30s
    #[arg(long, value_name = "TIME", value_parser = spec::duration, help_heading = SCHEDULER)]
    deadline: Option<Duration>,
    /// Sequences in the batch at most
    #[arg(long, default_value_t = 256, value_name = "N", help_heading = SCHEDULER)]
    max_batch: u32,
    /// Tokens in a step at most
    #[arg(long, default_value_t = 8192, value_name = "N", help_heading = SCHEDULER)]
    batch_tokens: u32,
    /// Admit only what fits to its end, so that nothing is ever preempted for space
    #[arg(long, help_heading = SCHEDULER)]
    conservative: bool,
    /// What a request keeps when a more urgent one takes its place
    #[arg(long, value_enum, default_value_t = Keeps::Recompute, help_heading = SCHEDULER)]
    preempted: Keeps,
    /// Let the longest prefix hit go first among so many at the head of the queue
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = SCHEDULER)]
    prefix_window: Option<u32>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Lengths {
    /// Everybody writes as much as allowed
    MaxNew,
    /// The mean of all answers so far
    RunningMean,
    /// The truth, which no server knows
    Oracle,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Keeps {
    /// Its text; what the prefix cache has lost of it is computed again
    Recompute,
    /// Its blocks too, until somebody in the batch needs them
    Kept,
}

impl ScheduleArgs {
    pub fn max_new(&self) -> Option<u32> {
        self.max_new
    }
    pub fn deadline_ns(&self) -> Option<u64> {
        self.deadline.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
    }
    /// A warning if the requests have nothing that the policy ranks by, so that it behaves as first come, first served.
    pub fn remark(&self, requests: &[Request]) -> Option<String> {
        let policy = self.schedule.as_str();
        match policy {
            "edf" | "laxity"
                if self.deadline.is_none() && requests.iter().all(|r| r.deadline_ns.is_none()) =>
            {
                Some(format!("no request has a deadline, so {policy} goes by arrival: give --deadline"))
            }
            "priority" if requests.iter().all(|r| r.priority == requests[0].priority) => {
                Some("all requests have the same priority, so priority goes by arrival".to_owned())
            }
            _ => None,
        }
    }
    /// Sequences in the batch at most.
    pub fn max_batch(&self) -> u32 {
        self.max_batch
    }
    /// Tokens in a step at most.
    pub fn batch_tokens(&self) -> u32 {
        self.batch_tokens
    }
    /// The scheduler's configuration. `work` is the assumed cost of tokens, if known.
    pub fn config(&self, work: Option<TokenWork>) -> Config {
        let defaults = Config::default();
        Config {
            policy: self.schedule.clone(),
            lengths: match self.lengths {
                Lengths::MaxNew => LengthSource::MaxNew,
                Lengths::RunningMean => LengthSource::RunningMean,
                Lengths::Oracle => LengthSource::Oracle,
            },
            max_batch: self.max_batch,
            max_batch_tokens: self.batch_tokens,
            admission: if self.conservative { Admission::Conservative } else { defaults.admission },
            preempted: match self.preempted {
                Keeps::Recompute => Preempted::Recompute,
                Keeps::Kept => Preempted::Kept,
            },
            work: work.unwrap_or(defaults.work),
            prefix_order: self.prefix_window.map_or(PrefixOrder::Off, PrefixOrder::Window),
            ..defaults
        }
    }
}
