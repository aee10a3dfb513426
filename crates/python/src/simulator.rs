//! The simulator: the functions behind `kvist.simulate` and `kvist.sweep`.
use crate::errors::{Class, argument, keyword_arguments};
use crate::wait::PATIENCE;
use kvist_cli::{NoResult, Simulated, simulate_with, sweep_with};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, channel};

/// What a run came to.
#[pyclass(frozen, get_all, module = "kvist._native")]
pub struct Simulation {
    /// The report, as JSON.
    report: String,
    /// The report, as a table.
    text: String,
    /// One row per request, as CSV.
    requests_csv: String,
    /// The report, as an HTML page.
    page: String,
    /// The plots: names, and SVG files.
    pictures: Vec<(String, String)>,
    remarks: Vec<String>,
}

/// Runs `work` in a thread, which Ctrl-C stops.
fn stoppable<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&Arc<AtomicBool>) -> Result<T, NoResult> + Send + 'static,
) -> PyResult<T> {
    let stop = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = channel();
    let theirs = stop.clone();
    let thread = std::thread::spawn(move || {
        // The receiver is there until the thread has ended.
        let _ = sender.send(work(&theirs));
    });
    // A channel's receiver must not be shared between threads, and the closures below run one after the other.
    let receiver = std::sync::Mutex::new(receiver);
    let done = loop {
        match py.detach(|| crate::wait::lock(&receiver).recv_timeout(PATIENCE)) {
            Ok(done) => break done,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("the simulation has panicked: this is a bug of kvist"));
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Err(signal) = py.check_signals() {
                    stop.store(true, SeqCst);
                    py.detach(|| drop(thread.join()));
                    return Err(signal);
                }
            }
        }
    };
    done.map_err(|why| match why {
        NoResult::WrongUsage(text) => argument(text),
        NoResult::Failed(text) => Class::Error.with(text),
        NoResult::Stopped => Class::Error.with("the run was stopped"),
    })
}

/// Simulates one load, with the arguments of `kvist simulate`.
#[pyfunction]
pub fn simulate(py: Python<'_>, arguments: Vec<String>) -> PyResult<Simulation> {
    let done = stoppable(py, move |stop| simulate_with(&arguments, stop))?;
    let Simulated { report, text, requests_csv, page, pictures, remarks } = done;
    let remarks = remarks.iter().map(|remark| keyword_arguments(remark)).collect();
    Ok(Simulation { report, text, requests_csv, page, pictures, remarks })
}

/// Runs a sweep, with the arguments of `kvist simulate sweep`, and returns its table as JSON. `file` is that of this
/// module: cells of another build are run again.
#[pyfunction]
pub fn sweep(py: Python<'_>, arguments: Vec<String>, file: std::path::PathBuf) -> PyResult<String> {
    kvist_cli::is_in(file);
    stoppable(py, move |stop| sweep_with(&arguments, stop))
}
