//! What the scheduler decides: its laws and a reference scheduler under random operations, and its behaviour as tables.
mod common;

mod admission;
mod behaviour;
mod drafts;
mod drive;
mod fused_steps;
mod laws;
mod outcomes;
mod recording;
mod reference;
mod retain;
mod siblings;
mod tiers;
