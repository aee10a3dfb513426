//! Errors of the crates below as Python exceptions. The classes are defined in `kvist/_errors.py`, because two of them have
//! two bases.
use kvist_cache::{Misuse, NotBlocks, PagedError, Refused};
use kvist_device::{BuildError, DeviceError, StepError};
use kvist_engine::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The classes of `kvist/_errors.py`.
#[derive(Clone, Copy, Debug)]
pub enum Class {
    Error,
    Argument,
    OutOfMemory,
    Refused,
    NoSpace,
    Busy,
    Model,
    File,
    Mismatch,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Class::Error => "Error",
            Class::Argument => "ArgumentError",
            Class::OutOfMemory => "OutOfMemory",
            Class::Refused => "Refused",
            Class::NoSpace => "NoSpace",
            Class::Busy => "Busy",
            Class::Model => "ModelError",
            Class::File => "FileError",
            Class::Mismatch => "MismatchError",
        }
    }

    /// An exception of this class.
    pub fn with(self, text: impl Into<String>) -> PyErr {
        static CLASSES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();
        const ALL: [Class; 9] = [
            Class::Error,
            Class::Argument,
            Class::OutOfMemory,
            Class::Refused,
            Class::NoSpace,
            Class::Busy,
            Class::Model,
            Class::File,
            Class::Mismatch,
        ];
        let text = keyword_arguments(&text.into());
        Python::attach(|py| {
            let classes = CLASSES.get_or_try_init(py, || {
                let module = py.import("kvist._errors")?;
                let class = |class: &Class| Ok(module.getattr(class.name())?.cast_into::<PyType>()?.unbind());
                ALL.iter().map(class).collect::<PyResult<Vec<_>>>()
            });
            match classes {
                Ok(classes) => PyErr::from_type(classes[self as usize].bind(py).clone(), text),
                // The package is incomplete.
                Err(_) => PyRuntimeError::new_err(text),
            }
        })
    }
}

/// The text with keyword arguments for the flags of the program: "give --max-batch 4" is "give `max_batch` 4" here.
/// Only a flag at the beginning of a word counts, so paths stay as they are. What is quoted gets no quotes of its own, and
/// commands in backticks are left alone.
pub fn keyword_arguments(text: &str) -> String {
    let mut done = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("--") {
        let (before, flag) = (&rest[..at], &rest[at + 2..]);
        done.push_str(before);
        let length = flag
            .find(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit() && c != '-')
            .unwrap_or(flag.len());
        let name = flag[..length].replace('-', "_");
        let in_command = done.matches('`').count() % 2 == 1;
        let previous = done.chars().next_back();
        let begins = previous.is_none_or(|c| c.is_whitespace() || matches!(c, '(' | '\'' | '"'));
        if in_command || !begins || !name.starts_with(|c: char| c.is_ascii_lowercase()) {
            done.push_str("--");
            rest = flag;
            continue;
        }
        match previous {
            Some('\'' | '"') => done.push_str(&name),
            _ => done.extend(["`", &name, "`"]),
        }
        rest = &flag[length..];
    }
    done.push_str(rest);
    done
}

/// A bad argument, which is a `ValueError` too.
pub fn argument(text: impl Into<String>) -> PyErr {
    Class::Argument.with(text)
}

pub fn refused(error: &Refused) -> PyErr {
    let class = match error {
        Refused::NoSpace { .. } => Class::NoSpace,
        _ => Class::Refused,
    };
    class.with(error.to_string())
}

pub fn engine(error: Error) -> PyErr {
    let text = error.to_string();
    let class = match error {
        Error::Step(StepError::Refused(why)) => return refused(&why),
        Error::OutOfBudget(_) | Error::CacheTooLarge { .. } => Class::OutOfMemory,
        Error::Step(StepError::Device(DeviceError::OutOfBudget(_))) => Class::OutOfMemory,
        Error::Usage(_)
        | Error::Sampling(_)
        | Error::EmptyPrompt
        | Error::PromptTooLong { .. }
        | Error::TokenOutsideVocabulary { .. }
        | Error::Paged(_)
        | Error::Build(BuildError::Unknown { .. } | BuildError::Kind { .. }) => Class::Argument,
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
        | Error::Template { .. } => Class::Model,
        _ => Class::Error,
    };
    class.with(text)
}

/// A file of a session or a prefix that cannot be read or written.
pub fn file(error: Error) -> PyErr {
    match error {
        Error::Malformed { .. } | Error::Read { .. } | Error::Empty { .. } | Error::Write { .. } => {
            Class::File.with(error.to_string())
        }
        other => engine(other),
    }
}

/// A file whose bytes are right, and that was made with something else.
pub fn mismatch(error: Error) -> PyErr {
    match error {
        Error::Malformed { .. } => Class::Mismatch.with(error.to_string()),
        other => engine(other),
    }
}

pub fn misuse(error: Misuse) -> PyErr {
    match error {
        Misuse::Refused(why) => refused(&why),
        Misuse::NoStep | Misuse::StepInFlight => Class::Busy.with(error.to_string()),
        other => Class::Error.with(other.to_string()),
    }
}

pub fn paged(error: PagedError) -> PyErr {
    argument(error.to_string())
}

pub fn not_blocks(error: NotBlocks) -> PyErr {
    match error {
        NotBlocks::BlockSize { .. } => argument(error.to_string()),
        other => Class::Refused.with(other.to_string()),
    }
}
