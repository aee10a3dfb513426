//! A text that a batch generates: an iterator over its pieces, also an asynchronous one.
use crate::errors::{Class, argument};
use crate::wait::{PATIENCE, exclusive, ready_within};
use kvist_engine::serving::{Done, Event, Failure, FinishReason, GenerationHandle};
use kvist_scheduler::MAX_TIERS;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// The pieces of a text that a batch generates.
#[pyclass(frozen, module = "kvist")]
pub struct BatchGeneration {
    inner: Mutex<Inner>,
    closed: AtomicBool,
    n_prompt: usize,
    /// Their names, the fastest first.
    tiers: Option<Arc<[String]>>,
    max_tokens: usize,
}

struct Inner {
    /// `None` once the text has ended or was closed; dropping it cancels the job.
    handle: Option<GenerationHandle>,
    text: String,
    tokens: Vec<u32>,
    cached: u32,
    /// By tier.
    loaded: [u32; MAX_TIERS],
    end: Option<Result<FinishReason, Failure>>,
}

const GENERATION: &str = "generation";

pub fn failed(failure: &Failure) -> PyErr {
    match failure {
        Failure::NeverFits { .. } | Failure::UnknownToken { .. } => argument(failure.to_string()),
        other => Class::Error.with(other.to_string()),
    }
}

impl BatchGeneration {
    /// `tiers`: their names, the fastest first.
    pub fn new(
        handle: GenerationHandle,
        n_prompt: usize,
        max_tokens: usize,
        tiers: Option<Arc<[String]>>,
    ) -> Self {
        let inner = Inner {
            handle: Some(handle),
            text: String::new(),
            tokens: Vec::new(),
            cached: 0,
            loaded: [0; MAX_TIERS],
            end: None,
        };
        BatchGeneration {
            inner: Mutex::new(inner),
            closed: AtomicBool::new(false),
            n_prompt,
            tiers,
            max_tokens,
        }
    }

    /// The next piece; `None` at the end.
    fn next_piece(&self, py: Python<'_>) -> PyResult<Option<String>> {
        loop {
            py.check_signals()?;
            let piece = py.detach(|| self.wait())?;
            if let Some(piece) = piece {
                return Ok(Some(piece).filter(|piece| !piece.is_empty()));
            }
        }
    }

    /// Waits for a while: a piece, an empty one at the end, `None` if there is none yet.
    fn wait(&self) -> PyResult<Option<String>> {
        let mut inner = exclusive(GENERATION, &self.inner)?;
        let inner = &mut *inner;
        loop {
            if self.closed.load(SeqCst) {
                inner.handle = None;
            }
            let Some(handle) = &mut inner.handle else {
                return match &inner.end {
                    Some(Err(failure)) => Err(failed(failure)),
                    _ => Ok(Some(String::new())),
                };
            };
            let Some(event) = ready_within(PATIENCE, handle.next()) else { return Ok(None) };
            let piece = match event {
                Some(Event::Admitted { cached_tokens, loaded_tokens, .. }) => {
                    (inner.cached, inner.loaded) = (cached_tokens, loaded_tokens);
                    continue;
                }
                Some(Event::Prompt(_)) => continue,
                Some(Event::Token(token)) => {
                    inner.tokens.push(token.id);
                    token.text
                }
                Some(Event::Done(Done { finish, text, .. })) => {
                    (inner.handle, inner.end) = (None, Some(Ok(finish)));
                    text
                }
                Some(Event::Failed(failure)) => {
                    (inner.handle, inner.end) = (None, Some(Err(failure)));
                    continue;
                }
                None => {
                    (inner.handle, inner.end) = (None, Some(Ok(FinishReason::Cancelled)));
                    continue;
                }
            };
            inner.text += &piece;
            if !piece.is_empty() {
                return Ok(Some(piece));
            }
        }
    }
}

#[pymethods]
impl BatchGeneration {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.next_piece(py)
    }
    fn __aiter__(this: Py<Self>) -> Py<Self> {
        this
    }
    fn __anext__<'py>(this: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        this.py().import("kvist._asynchronous")?.call_method1("next_piece", (this,))
    }
    fn _next(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.next_piece(py)
    }

    /// Waits for the rest and returns the whole text.
    fn result(&self, py: Python<'_>) -> PyResult<String> {
        while self.next_piece(py)?.is_some() {}
        self.text()
    }

    /// Cancels the generation: its memory is free before the next step.
    fn close(&self) {
        self.closed.store(true, SeqCst);
        if let Ok(mut inner) = self.inner.try_lock() {
            inner.handle = None;
        } // else the thread that waits drops it
    }

    /// The text so far.
    #[getter]
    fn text(&self) -> PyResult<String> {
        Ok(exclusive(GENERATION, &self.inner)?.text.clone())
    }
    /// The generated token ids so far.
    #[getter]
    fn tokens(&self) -> PyResult<Vec<u32>> {
        Ok(exclusive(GENERATION, &self.inner)?.tokens.clone())
    }
    /// Tokens of the prompt.
    #[getter]
    fn prompt_tokens(&self) -> usize {
        self.n_prompt
    }
    /// Tokens of the prompt that the prefix index or a tier had.
    #[getter]
    fn cached_tokens(&self) -> PyResult<u32> {
        Ok(exclusive(GENERATION, &self.inner)?.cached)
    }
    /// Those of them that came from each tier, by its name: `ram`, `disk`, `redis`, `s3` or `fs`. Empty without tiers.
    #[getter]
    fn loaded_tokens(&self) -> PyResult<BTreeMap<String, u32>> {
        let loaded = exclusive(GENERATION, &self.inner)?.loaded;
        Ok(self.tiers.iter().flat_map(|names| names.iter().cloned()).zip(loaded).collect())
    }
    /// Why the text has ended; `None` while it goes on.
    #[getter]
    fn finish_reason(&self) -> PyResult<Option<&'static str>> {
        let inner = exclusive(GENERATION, &self.inner)?;
        Ok(match &inner.end {
            Some(Ok(FinishReason::EndOfText)) => Some("end_of_text"),
            Some(Ok(FinishReason::Stop(_))) => Some("stop"),
            Some(Ok(FinishReason::Length)) if inner.tokens.len() >= self.max_tokens => Some("max_tokens"),
            Some(Ok(FinishReason::Length)) => Some("cache_full"),
            Some(Ok(FinishReason::Cancelled | FinishReason::Deadline)) => Some("cancelled"),
            Some(Err(_)) => Some("failed"),
            None if inner.handle.is_none() => Some("cancelled"),
            None => None,
        })
    }
}
