//! Scheduler options.
use super::spec;
use crate::options::wrong_usage;
use clap::ValueEnum;
use kvist_scheduler::{Admission, Config, LengthSource, Preempted, PrefixOrder, TokenWork};
use kvist_simulator::request::Request;
use kvist_simulator::run::LengthError;
use std::str::FromStr;
use std::time::Duration;

const SCHEDULER: &str = "Scheduler";

#[derive(clap::Args, Clone)]
pub struct ScheduleArgs {
    /// Order of requests: fcfs, sjf, srpt, edf, laxity, priority
    #[arg(long, default_value = "fcfs", value_name = "NAME", help_heading = SCHEDULER)]
    pub schedule: String,
    /// Source of the lengths of answers, for policies that weigh work: max-new (every answer is as long as its limit allows),
    /// running-mean (the mean of all answers so far), oracle (the true length, which no server knows), or noisy:cv=X (the true
    /// length times a log-normal error of mean 1 and this coefficient of variation; give --max-new too)
    #[arg(long, default_value = "max-new", value_name = "SOURCE", help_heading = SCHEDULER)]
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

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lengths {
    MaxNew,
    RunningMean,
    Oracle,
    /// The truth with an error of this coefficient of variation.
    Noisy(f64),
}

impl FromStr for Lengths {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "max-new" => return Ok(Lengths::MaxNew),
            "running-mean" => return Ok(Lengths::RunningMean),
            "oracle" => return Ok(Lengths::Oracle),
            _ => {}
        }
        let Some(rest) = text.strip_prefix("noisy") else {
            return Err(format!(
                "`{text}` is no source of lengths: use max-new, running-mean, oracle, or noisy:cv=0.5"
            ));
        };
        let variation = rest.strip_prefix(":cv=").and_then(|number| number.parse::<f64>().ok());
        variation.filter(|found| LengthError::is_valid(*found)).map(Lengths::Noisy).ok_or_else(|| {
            let most = LengthError::MAX_VARIATION;
            format!("`{text}` has no coefficient of variation from 0 to {most}: write it as noisy:cv=0.5")
        })
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Keeps {
    /// Its text; what the prefix cache has lost of it is computed again
    Recompute,
    /// Its blocks too, until the batch needs them
    Kept,
}

impl ScheduleArgs {
    /// The value of --lengths if the scheduler is told something about each answer that no server knows.
    pub fn told_lengths(&self) -> Option<&'static str> {
        match self.lengths {
            Lengths::MaxNew | Lengths::RunningMean => None,
            Lengths::Oracle => Some("oracle"),
            Lengths::Noisy(_) => Some("noisy"),
        }
    }

    /// The error of the lengths that the scheduler is told, in a run of the load of `seed`.
    pub fn length_error(&self, seed: u64) -> Option<LengthError> {
        match self.lengths {
            Lengths::Noisy(variation) => Some(LengthError { variation, seed }),
            _ => None,
        }
    }

    /// Refuses errors of lengths that the limits would cut off.
    pub fn check_lengths(&self) -> anyhow::Result<()> {
        if matches!(self.lengths, Lengths::Noisy(_)) && self.max_new.is_none() {
            return Err(wrong_usage(
                "--lengths noisy needs --max-new: without it the limit of a request is its true length, and no estimate is \
                 above the limit. Give one that no answer needs, such as --max-new 100000",
            ));
        }
        Ok(())
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
                Lengths::Oracle | Lengths::Noisy(_) => LengthSource::Oracle,
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
