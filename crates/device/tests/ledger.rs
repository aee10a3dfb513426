//! The events that the KV ledger logs and the bytes it returns, as seen by a plain `tracing` subscriber.
//!
//! A program of its own: `tracing` keeps for the whole process who listens to an event. While one thread listens, another that emits
//! the event for the first time can turn it off for all.
use kvist_device::*;
use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// One line per event: its name, level and fields.
#[derive(Clone, Default)]
struct Listener(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "kvist::memory"
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("{} {}:", event.metadata().level(), event.metadata().name()));
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Regression test: no test of this crate covered the event that `drop` logs for the release.
#[test]
fn every_change_is_told_and_the_last_one_too() {
    let listener = Listener::default();
    let budget = MemoryBudget::new(1_000);
    tracing::subscriber::with_default(listener.clone(), || {
        drop(KvLedger::new(&budget, "toy", 8, 2)); // reserved nothing, so it logs nothing
        let mut ledger = KvLedger::new(&budget, "toy", 8, 2);
        ledger.grow(300).unwrap();
        ledger.grow(500).unwrap();
        assert_eq!((ledger.bytes(), budget.free()), (800, 200));
        let refused = ledger.grow(201).unwrap_err();
        assert_eq!((refused.asked, refused.free, ledger.bytes()), (201, 200, 800), "nothing has changed");
        ledger.shrink(100);
        assert_eq!((ledger.bytes(), budget.usage().of(Purpose::KvCache)), (700, 700));
        drop(ledger);
    });
    assert_eq!(budget.usage(), Usage::default());
    let told = listener.0.lock().unwrap().clone();
    let expected = [
        (
            "INFO kv_cache.allocate:",
            "action=\"allocate\"",
            "bytes=300 ",
            "Allocated 300 B of KV cache (at most 8 tokens, 2 layers)",
        ),
        ("INFO kv_cache.grow:", "action=\"grow\"", "bytes=500 ", "Grew the KV cache by 500 B to 800 B"),
        (
            "WARN kv_cache.refuse:",
            "error_kind=\"out_of_budget\"",
            "bytes=201 ",
            "KV cache refused: 201 B asked, 200 B free",
        ),
        (
            "WARN kv_cache.refuse:",
            "error_kind=\"out_of_memory\"",
            "bytes=100 ",
            "the system did not give 100 B",
        ),
        ("INFO kv_cache.free:", "action=\"free\"", "bytes=700 ", "Freed 700 B of KV cache"),
    ];
    assert_eq!(told.len(), expected.len(), "{told:#?}");
    for (line, (name, field, bytes, words)) in told.iter().zip(expected) {
        assert!(line.starts_with(name), "{line}");
        for part in [field, bytes, words, "device=\"toy\"", "target=\"kv-cache\"", "max_tokens=8", "layers=2"]
        {
            assert!(line.contains(part), "{line} does not say {part}");
        }
    }
}
