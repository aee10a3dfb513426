//! Runs random operations against the reference model, for every kind. `KVIST_OPS` sets their number, `KVIST_SEED`
//! the seed. A failing drive prints its own seed; `KVIST_SEED` with `KVIST_OPS=1` repeats it alone.
use kvist_testing::reference::{Choices, replay};

const OPERATIONS_PER_DRIVE: u64 = 1_000;

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

struct PrintSeed(u64);
impl Drop for PrintSeed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("KVIST_SEED={} KVIST_OPS=1 repeats the failing drive", self.0);
        }
    }
}

fn drive(kind: &str) {
    let n_operations = from_environment("KVIST_OPS", 100_000);
    let first_seed = from_environment("KVIST_SEED", 1);
    let (mut done, mut seed) = (0, first_seed);
    let started = std::time::Instant::now();
    while done < n_operations {
        let print_seed = PrintSeed(seed);
        done += replay(kind, &mut Choices::from_seed(seed, OPERATIONS_PER_DRIVE));
        std::mem::forget(print_seed);
        seed += 1;
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{kind}: {done} operations in {seconds:.1} s, {:.0} per second", done as f64 / seconds);
}

#[test]
fn contiguous_agrees_with_the_reference_model() {
    drive("contiguous");
}
#[test]
fn ring_agrees_with_the_reference_model() {
    drive("ring");
}
#[test]
fn cells_agree_with_the_reference_model() {
    drive("cells");
}
#[test]
fn tree_agrees_with_the_reference_model() {
    drive("tree");
}
