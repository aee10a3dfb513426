//! The jobs that the engine's handle sends to its thread, and the events that come back.
use crate::sampler::SamplerConfig;
use crate::text::Stops;
use kvist_cache::MissReason;
use kvist_scheduler::{MAX_TIERS, NotLoaded, Retention};
use std::sync::Arc;
use std::time::Instant;

/// One generation: prompt tokens in, tokens and text out.
pub struct Job {
    /// Token ids, at least one. An id outside the vocabulary ends the job with [`Failure::UnknownToken`].
    pub prompt: Arc<[u32]>,
    /// Largest number of tokens to generate. With 0 only the prompt is computed.
    pub max_new: u32,
    pub sampling: SamplerConfig,
    /// Added to the logits of these tokens before any other processing.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Stop strings. They are not part of the answer. All answers of a request share them.
    pub stop: Arc<Stops>,
    /// Continue after an end-of-text token.
    pub ignore_eos: bool,
    /// Report the log-probability of every token, and those of this many of the most likely tokens.
    pub logprobs: Option<u8>,
    /// Report the same for the prompt's tokens. The whole prompt is then computed, because the prefix index stores no
    /// logits.
    pub prompt_logprobs: bool,
    /// Restricts which tokens may come next.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Control tokens to write out by name, such as tool call markers. Other control tokens produce no text.
    pub written: Vec<u32>,
    /// The queue is divided among tenants. The server names them as its API keys.
    pub tenant: Arc<str>,
    /// Only requests with the same salt share cached prefixes.
    pub salt: Arc<str>,
    /// Larger is more urgent. Only some scheduling policies use it.
    pub priority: i32,
    /// Keeps the prompt in the prefix index after the job.
    pub retain: Option<Retention>,
    /// The job ends at this time, waiting or running, with [`FinishReason::Deadline`].
    pub deadline: Option<Instant>,
    /// The answer should be complete by this time. The job goes on after it: the target only ranks it, under scheduling policies
    /// that rank by deadlines, as an earlier deadline would.
    pub target: Option<Instant>,
    /// Report why the prefix index supplied no more tokens.
    pub explain: bool,
    /// Tokens per second to generate, slow enough to watch. The engine pauses between its steps while every live job
    /// has a pace, and follows the fastest of them. A single live job without a pace disables it.
    pub pace: Option<u32>,
    /// Name of the job in the log and for clients.
    pub name: JobName,
}

impl Job {
    /// A job with greedy sampling and nothing optional: no stop strings, no grammar, no log-probabilities, no
    /// deadline, the empty tenant and salt.
    pub fn new(prompt: impl Into<Arc<[u32]>>, max_new: u32) -> Self {
        Job {
            prompt: prompt.into(),
            max_new,
            sampling: SamplerConfig::greedy(),
            logit_bias: [].into(),
            stop: Arc::default(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: false,
            constraint: None,
            written: Vec::new(),
            tenant: "".into(),
            salt: "".into(),
            priority: 0,
            retain: None,
            deadline: None,
            target: None,
            explain: false,
            pace: None,
            name: JobName::default(),
        }
    }
}

/// Name of a job in the log and for clients. Engine watchers receive it. It affects no decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobName {
    /// Id of the request. Empty if there is none.
    pub request: Arc<str>,
    /// The session that the job continues.
    pub session: Option<Arc<str>>,
}

/// Restricts the tokens that may be generated next: a grammar.
pub trait Constraint: Send {
    /// Set the logits of all tokens that may not come next to −∞. Shape `[vocab]`. An error ends the generation.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String>;
    /// Advance by a token that was sampled. Returns true if the text is complete: the generation then ends with
    /// [`FinishReason::EndOfText`].
    fn accept(&mut self, token: u32) -> Result<bool, String>;
}

/// What a generation reports, in this order: `Admitted` once, `Prompt` any number of times if requested, `Token` for
/// each token, and `Done` or `Failed` once.
#[derive(Clone, Debug)]
pub enum Event {
    /// The scheduler admitted the job to the batch.
    Admitted {
        /// Time of admission: before the step that first computed the job.
        at: Instant,
        /// Prompt tokens that the prefix index or a tier supplied.
        cached_tokens: u32,
        /// Those of them that each tier supplied, the fastest first.
        loaded_tokens: [u32; MAX_TIERS],
        /// Those of them that are of the frozen prefix that the engine was started with, if there is one and if requested.
        frozen_tokens: Option<u32>,
        /// Why it supplied no more, if requested. Reduced to what a tenant may know.
        miss: Option<MissReason>,
        /// Why the tiers supplied no more, if one has more or may have, and if requested.
        not_loaded: Option<NotLoaded>,
    },
    /// Log-probabilities of prompt tokens from the second on, each given the tokens before it.
    Prompt(Vec<LogProb>),
    Token(Token),
    Done(Done),
    /// The job cannot be served, or cannot continue.
    Failed(Failure),
}

/// One generated token.
#[derive(Clone, Debug)]
pub struct Token {
    pub id: u32,
    /// Text that became final with this token: whole characters, no part of a stop string. May be empty.
    pub text: String,
    pub logprob: Option<LogProb>,
}

/// Natural logarithms of probabilities, before temperature and truncation.
#[derive(Clone, Debug)]
pub struct LogProb {
    pub logprob: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// End of a generation that did not fail.
#[derive(Clone, Debug)]
pub struct Done {
    pub finish: FinishReason,
    /// Text that was held back because a stop string might have begun in it.
    pub text: String,
    pub usage: Usage,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model generated an end-of-text token, or the grammar is complete.
    EndOfText,
    /// This stop string was generated.
    Stop(String),
    /// `max_new` tokens were generated, or the cache was full.
    Length,
    /// The deadline passed.
    Deadline,
    /// The client disconnected, or all jobs were cancelled.
    Cancelled,
}

/// Token counts of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Prompt tokens that were not computed: the prefix index or a tier below the cache supplied them.
    pub cached_tokens: u32,
    /// Those of them that were loaded from a tier.
    pub loaded_tokens: u32,
    pub preemptions: u32,
    /// `None` if the engine does not speculate.
    pub drafts: Option<DraftUsage>,
}

/// Draft tokens of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftUsage {
    /// Draft tokens that were verified.
    pub draft_tokens: u64,
    /// Those of them that the model accepted.
    pub accepted_tokens: u64,
}

/// Why a job that was queued cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("the request needs {needed} tokens of the cache, which has only {capacity}")]
    NeverFits { needed: u64, capacity: u64 },
    /// The prompt has a token id outside the vocabulary.
    #[error("the prompt contains the token {token}, but the model's vocabulary has only {vocab} tokens")]
    UnknownToken { token: u32, vocab: u32 },
    /// Too many generated tokens wait for the client to read them. No more are kept.
    #[error("the client does not read the answer: {0} of its tokens are waiting")]
    Unread(usize),
    /// The grammar grew too large, or the model's tokens can write nothing that it allows.
    #[error("{0}")]
    Grammar(String),
    /// The model or its cache failed. The message is for the log only: it may concern other requests.
    #[error("{0}")]
    Engine(String),
}

/// Why a job was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// The queue is full: `waiting` requests of the job's tenant wait. If `is_shared`, the permits that are left are
    /// reserved for other tenants.
    #[error("{}", queue_full(*waiting, *is_shared))]
    Full { waiting: usize, is_shared: bool },
    #[error("the server is shutting down")]
    Draining,
}

/// The message states only how many requests this name has waiting, never those of other names.
fn queue_full(waiting: usize, is_shared: bool) -> String {
    match is_shared {
        true => format!(
            "the queue is full for this key: {waiting} requests of its name are waiting, and the remaining slots \
             are reserved for other keys; try again when some are answered"
        ),
        false => {
            format!("the queue is full: {waiting} requests are waiting; try again when some are answered")
        }
    }
}
