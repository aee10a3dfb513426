//! `kvist serve` over stores: tiers on a disk and on servers, and sessions that workers share.
#[path = "../program/mod.rs"]
mod program;

mod serve;
mod shared_sessions;
