//! The tracing events that a cache emits about its memory, seen by a plain `tracing` subscriber.
//!
//! A program of its own: `tracing` keeps for the whole process who listens to an event. While one thread listens, another that emits
//! the event for the first time can turn it off for all.
mod decoding;
use decoding::*;
use kvist_cache::*;
use kvist_cpu::Cpu;
use kvist_device::*;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

#[derive(Clone, Debug)]
struct Told {
    name: &'static str,
    target: String,
    level: Level,
    fields: BTreeMap<&'static str, String>,
}

impl Visit for Told {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.fields.insert(field.name(), format!("{value:?}"));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.into());
    }
}

#[derive(Clone, Default)]
struct Listener(Arc<Mutex<Vec<Told>>>);

impl Subscriber for Listener {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let meta = event.metadata();
        let (name, target, level) = (meta.name(), meta.target().to_string(), *meta.level());
        let mut told = Told { name, target, level, fields: BTreeMap::new() };
        event.record(&mut told);
        self.0.lock().unwrap().push(told);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_cache_tells_what_it_takes_and_gives_back() {
    let free = Model::default();
    let spec = free.spec(vec![1_000]);
    let usage = |cells| Cpu::default().usage(&spec, &[cells]).unwrap();
    let model = Model { budget: MemoryBudget::new(usage(512).total()), ..free.clone() };
    let listener = Listener::default();
    tracing::subscriber::with_default(listener.clone(), || {
        let mut session = model.session(&Cpu::default(), "contiguous", 1_000);
        for start in [0, 200, 400] {
            model.step(&mut session, &[Span::chain(A, start, if start == 400 { 112 } else { 200 })], 1);
        }
        let spans = [Span::chain(A, 512, 1)];
        assert!(session.step(&StepRequest { spans: &spans }).is_err(), "the 513th token does not fit");
    });
    let told = listener.0.lock().unwrap().clone();
    let kv = |cells| usage(cells).of(Purpose::KvCache);
    // name, level, bytes, error_kind, and words of the sentence
    let expected = [
        ("kv_cache.allocate", Level::INFO, kv(256), "", "Allocated 256 KiB"),
        ("kv_cache.grow", Level::INFO, kv(512) - kv(256), "", "to 512 KiB"),
        ("kv_cache.refuse", Level::WARN, kv(1_000) - kv(512), "out_of_budget", "refused"),
        ("kv_cache.free", Level::INFO, kv(512), "", "Freed 512 KiB"),
    ];
    let names: Vec<&str> = told.iter().map(|told| told.name).collect();
    assert_eq!(names, expected.map(|row| row.0), "{told:#?}");
    for (told, (name, level, bytes, error_kind, words)) in told.iter().zip(expected) {
        assert_eq!((told.target.as_str(), told.level), ("kvist::memory", level), "{name}");
        let message = &told.fields["message"];
        assert!(message.contains(words), "{name}: {message}");
        let fields = [
            ("action", name.trim_start_matches("kv_cache.").to_string()),
            ("target", "kv-cache".into()),
            ("device", "cpu".into()),
            ("bytes", bytes.to_string()),
            ("max_tokens", "1000".into()),
            ("layers", "2".into()),
            ("error_kind", error_kind.into()),
        ];
        for (field, value) in fields {
            assert_eq!(told.fields.get(field), Some(&value), "{name}: {field}");
        }
    }
}

/// A cache that never allocated KV bytes emits nothing.
#[test]
fn an_empty_cache_is_silent() {
    let listener = Listener::default();
    tracing::subscriber::with_default(listener.clone(), || {
        drop(Model::default().session(&Cpu::default(), "cells", 1_000));
    });
    assert!(listener.0.lock().unwrap().is_empty());
}
