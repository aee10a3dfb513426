//! Texts with their K and V: saved sessions in files, and frozen prefixes, which processes or the sessions of one share.
use crate::arguments::{from_json, to_json};
use crate::errors::{argument, file};
use crate::wait::without_gil;
use kvist_engine::frozen::{FrozenPrefix, SharedPrefix};
use kvist_engine::saved::{self, SavedMessage};
use pyo3::prelude::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file of `Session.save`, for `Model.resume`. Opening it reads it once and compares every hash.
///
/// Args:
///     path: the file.
///
/// Raises:
///     FileError: it cannot be read, is no session, is torn or has changed.
#[pyclass(frozen, module = "kvist")]
pub struct SavedSession {
    pub saved: Arc<saved::SavedSession>,
    path: PathBuf,
}

#[pymethods]
impl SavedSession {
    #[new]
    #[pyo3(signature = (path))]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let saved = without_gil(py, || saved::SavedSession::open(&path).map_err(file))?;
        Ok(SavedSession { saved: Arc::new(saved), path })
    }

    /// The file.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }
    /// The token ids of the whole text.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.saved.tokens().to_vec()
    }
    /// The conversation that the text is, as it was given to `save`; empty for plain text.
    #[getter]
    fn messages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let message = |it: &SavedMessage| json!({"role": it.role, "content": it.content});
        let messages: Vec<Value> = self.saved.messages().iter().map(message).collect();
        from_json(py, &Value::from(messages).to_string())
    }
    /// The kind of cache that it was saved from; `None` in files of older versions. It is resumed in any other.
    #[getter]
    fn kind(&self) -> Option<&str> {
        self.saved.kind()
    }
    fn __len__(&self) -> usize {
        self.saved.tokens().len()
    }
    fn __repr__(&self) -> String {
        format!("<kvist.SavedSession {:?}, {} tokens>", self.path.display().to_string(), self.__len__())
    }
}

/// The beginning of prompts in a file, with its K and V: `Model.freeze_prefix` writes one. Sessions and batches that begin with it
/// do not compute it: on the CPU they attend the file in place, and all processes that use it share one copy in memory; on a GPU they
/// copy it. Opening it reads it once and compares every hash. The file must not change while it is used. `Model.share_prefix` makes one without a file.
///
/// Args:
///     path: the file.
///
/// Raises:
///     FileError: it cannot be read, is no prefix, is torn or has changed.
#[pyclass(frozen, module = "kvist")]
pub struct Prefix {
    pub prefix: SharedPrefix,
}

impl Prefix {
    pub fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let prefix = without_gil(py, || FrozenPrefix::open(&path).map_err(file))?;
        Ok(Prefix { prefix: Arc::new(prefix) })
    }
}

#[pymethods]
impl Prefix {
    #[new]
    #[pyo3(signature = (path))]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Prefix::open(py, path)
    }

    /// The file; `None` if the prefix lies in memory.
    #[getter]
    fn path(&self) -> Option<PathBuf> {
        self.prefix.path().map(Path::to_path_buf)
    }
    /// The token ids of the prefix.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.prefix.tokens().to_vec()
    }
    /// The system message that the tokens begin a conversation with; `None` for plain text.
    #[getter]
    fn system(&self) -> Option<&str> {
        self.prefix.system()
    }
    /// Bytes of the file, also of one in memory.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.prefix.len()
    }
    fn __len__(&self) -> usize {
        self.prefix.tokens().len()
    }
    fn __repr__(&self) -> String {
        format!("<kvist.Prefix {:?}, {} tokens>", self.prefix.name(), self.__len__())
    }
}

/// A file that is open already, or its path.
#[derive(FromPyObject)]
pub enum SavedArgument<'py> {
    Open(PyRef<'py, SavedSession>),
    Path(PathBuf),
}

impl SavedArgument<'_> {
    pub fn get(self, py: Python<'_>) -> PyResult<Arc<saved::SavedSession>> {
        match self {
            SavedArgument::Open(saved) => Ok(saved.saved.clone()),
            SavedArgument::Path(path) => Ok(SavedSession::new(py, path)?.saved),
        }
    }
}

/// A prefix that is open already, or its path.
#[derive(FromPyObject)]
pub enum PrefixArgument<'py> {
    Open(PyRef<'py, Prefix>),
    Path(PathBuf),
}

impl PrefixArgument<'_> {
    pub fn get(self, py: Python<'_>) -> PyResult<SharedPrefix> {
        match self {
            PrefixArgument::Open(prefix) => Ok(prefix.prefix.clone()),
            PrefixArgument::Path(path) => Ok(Prefix::open(py, path)?.prefix),
        }
    }
}

/// Messages for a file, which has their roles and texts. Others are refused, and not silently lost.
pub fn messages(given: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<SavedMessage>> {
    let Some(given) = given else { return Ok(Vec::new()) };
    let Value::Array(items) = to_json("messages", given)? else {
        return Err(argument("`messages` is not a list"));
    };
    let message = |item: &Value| {
        let field = |name: &str| item.get(name).and_then(Value::as_str).map(str::to_owned);
        let only_text = item.as_object().is_some_and(|fields| fields.len() == 2);
        let both = field("role").zip(field("content")).filter(|_| only_text);
        let (role, content) = both.ok_or_else(|| {
            argument(format!("`messages`: {item} cannot be saved: give `role` and `content`, both texts"))
        })?;
        Ok(SavedMessage { role, content })
    };
    items.iter().map(message).collect()
}
