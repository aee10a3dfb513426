//! Tiers below the cache of an engine.
mod again;
mod channels;
mod events;
mod names;
mod preemption;
mod texts;
