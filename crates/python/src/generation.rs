//! A text that is being generated: an iterator over its pieces, also an asynchronous one.
use crate::errors::{Class, engine};
use crate::session::{Branch, Core};
use crate::wait::exclusive;
use kvist_engine::generate::{GenerationEnd, Stepwise};
use kvist_model::answers::AnswerSplitter;
use kvist_model::harmony::Delta;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// The pieces of a generated text. Each is computed when it is asked for.
#[pyclass(frozen, module = "kvist")]
pub struct Generation {
    branch: Arc<Mutex<Branch>>,
    inner: Mutex<Inner>,
    closed: AtomicBool,
}

struct Inner {
    stepwise: Stepwise,
    /// The version of the branch that this generation extends.
    version: u64,
    /// Bytes of the engine's text that were looked at.
    seen: usize,
    /// Tokens that the branch knows.
    told: usize,
    /// For models that separate their reasoning from the answer.
    splitter: Option<AnswerSplitter>,
    text: String,
    reasoning: String,
    /// Bytes of `text` that were returned as pieces.
    shown: usize,
}

const GENERATION: &str = "generation";

/// What one pass came to.
enum Pass {
    Piece(String),
    /// No text became final.
    Silent,
    End,
}

impl Generation {
    pub fn new(
        branch: Arc<Mutex<Branch>>,
        stepwise: Stepwise,
        version: u64,
        splitter: Option<AnswerSplitter>,
    ) -> Self {
        let (text, reasoning) = (String::new(), String::new());
        let inner = Inner { stepwise, version, seen: 0, told: 0, splitter, text, reasoning, shown: 0 };
        Generation { branch, inner: Mutex::new(inner), closed: AtomicBool::new(false) }
    }

    /// Runs one pass.
    fn pass(&self, inner: &mut Inner) -> PyResult<Pass> {
        if inner.stepwise.finish().is_none() && !self.closed.load(SeqCst) {
            let mut branch = exclusive("session", &self.branch)?;
            if branch.version != inner.version {
                return Err(Class::Error
                    .with("the session's text has changed since this generation began: begin another one"));
            }
            let pool = branch.pool.clone();
            let mut core = pool.lock();
            core.extends(branch.seq);
            let Core { session, speculator, .. } = &mut *core;
            let stepped = match speculator {
                Some(speculator) => inner.stepwise.step_drafted(session, speculator),
                None => inner.stepwise.step(session),
            };
            stepped.map_err(engine)?;
            let tokens = inner.stepwise.tokens();
            branch.tokens.extend_from_slice(&tokens[inner.told..]);
            inner.told = tokens.len();
        }
        let is_over = inner.stepwise.finish().is_some() || self.closed.load(SeqCst);
        inner.take_text(is_over);
        let piece = inner.text[inner.shown..].to_owned();
        inner.shown = inner.text.len();
        Ok(match piece.is_empty() {
            false => Pass::Piece(piece),
            true if is_over => Pass::End,
            true => Pass::Silent,
        })
    }

    /// The next piece; `None` at the end.
    fn next_piece(&self, py: Python<'_>) -> PyResult<Option<String>> {
        loop {
            // A signal is handled before the pass, so that no piece is lost with it.
            py.check_signals()?;
            let pass = py.detach(|| self.pass(&mut *exclusive(GENERATION, &self.inner)?))?;
            match pass {
                Pass::Piece(piece) => return Ok(Some(piece)),
                Pass::End => return Ok(None),
                Pass::Silent => {}
            }
        }
    }
}

impl Inner {
    /// Takes over what has become final of the engine's text.
    fn take_text(&mut self, is_over: bool) {
        let new = &self.stepwise.text()[self.seen..];
        self.seen += new.len();
        let Some(splitter) = &mut self.splitter else {
            self.text += new;
            return;
        };
        let mut deltas = Vec::new();
        splitter.push(new, &mut deltas);
        if is_over {
            splitter.finish(&mut deltas);
            self.splitter = None; // the text is complete
        }
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => self.reasoning += &text,
                Delta::Content(text) | Delta::Call { arguments: text, .. } => self.text += &text,
            }
        }
    }
}

#[pymethods]
impl Generation {
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

    /// Computes the rest and returns the whole text.
    fn result(&self, py: Python<'_>) -> PyResult<String> {
        while self.next_piece(py)?.is_some() {}
        self.text()
    }

    /// Ends the generation: the iterator stops, and what was computed stays in the session.
    fn close(&self) {
        self.closed.store(true, SeqCst);
    }

    /// The text so far.
    #[getter]
    fn text(&self) -> PyResult<String> {
        Ok(exclusive(GENERATION, &self.inner)?.text.clone())
    }
    /// The reasoning so far, of models that separate it from the answer.
    #[getter]
    fn reasoning(&self) -> PyResult<String> {
        Ok(exclusive(GENERATION, &self.inner)?.reasoning.clone())
    }
    /// The generated token ids so far, with an end token if there was one.
    #[getter]
    fn tokens(&self) -> PyResult<Vec<u32>> {
        Ok(exclusive(GENERATION, &self.inner)?.stepwise.tokens().to_vec())
    }
    /// Number of tokens that had to be computed before the first new one.
    #[getter]
    fn prompt_tokens(&self) -> PyResult<usize> {
        Ok(exclusive(GENERATION, &self.inner)?.stepwise.prompt_tokens())
    }
    /// Why the text has ended; `None` while it goes on.
    #[getter]
    fn finish_reason(&self) -> PyResult<Option<&'static str>> {
        let inner = exclusive(GENERATION, &self.inner)?;
        Ok(match inner.stepwise.finish() {
            Some(finish) => Some(finish.name()),
            None if self.closed.load(SeqCst) => Some(GenerationEnd::Cancelled.name()),
            None => None,
        })
    }
    /// Seconds spent on the prompt with the first token, and on the tokens after it.
    #[getter]
    fn times(&self) -> PyResult<(f64, f64)> {
        let (prefill, decode) = exclusive(GENERATION, &self.inner)?.stepwise.times();
        Ok((prefill.as_secs_f64(), decode.as_secs_f64()))
    }
    fn __repr__(&self) -> String {
        match self.inner.try_lock() {
            Ok(inner) => format!("<kvist.Generation of {} tokens>", inner.stepwise.tokens().len()),
            Err(_) => "<kvist.Generation in use>".to_owned(),
        }
    }
}
