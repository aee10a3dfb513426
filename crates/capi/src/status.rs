//! Errors as codes, with a text per thread.
use kvist_engine::Error;
use kvist_engine::kvist_cache::{LayerError, Refused};
use kvist_engine::kvist_device::{BuildError, DeviceError, StepError};
use std::cell::RefCell;
use std::ffi::CString;
use std::ffi::c_char;

/// What became of a call. Every function returns one, unless it says otherwise. Where it is not `KVIST_OK`,
/// `kvist_last_error` has a text, and nothing has changed unless the function says otherwise.
#[allow(non_camel_case_types)]
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kvist_status {
    /// The call did what it says.
    KVIST_OK = 0,
    /// An argument is null, not UTF-8, out of range, or does not fit the others.
    KVIST_INVALID_ARGUMENT = 1,
    /// Another thread, or a callback further up on this one, is using the handle. Or as many texts wait in a batch as may.
    KVIST_BUSY = 2,
    /// A model's files cannot be read, or kvist does not support the model.
    KVIST_BAD_MODEL = 3,
    /// The memory budget or the system refuses the memory.
    KVIST_OUT_OF_MEMORY = 4,
    /// The cache has no room for the tokens. Remove or shorten sequences, or add fewer tokens at once.
    KVIST_CACHE_FULL = 5,
    /// The cache refuses the request: a sequence that does not exist, a gap, a path that is no chain.
    KVIST_REFUSED = 6,
    /// The call came at the wrong time: without a step, during one, or a layer out of order.
    KVIST_WRONG_ORDER = 7,
    /// This kind of cache, backend or model does not support the call.
    KVIST_UNSUPPORTED = 8,
    /// A callback stopped the call. What had been computed until then stays in the cache. Or a job was ended because no handle reads it.
    KVIST_STOPPED = 9,
    /// A defect of kvist. The handle of the call can only be freed.
    KVIST_INTERNAL_ERROR = 10,
    /// A saved session or a frozen prefix cannot be read or written, is torn, has changed, or was made with something else.
    /// Nothing of it is used. Or the directory of a tier cannot be used.
    KVIST_BAD_FILE = 11,
}

use kvist_status::*;

/// Why a call failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub status: kvist_status,
    pub text: String,
}

pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub fn new(status: kvist_status, text: impl Into<String>) -> Self {
        Failure { status, text: text.into() }
    }
    pub fn argument(text: impl Into<String>) -> Self {
        Failure::new(KVIST_INVALID_ARGUMENT, text)
    }
    pub fn order(text: impl Into<String>) -> Self {
        Failure::new(KVIST_WRONG_ORDER, text)
    }
    pub fn unsupported(text: impl Into<String>) -> Self {
        Failure::new(KVIST_UNSUPPORTED, text)
    }
}

/// An error about a file of a session or a prefix.
pub(crate) fn bad_file(error: Error) -> Failure {
    match error {
        Error::Malformed { .. } | Error::Read { .. } | Error::Empty { .. } | Error::Write { .. } => {
            Failure::new(KVIST_BAD_FILE, error.to_string())
        }
        other => other.into(),
    }
}

fn status_of_refusal(refused: &Refused) -> kvist_status {
    match refused {
        Refused::NoSpace { .. } => KVIST_CACHE_FULL,
        Refused::Unsupported(_) => KVIST_UNSUPPORTED,
        _ => KVIST_REFUSED,
    }
}

fn status_of_device(error: &DeviceError) -> kvist_status {
    match error {
        DeviceError::OutOfBudget(_) | DeviceError::OutOfMemory { .. } => KVIST_OUT_OF_MEMORY,
        DeviceError::LayerOrder(_) | DeviceError::StalePlan => KVIST_WRONG_ORDER,
        DeviceError::Unsupported(_) => KVIST_UNSUPPORTED,
        _ => KVIST_INVALID_ARGUMENT,
    }
}

fn status_of_step(error: &StepError) -> kvist_status {
    match error {
        StepError::Refused(refused) => status_of_refusal(refused),
        StepError::Device(error) => status_of_device(error),
    }
}

fn status_of_build(error: &BuildError) -> kvist_status {
    match error {
        BuildError::Device(error) => status_of_device(error),
        BuildError::Unknown { .. } | BuildError::Kind { .. } => KVIST_INVALID_ARGUMENT,
    }
}

fn status_of(error: &Error) -> kvist_status {
    match error {
        Error::Read { .. }
        | Error::Empty { .. }
        | Error::NotAModel { .. }
        | Error::Malformed { .. }
        | Error::Config { .. }
        | Error::UnknownArchitecture { .. }
        | Error::MissingTensor { .. }
        | Error::TensorShape { .. }
        | Error::TensorEncoding { .. }
        | Error::Tokenizer { .. }
        | Error::Template { .. } => KVIST_BAD_MODEL,
        Error::CacheTooLarge { .. } | Error::OutOfBudget(_) => KVIST_OUT_OF_MEMORY,
        Error::PromptTooLong { .. } => KVIST_CACHE_FULL,
        Error::Step(error) => status_of_step(error),
        Error::Build(error) => status_of_build(error),
        Error::Halted => KVIST_STOPPED,
        Error::Write { .. }
        | Error::Sampling(_)
        | Error::TokenOutsideVocabulary { .. }
        | Error::EmptyPrompt
        | Error::Paged(_)
        | Error::Usage(_) => KVIST_INVALID_ARGUMENT,
    }
}

macro_rules! failure_from {
    ($($error:ty, $status:expr;)*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Failure::new($status(&error), error.to_string())
            }
        }
    )*};
}
failure_from! {
    Refused, status_of_refusal;
    DeviceError, status_of_device;
    StepError, status_of_step;
    BuildError, status_of_build;
    Error, status_of;
    LayerError, |_: &LayerError| KVIST_WRONG_ORDER;
}

thread_local! {
    /// The text of the last error of this thread; null-terminated.
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Keeps `text` as this thread's last error.
pub(crate) fn set_last_error(text: &str) {
    // A name from a file may contain a zero byte, and C would end there.
    let text = CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default();
    // During the exit of a thread there is no text any more.
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
}

/// The text of this thread's last error; valid until its next failing call.
pub(crate) fn last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
