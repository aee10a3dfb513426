//! Errors from file to token. Messages tell the reader what to do.
use kvist_cache::Refused;
use kvist_device::{BuildError, Bytes, DeviceError, OutOfBudget, StepError};
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}: {source}", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {path}: {source}", path = path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{path} is empty (0 bytes): copy or download it again", path = path.display())]
    Empty { path: PathBuf },
    #[error("{path} is {what}", path = path.display())]
    NotAModel { path: PathBuf, what: String },
    /// The file's contents are inconsistent.
    #[error("{file}: {what}")]
    Malformed { file: String, what: String },
    #[error("{file}: `{field}` {problem}")]
    Config { file: String, field: String, problem: String },
    #[error("{file}: unknown architecture `{found}`; kvist supports {known}")]
    UnknownArchitecture { file: String, found: String, known: String },
    #[error("{file}: the model lacks the tensor `{name}`")]
    MissingTensor { file: String, name: String },
    #[error("{file}: tensor `{name}` has the shape {found:?}; this model needs {expected:?}")]
    TensorShape { file: String, name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("{file}: tensor `{name}` is stored as {found}; kvist reads {known}")]
    TensorEncoding { file: String, name: String, found: String, known: String },
    #[error("tokenizer of {file}: {what}")]
    Tokenizer { file: String, what: String },
    #[error("chat template of {file}: {what}")]
    Template { file: String, what: String },
    /// See [`Halt`](crate::halt::Halt).
    #[error("the work was cancelled before it was done")]
    Halted,
    #[error("{0}")]
    Sampling(String),
    #[error("token {token} lies outside the vocabulary of {vocab} tokens")]
    TokenOutsideVocabulary { token: u32, vocab: usize },
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    #[error(
        "the prompt has {tokens} tokens and the cache holds {context}: shorten it, or give --context {tokens} or more"
    )]
    PromptTooLong { tokens: usize, context: u32 },
    #[error(
        "KV cache for a context of {context} tokens needs {asked}{device} (working memory included); {free} of {total} are free; try {advice}",
        asked = Bytes(*asked), free = Bytes(*free), total = Bytes(*total)
    )]
    CacheTooLarge {
        context: u32,
        asked: u64,
        free: u64,
        total: u64,
        /// ` on` and the name of the GPU; empty on the CPU.
        device: String,
        advice: String,
    },
    #[error(transparent)]
    OutOfBudget(#[from] OutOfBudget),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Paged(#[from] kvist_cache::PagedError),
    #[error("{0}")]
    Usage(String),
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Weights { name, what } => Error::Malformed { file: name, what },
            error => StepError::Device(error).into(),
        }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        StepError::Refused(refused).into()
    }
}
