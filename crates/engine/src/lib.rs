//! A model that runs.
