//! The suite any backend runs.
