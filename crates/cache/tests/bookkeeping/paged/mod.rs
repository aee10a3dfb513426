//! Runs random operations on paged caches with a prefix index, and compares each result with a simple reference
//! model.
//!
//! A cell's bytes are a function of the whole prefix that ends with its token. The memory of this test therefore
//! contains, in each cell, the number of that prefix: reading a wrong block, a false hit, a missing copy, and a write
//! into shared bytes all show as a wrong number.
mod checks;
mod drive;
mod evict;
mod operations;
mod resize;
mod steps;
mod transfers;

use drive::Drive;
use kvist_testing::reference::Choices;

#[test]
fn paged_caches_agree_with_the_reference_model() {
    let n_operations: u64 = std::env::var("KVIST_OPS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000);
    let first: u64 = std::env::var("KVIST_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let per_drive = 400;
    let (mut n_copies_saved, mut n_imported, mut n_parts, mut n_edited, mut n_whole, mut n_moves) =
        (0, 0, 0, 0, 0, 0);
    let mut n_resized = 0;
    for seed in first..first + n_operations.div_ceil(per_drive) {
        let mut choices = Choices::from_seed(seed, per_drive);
        let mut drive = Drive::new(&mut choices);
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while choices.go_on() {
                drive.operate(&mut choices);
            }
        }));
        assert!(
            failed.is_ok(),
            "KVIST_SEED={seed} KVIST_OPS=1 repeats it; last: {:#?}",
            drive.log.iter().rev().take(12).rev().collect::<Vec<_>>()
        );
        n_copies_saved += drive.n_copies_saved;
        n_imported += drive.n_imported;
        n_parts += drive.n_imported_parts;
        n_moves += drive.n_moves;
        n_resized += drive.n_resized;
        n_edited += drive.devices.iter().map(|device| device.n_edited).sum::<u64>();
        n_whole += drive.devices.iter().map(|device| device.n_whole).sum::<u64>();
    }
    assert!(n_operations < 100_000 || n_moves > 500, "few paths move: {n_moves}");
    assert!(n_operations < 100_000 || n_resized > 100, "few blocks move to another capacity: {n_resized}");
    assert!(
        n_operations < 100_000 || n_imported > 100 && n_parts > 10,
        "few imports arrive: {n_imported}, {n_parts} in part"
    );
    assert!(n_operations < 100_000 || n_copies_saved > 100, "few sequences share: {n_copies_saved}");
    assert!(
        n_operations < 100_000 || n_edited > 4 * n_whole,
        "{n_edited} tables were edited, {n_whole} sent"
    );
}
