//! Many requests in the same steps: the executor under a scheduler, the engine's thread, and the tiers below its cache.
#[path = "../common/mod.rs"]
mod common;
#[path = "../engines/mod.rs"]
mod engines;
#[path = "../../../model/tests/common/mod.rs"]
mod models;
#[path = "../oracle/mod.rs"]
mod oracle;

mod engine;
mod executor;
mod executor_speculation;
mod frozen;
mod golden;
mod imports;
mod keep;
mod pace;
mod speculation;
mod tiers;
