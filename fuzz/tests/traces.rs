//! The fuzzer's bytes as traces, step cost tables and workload descriptions.
use kvist_simulator::cost::{BatchShape, MeasuredTable, StepCost};
use kvist_simulator::trace::{Format, ReadOptions, Trace};
use kvist_simulator::workload::{Arrivals, Contents, Lengths};

/// Iterations of an ordinary test run; a fuzzing engine sets its own number.
const ITERATIONS: usize = 2_000;

#[test]
fn trace() {
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        let (choice, bytes) = bytes.split_first().unwrap_or((&0, &[]));
        let options = ReadOptions {
            format: Format::ALL.get(usize::from(choice % 8)).copied(),
            lenient: choice & 8 != 0,
            follow_parents: choice & 16 != 0,
            limit: None,
        };
        if let Ok(trace) = Trace::read_from("fuzz", bytes, &options) {
            assert!(trace.requests.iter().all(|r| r.prompt_tokens > 0 && r.output_tokens > 0));
        }
    });
}

#[test]
fn step_costs() {
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        if let Ok(table) = MeasuredTable::parse("fuzz", &String::from_utf8_lossy(bytes)) {
            let mut batch = BatchShape::default();
            batch.add_prefill(10, 100);
            batch.add_decode(1000);
            assert!(table.step_ns(&batch) > 0);
        }
    });
}

#[test]
fn workloads() {
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        let _ = (text.parse::<Arrivals>(), text.parse::<Lengths>(), text.parse::<Contents>());
    });
}
