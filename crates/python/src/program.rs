//! The `kvist` program.
use pyo3::prelude::*;
use std::ffi::OsString;
use std::path::PathBuf;

/// Runs the program `kvist` with these arguments, the first of which is its name, and returns its exit status. `file` is
/// the file of this module.
#[pyfunction]
pub fn run_program(py: Python<'_>, arguments: Vec<OsString>, file: PathBuf) -> u8 {
    kvist_cli::is_in(file);
    py.detach(|| kvist_cli::main(arguments))
}
