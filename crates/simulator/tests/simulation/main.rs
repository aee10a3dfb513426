//! The simulator: what it reads, what it computes, and what it draws. Their files are in `tests/data/` and `tests/pictures/`.
mod arena;
mod che;
mod event_loop;
mod fleet;
mod guide;
mod html;
mod pictures;
mod queueing;
mod report;
mod run;
mod speculation;
mod tiers;
mod trace_speed;
mod traces;
mod workloads;
mod zero_service;
