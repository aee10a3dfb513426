//! WHAT a backend is.
