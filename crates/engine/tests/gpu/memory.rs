//! Memory of the device comes back, and what does not fit is refused.
use super::{KINDS, load_on, on};
use crate::common::*;
use crate::{device_of_its_own, place};
use kvist_cache::{LayerId, SeqId};
use kvist_device::*;
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::{ModelFile, Opened};

/// A thousand sessions, opened, used and closed: memory is where it was, by the budget and by the driver's own report.
#[test]
fn a_thousand_sessions_leave_nothing_behind() {
    let Some(device) = device_of_its_own() else { return };
    let file = ModelFile::Path(fixtures("parity/llama-shared-kv"));
    let registry = place(&device).registry();
    let budget = MemoryBudget::new(1 << 30);
    let model = load_on(&device, &file, &budget);
    let open = |i: u32| {
        let storage = [Storage::F16, Storage::Q8, Storage::T4][i as usize % 3];
        let config = CacheConfig { k: storage, v: storage, ..on(exact(KINDS[i as usize % 5], 24, 4)) };
        let mut session = ModelSession::new(&model, &registry, &config).unwrap();
        // Some sessions have steps that repeat.
        for token in 0..if i.is_multiple_of(5) { 3 } else { 1 } {
            let tokens = [(i + token) % 40 + 3];
            session.forward(&[SequenceInput::chain(SeqId::ONLY, &tokens)], LogitRows::None).unwrap();
        }
    };
    // The first sessions compile kernels, and the driver keeps some memory for later.
    (0..15).for_each(open);
    let before = (budget.usage(), device.allocated_bytes());
    let mut most = 0;
    for i in 0..1000 {
        open(i);
        most = most.max(device.allocated_bytes().unwrap_or(0));
    }
    assert_eq!((budget.usage(), device.allocated_bytes()), before);
    // Closed sessions do not pile up in between either.
    if let Some(bytes) = before.1 {
        assert!(most < bytes + (16 << 20), "{most} bytes at most, {bytes} before");
    } else {
        println!("the driver reports no bytes");
    }
}

/// What does not fit is refused before anything is allocated, with tokens, bytes and the device.
#[test]
fn a_session_that_does_not_fit_is_refused_by_name() {
    let Some(device) = device_of_its_own() else { return };
    let file = ModelFile::Path(fixtures("parity/llama-shared-kv"));
    let registry = place(&device).registry();
    let opened = Opened::open_without_texts(&file, true).unwrap();
    let budget = MemoryBudget::new(6 << 20);
    let config = on(exact("contiguous", 1 << 20, 8));
    // A first model: the driver keeps some memory of its upload for later.
    drop(load_on(&device, &file, &budget));
    let before = device.allocated_bytes();
    let error = MemoryPlan::admit(&opened, texts().format, &registry, &config, 1, &budget).unwrap_err();
    let text = error.to_string();
    for part in ["1048576 tokens", "needs", "MiB", "on ", device.adapter(), "--context"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Without an admission the session itself refuses, and leaves nothing.
    let model = load_on(&device, &file, &budget);
    let loaded = (budget.usage(), device.allocated_bytes());
    assert!(ModelSession::new(&model, &registry, &config).is_err());
    assert_eq!((budget.usage(), device.allocated_bytes()), loaded);
    drop(model);
    assert_eq!(device.allocated_bytes(), before);
}

/// Taps took bytes that K and V had been promised, and a full cache was refused its last growth.
#[test]
fn taps_leave_room_for_a_full_cache() {
    const CONTEXT: u32 = 320;
    let Some(device) = device_of_its_own() else { return };
    let file = ModelFile::Path(fixtures("parity/llama-shared-kv"));
    let registry = place(&device).registry();
    let config = on(exact("contiguous", CONTEXT, 16));
    let opened = Opened::open_without_texts(&file, true).unwrap();
    let bound = MemoryPlan::of_session(opened.config(), &registry, &config).unwrap().session_bound();
    let weights = opened.weight_bytes(&device, texts().format).unwrap();
    let taps = [LayerId(0), LayerId(1)];
    let width = taps.len() * opened.config().hidden;
    let tap_bytes = device.tap_bytes(width, &config.step_limits()).unwrap();
    for (less, fits) in [(0, true), (1, false)] {
        let budget = MemoryBudget::new(weights + bound + tap_bytes - less);
        let model = load_on(&device, &file, &budget);
        let loaded = budget.usage();
        let mut session = ModelSession::new(&model, &registry, &config).unwrap();
        session.set_taps(&taps).unwrap();
        let mut step = |at: u32| {
            let tokens: Vec<u32> = (at..at + 16).map(|i| i * 7 % 40 + 3).collect();
            session.forward(&[SequenceInput::chain(SeqId::ONLY, &tokens)], LogitRows::None).map(drop)
        };
        match fits {
            true => (0..CONTEXT).step_by(16).for_each(|at| step(at).unwrap()),
            // At the start, not at the end.
            false => drop(step(0).unwrap_err()),
        }
        drop(session);
        assert_eq!(budget.usage(), loaded);
    }
}
