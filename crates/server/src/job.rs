//! What the HTTP side asks of the engine thread, and what it hears back.
use kvist_cache::MissReason;
use kvist_engine::sampler::SamplerConfig;
use kvist_engine::text::Stops;
use std::sync::Arc;
use std::time::Instant;

/// One generation. Tokens in, tokens and text out.
pub struct Job {
    /// Token ids, at least one. With one that lies outside the vocabulary it ends as [`Failure::UnknownToken`].
    pub prompt: Arc<[u32]>,
    /// Tokens to generate at most. 0: the prompt is computed, and that is all.
    pub max_new: u32,
    pub sampling: SamplerConfig,
    /// Added to the logits of these tokens before anything else.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Texts that end the generation; they are not part of it. Shared by the answers of a request.
    pub stop: Arc<Stops>,
    /// Go on when the model says that it is done.
    pub ignore_eos: bool,
    /// Report the log-probability of every token, and of this many of the likeliest beside it.
    pub logprobs: Option<u8>,
    /// The same of the prompt's tokens. All of them are computed: the prefix index has no logits.
    pub prompt_logprobs: bool,
    /// What may come next, if not everything.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Control tokens that have their name as text, where others have none: marks of tool calls.
    pub written: Vec<u32>,
    /// The name of the key that it came with: names share the queue.
    pub tenant: Arc<str>,
    /// Prefixes are shared inside a salt only.
    pub salt: Arc<str>,
    /// Larger is more urgent, where the scheduling policy asks.
    pub priority: i32,
    /// Ended then, wherever it is, with [`Finish::Deadline`].
    pub deadline: Option<Instant>,
    /// Ask the prefix index why it supplied no more.
    pub explain: bool,
    /// Tokens per second to write at, so that a person can watch: the engine waits between its steps while every job that
    /// is live has a pace, and keeps the fastest of them. Beside a job without one it has no effect.
    pub pace: Option<u32>,
    /// What the log and the clients call it.
    pub name: Name,
}

/// What the log and the clients call a job; watchers of the engine are told. Nothing is decided by it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Name {
    /// The id of its request. Empty: it has none.
    pub request: Arc<str>,
    /// The session that it goes on with.
    pub session: Option<Arc<str>>,
}

/// What may be generated next: a grammar.
pub trait Constraint: Send {
    /// Set the logits of all tokens that may not come next to −∞. `[vocab]`. An error ends the generation.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String>;
    /// This token has been taken. Returns whether the text may not go on: the generation ends with [`Finish::EndOfText`].
    fn accept(&mut self, token: u32) -> Result<bool, String>;
}

/// What a generation tells, in this order: `Admitted` once, `Prompt` as often as it takes where that was asked, `Token`
/// for each token, `Done` or `Failed` once.
#[derive(Clone, Debug)]
pub enum Event {
    /// It entered the batch.
    Admitted {
        /// When: before the step in which it was first computed.
        at: Instant,
        /// Tokens of the prompt that the prefix index supplied.
        cached_tokens: u32,
        /// Why no more, if that was asked: as a tenant may know it.
        miss: Option<MissReason>,
    },
    /// Of tokens of the prompt, from the second on: each given those before it.
    Prompt(Vec<LogProb>),
    Token(Token),
    Done(Done),
    /// It can not be served, or not further.
    Failed(Failure),
}

/// One generated token.
#[derive(Clone, Debug)]
pub struct Token {
    pub id: u32,
    /// Text that became final with it: whole characters, no part of a stop string. May be empty.
    pub text: String,
    pub logprob: Option<LogProb>,
}

/// Natural logarithms, of the distribution before temperature and truncation.
#[derive(Clone, Debug)]
pub struct LogProb {
    pub logprob: f32,
    /// The likeliest tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// A generation that ended as generations do.
#[derive(Clone, Debug)]
pub struct Done {
    pub finish: Finish,
    /// Text that was held back, because a stop string might have begun in it.
    pub text: String,
    pub usage: Usage,
}

/// Why it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model said so, or its grammar is complete.
    EndOfText,
    /// This stop string came.
    Stop(String),
    /// `max_new` tokens, or the cache was full.
    Length,
    /// Its deadline passed.
    Deadline,
    /// Its user went away, or the server is going down.
    Cancelled,
}

/// What it took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Of the prompt, supplied by the prefix index.
    pub cached_tokens: u32,
    pub preemptions: u32,
}

/// A job that was taken and can not be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("the request needs more room than the cache has: {needed} tokens of {capacity}")]
    NeverFits { needed: u64, capacity: u64 },
    /// The prompt has a token that the model does not know.
    #[error("the prompt has the token {token}; the model's vocabulary has {vocab}")]
    UnknownToken { token: u32, vocab: u32 },
    /// So many tokens were told and not heard that no more are kept.
    #[error("the answer is not read: {0} of its tokens wait")]
    Unread(usize),
    /// The grammar of the answer grew too large, or nothing that it allows can be written with the model's tokens.
    #[error("{0}")]
    Grammar(String),
    /// The model or its cache failed. What it says is for the log: it may tell of other requests.
    #[error("{0}")]
    Engine(String),
}

/// A job that was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// `waiting` requests of the job's name wait, and there is no place for more. Where `is_shared`, other names have
    /// places that this one cannot take.
    #[error("{}", full(*waiting, *is_shared))]
    Full { waiting: usize, is_shared: bool },
    #[error("the server is shutting down")]
    Draining,
}

/// A name is told what it has itself, and not what others have.
fn full(waiting: usize, is_shared: bool) -> String {
    match is_shared {
        true => format!(
            "the queue is full for this key: {waiting} of its name's requests wait, and the places left are shares of \
             other keys; try again when some are answered"
        ),
        false => format!("the queue is full: {waiting} requests wait; try again when some are answered"),
    }
}
