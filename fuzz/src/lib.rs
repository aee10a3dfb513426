//! Fuzz targets live in `tests/`, one file per untrusted or clever thing: `cache_ops.rs` drives the cache kinds
//! against their twin.
//!
//! `cargo test -p kvist-fuzz` replays the committed corpus (`tests/__fuzz__/TARGET/corpus/`) and makes a short
//! random run. To search for longer: `BOLERO_RANDOM_ITERATIONS=1000000 cargo test -p kvist-fuzz TARGET`, or guided
//! by coverage, with a nightly toolchain, `cargo bolero test -p kvist-fuzz TARGET`. Commit an input that fails,
//! with its fix, as `tests/__fuzz__/TARGET/crashes/NAME`: it is replayed from then on.
