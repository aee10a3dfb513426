//! Scheduler options.
use super::spec;
use clap::ValueEnum;
use kvist_scheduler::{Admission, Config, LengthSource, Preempted, PrefixOrder, TokenWork};
use kvist_simulator::request::Request;
use std::time::Duration;

const SCHEDULER: &str = "Scheduler";

#[derive(clap::Args, Clone)]
pub struct ScheduleArgs {
    /// Order of requests: fcfs, sjf, srpt, edf, laxity, priority
    #[arg(long, default_value = "fcfs", value_name = "NAME", help_heading = SCHEDULER)]
    pub schedule: String,
    /// Source of the lengths of answers, for policies that weigh work
    #[arg(long, value_enum, default_value_t = Lengths::MaxNew, help_heading = SCHEDULER)]
    lengths: Lengths,
    /// `max_tokens` of every request, at least [default: the true length of its answer]
    #[arg(long, value_name = "N", help_heading = SCHEDULER)]
    max_new: Option<u32>,
    /// Deadline, from arrival, of requests that have none of their own: 30s
    #[arg(long, value_name = "TIME", value_parser = spec::duration, help_heading = SCHEDULER)]
    deadline: Option<Duration>,
    /// Maximum sequences in the batch
    #[arg(long, default_value_t = 256, value_name = "N", help_heading = SCHEDULER)]
    max_batch: u32,
    /// Maximum tokens of a step
    #[arg(long, default_value_t = 8192, value_name = "N", help_heading = SCHEDULER)]
    batch_tokens: u32,
    /// Admit a request only if all its tokens will fit, so that nothing is preempted for space
    #[arg(long, help_heading = SCHEDULER)]
    conservative: bool,
    /// What a request keeps when a more urgent one takes its place
    #[arg(long, value_enum, default_value_t = Keeps::Recompute, help_heading = SCHEDULER)]
    preempted: Keeps,
    /// Admit the longest prefix hit first, among this many requests at the head of the queue
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = SCHEDULER)]
    prefix_window: Option<u32>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Lengths {
    /// Every answer is as long as its limit allows
    MaxNew,
    /// The mean of all answers so far
    RunningMean,
    /// The true length, which no server knows
    Oracle,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Keeps {
    /// Its text; what the prefix cache has lost of it is computed again
    Recompute,
    /// Its blocks too, until the batch needs them
    Kept,
}

impl ScheduleArgs {
    /// Whether the scheduler is told how long every answer will be.
    pub fn is_oracle(&self) -> bool {
        matches!(self.lengths, Lengths::Oracle)
    }

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
                Some(format!("no request has a deadline, so {policy} ranks by arrival: give --deadline"))
            }
            "priority" if requests.iter().all(|r| r.priority == requests[0].priority) => {
                Some("all requests have the same priority, so priority ranks by arrival".to_owned())
            }
            _ => None,
        }
    }
    /// Maximum sequences in the batch.
    pub fn max_batch(&self) -> u32 {
        self.max_batch
    }
    /// Maximum tokens of a step.
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
