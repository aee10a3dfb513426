//! Tiers below the cache of an engine.
mod again;
mod channels;
mod deadlines;
mod events;
mod names;
mod preemption;
mod texts;
