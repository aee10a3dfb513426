//! One file per command.
pub mod bench;
pub mod chat;
pub mod devices;
pub mod eval;
pub mod logits;
pub mod models;
pub mod plan;
pub mod prefix;
pub mod run;
pub mod serve;
pub mod simulate;
