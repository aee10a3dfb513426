//! The fuzz targets are in `tests/`, one file per parser of untrusted input or complex component: `cache_ops.rs`
//! drives the cache kinds against their reference model.
//!
//! `cargo test -p kvist-fuzz` replays the committed corpus (`tests/__fuzz__/TARGET/corpus/`) and does a short random
//! run. For a longer search: `BOLERO_RANDOM_ITERATIONS=1000000 cargo test -p kvist-fuzz TARGET`, or guided by
//! coverage, with a nightly toolchain, `cargo bolero test -p kvist-fuzz TARGET`. Commit a failing input together with
//! its fix, as `tests/__fuzz__/TARGET/crashes/NAME`: every later run replays it.
