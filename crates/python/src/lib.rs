//! kvist for Python: the extension module `kvist._native`, which the package `kvist` re-exports.
//!
//! A thin layer. It converts arguments and errors, releases the GIL while the engine computes, and turns Ctrl-C into
//! `KeyboardInterrupt` between two passes. What it does is the engine's, the cache's and the simulator's work.
#![deny(unsafe_code)]

mod arguments;
mod attention;
mod batch;
mod batch_generation;
mod bookkeeping;
mod errors;
mod ffi;
mod generation;
mod loading;
mod model;
mod prefix;
mod program;
mod retained;
mod saved;
mod session;
mod simulator;
mod speculation;
mod step;
mod tiers;
mod wait;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<attention::Attention>()?;
    module.add_class::<model::Model>()?;
    module.add_class::<session::Session>()?;
    module.add_class::<saved::SavedSession>()?;
    module.add_class::<saved::Prefix>()?;
    module.add_class::<generation::Generation>()?;
    module.add_class::<batch::Batch>()?;
    module.add_class::<batch_generation::BatchGeneration>()?;
    module.add_class::<tiers::Tiers>()?;
    module.add_class::<bookkeeping::Cache>()?;
    module.add_class::<step::Step>()?;
    module.add_class::<simulator::Simulation>()?;
    module.add_function(wrap_pyfunction!(program::run_program, module)?)?;
    module.add_function(wrap_pyfunction!(simulator::simulate, module)?)?;
    module.add_function(wrap_pyfunction!(simulator::sweep, module)?)?;
    module.add("KINDS", bookkeeping::kinds())?;
    Ok(())
}
