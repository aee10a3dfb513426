//! Serving without a tensor: what arrives, what a step costs, and what came of it, under virtual time.
//!
//! Requests come from a [`trace`] or a [`workload`]; a [`cost`] model says how long a step takes; [`report`] and
//! [`html`] say what happened. [`zero_service`] replays a trace against an eviction policy alone, where nothing
//! takes any time; [`arena`] lays one load into contiguous handles and into pages.
//!
//! It promises that the same input gives the same bytes. It refuses to read a clock, to draw a random number
//! without a seed, and to decide anything that the serving crates decide.
#![forbid(unsafe_code)]

pub mod arena;
pub mod cost;
pub mod html;
pub mod report;
pub mod request;
pub mod run;
pub mod statistics;
pub mod trace;
pub mod workload;
pub mod zero_service;
