//! Measured transfers: every step has its parts, in order. How long they take is not tested.
use crate::common;
use kvist_device::DeviceError;
use kvist_gpu::{HostMemory, MeasureTransfers, RowsFrom, StepSpans, TransferCase};
use std::time::Duration;

fn spans(step: &StepSpans) -> Vec<(Duration, Duration)> {
    let part = |part: &kvist_gpu::PartSpans| [Some(part.pack), Some(part.stage), part.copy, part.scatter];
    let all = step.parts.iter().flat_map(part).chain([step.compute, Some(step.transfer())]);
    all.flatten().collect()
}

#[test]
fn steps_have_all_their_parts() {
    let Some(device) = common::device() else { return };
    let measurement = device.measurement().unwrap();
    assert!(measurement.link(1 << 16, 2).unwrap() > 0.0);
    let host = [HostMemory::Pageable, HostMemory::Pinned, HostMemory::Mapped].map(RowsFrom::Host);
    for from in host.into_iter().chain([RowsFrom::Blocks]) {
        // The last two have two parts.
        for (layers, head_dim, tokens, overlap) in [
            (3, 33, 1, false),
            (3, 33, 3, true),
            (3, 32, 64, true),
            (5, 256, 420, false),
            (5, 256, 420, true),
        ] {
            let case = TransferCase {
                layers,
                kv_heads: 2,
                head_dim,
                tokens,
                block_tokens: 16,
                from,
                overlap,
                compute: 2,
            };
            let steps = match measurement.steps(&case, 1, 2) {
                Err(DeviceError::Unsupported(what))
                    if matches!(from, RowsFrom::Blocks | RowsFrom::Host(HostMemory::Mapped)) =>
                {
                    println!("{what}");
                    continue;
                }
                steps => steps.unwrap(),
            };
            assert_eq!((steps.times.len(), steps.spans.len()), (2, 2));
            let copied = matches!(from, RowsFrom::Blocks | RowsFrom::Host(HostMemory::Pinned));
            for step in &steps.spans {
                assert_eq!(step.parts.len(), if case.bytes() > 4 << 20 { 2 } else { 1 });
                for part in &step.parts {
                    assert_eq!(part.copy.is_some(), part.scatter.is_some() && copied, "no time is lost");
                    assert_eq!(part.scatter.is_some(), step.compute.is_some());
                }
                assert!(spans(step).iter().all(|(from, to)| from <= to), "{step:?}");
                assert!(from != RowsFrom::Blocks || step.parts.iter().all(|part| part.pack.0 == part.pack.1));
            }
        }
    }
}
