//! Simulates serving without computing any tensor, under virtual time.
//!
//! Requests come from a [`trace`] or a [`workload`]. A [`cost`] model determines how long a step takes. [`report`] and
//! [`html`] present the results. [`zero_service`] replays a trace against an eviction policy alone, with zero service
//! time. [`arena`] replays a load in contiguous allocations and in a paged cache.
//!
//! Guarantee: the same input gives the same bytes. The simulator never reads a clock, never draws random numbers
//! without a seed, and makes no decision that belongs to the serving crates.
#![forbid(unsafe_code)]

pub mod arena;
pub mod cost;
pub mod fleet;
pub mod html;
pub mod report;
pub mod request;
pub mod run;
pub mod speculation;
pub mod statistics;
pub mod trace;
pub mod workload;
pub mod zero_service;
