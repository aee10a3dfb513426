//! Reads are bounded by the stored tokens, never by the capacity.
use crate::decoding::*;
use kvist_cache::kinds::Visibility;
use kvist_cache::*;
use kvist_cpu::Cpu;
use kvist_device::reference::Reference;
use kvist_device::*;

/// Bytes that one call reads.
fn bytes_read(session: &mut Session, run: impl FnOnce(&mut Session)) -> u64 {
    let before = session.pools().counters().bytes_read;
    run(session);
    session.pools().counters().bytes_read - before
}

#[test]
fn a_decode_step_reads_the_tokens_it_sees() {
    for storage in storages() {
        let model = Model { k: storage, v: Storage::F16, n_layers: 3, ..Model::default() };
        // K and V of a token: 2 KV heads of 32 values, in each of 3 layers.
        let per_token = 3 * 2 * (storage.row_bytes(32) + 64);
        for kind in ["contiguous", "cells", "tree"] {
            for capacity in [80, 1_000, 1 << 20] {
                let mut session = model.session(&Cpu::default(), kind, capacity);
                new(&mut session, &[A]);
                model.step(&mut session, &[Span::chain(A, 0, 70)], 1);
                for position in 70..73 {
                    let read = bytes_read(&mut session, |session| {
                        model.step(session, &[Span::chain(A, position, 1)], 1);
                    });
                    let expected = u64::from(position + 1) * per_token;
                    assert_eq!(read, expected, "{kind} {storage}, capacity {capacity}");
                }
            }
        }
    }
}

#[test]
fn a_window_bounds_the_reads() {
    let visibility = Visibility { window: Some(20), sinks: 4 };
    let model = Model { visibility, ..Model::default() };
    let per_token = 2 * 2 * (128 + 128);
    for kind in ["contiguous", "ring", "cells", "tree"] {
        let mut session = model.session(&Cpu::default(), kind, 1_000);
        new(&mut session, &[A]);
        model.step(&mut session, &[Span::chain(A, 0, 200)], 1);
        model.step(&mut session, &[Span::chain(A, 200, 100)], 1);
        let read = bytes_read(&mut session, |session| {
            model.step(session, &[Span::chain(A, 300, 1)], 1);
        });
        assert_eq!(read, 24 * per_token, "{kind}");
    }
}

#[test]
fn a_trunk_is_read_once_however_many_share_it() {
    let backends: [Box<dyn Backend>; 2] = [Box::new(Cpu::default()), Box::new(Reference)];
    for backend in backends {
        let model = Model::default();
        let per_token = 2 * 2 * (128 + 128);
        for kind in ["cells", "tree"] {
            let mut session = model.session(&*backend, kind, 1_000);
            new(&mut session, &[A]);
            model.step(&mut session, &[Span::chain(A, 0, 128)], 1);
            for seq in 1..8 {
                session.cache.sequences().unwrap().fork(A, SeqId(seq)).unwrap();
            }
            let spans: Vec<Span<'_>> = (0..8).map(|seq| Span::chain(SeqId(seq), 128, 1)).collect();
            let read = bytes_read(&mut session, |session| {
                model.step(session, &spans, 1);
            });
            assert_eq!(read, (128 + 8) * per_token, "{} {kind}", backend.id());
        }
    }
}

#[test]
fn writes_and_moves_are_counted() {
    let model = Model::default();
    let per_token = 2 * 2 * (128 + 128);
    let mut session = model.session(&Cpu::default(), "cells", 600);
    new(&mut session, &[A, B]);
    model.step(&mut session, &[Span::chain(A, 0, 30), Span::chain(B, 0, 20)], 1);
    let counters = session.pools().counters();
    assert_eq!((counters.bytes_written, counters.bytes_moved), (50 * per_token, 0));
    session.cache.sequences().unwrap().seq_rm(A, 0, u32::MAX).unwrap();
    session.compact().unwrap();
    let counters = session.pools().counters();
    assert_eq!((counters.bytes_written, counters.bytes_moved), (50 * per_token, 20 * per_token));
}
