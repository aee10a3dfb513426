//! Measured transfers: every step has its parts, in order. How long they take is not tested.
use crate::common;
use kvist_device::DeviceError;
use kvist_gpu::{HostMemory, MeasureTransfers, TransferCase};

#[test]
fn steps_have_all_their_parts() {
    let Some(device) = common::device() else { return };
    let measurement = device.measurement().unwrap();
    assert!(measurement.link(1 << 16, 2).unwrap() > 0.0);
    for memory in [HostMemory::Pageable, HostMemory::Pinned, HostMemory::Mapped] {
        for (tokens, overlap) in [(1, false), (3, true), (64, true)] {
            let case = TransferCase {
                layers: 3,
                kv_heads: 2,
                head_dim: 33,
                tokens,
                block_tokens: 16,
                memory,
                overlap,
                compute: 2,
            };
            let steps = match measurement.steps(&case, 2, 5) {
                Err(DeviceError::Unsupported(what)) if memory == HostMemory::Mapped => {
                    println!("{what}");
                    continue;
                }
                steps => steps.unwrap(),
            };
            assert_eq!((steps.times.len(), steps.spans.len()), (5, 5));
            for spans in &steps.spans {
                let mut parts = vec![spans.pack, spans.stage];
                assert_eq!(spans.copy.is_some(), spans.scatter.is_some() && memory == HostMemory::Pinned);
                assert_eq!(spans.scatter.is_some(), spans.compute.is_some());
                parts.extend([spans.copy, spans.scatter, spans.compute].into_iter().flatten());
                assert!(parts.iter().all(|(from, to)| from <= to), "{spans:?}");
            }
        }
    }
}
