//! One conversation: prefills a prompt, then decodes token by token from the cache. Shows how many KV bytes the cache
//! takes and how many are read.
//!
//! `cargo run --release -p kvist-engine --example single_decode`
use kvist_cache::SeqId;
use kvist_device::{Bytes, MemoryBudget};
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_engine::{Error, devices};
use kvist_model::{LoadOptions, Model, ModelFile, top_two};
use std::sync::Arc;

pub fn main() -> Result<(), Error> {
    let (options, budget) = (LoadOptions::default(), MemoryBudget::unlimited());
    let device = devices::Cpu::default();
    let model = Arc::new(Model::load(&ModelFile::Embedded, device, &options, &budget, &mut |_, _| {})?);
    let tokenizer = model.tokenizer().expect("the embedded model has one");

    // The policy: one sequence, K and V in f16, room for 256 tokens.
    let config = CacheConfig { kind: "contiguous".into(), ..CacheConfig::new(256) };
    let mut session = ModelSession::new(&model, &devices::all(), &config)?;

    let prompt = "The borrow checker";
    session.prefill(SeqId::ONLY, &tokenizer.encode(prompt, true)?, &mut |_| true)?;
    print!("{prompt}");
    let mut stream = tokenizer.stream();
    let before = session.counters();
    for _ in 0..40 {
        // Logits of the last token; continue with the most likely one.
        let (token, _lead) = top_two(session.logits_row(0)).expect("logits are numbers");
        print!("{}", stream.push(token)?);
        session.forward(&[SequenceInput::chain(SeqId::ONLY, &[token])], LogitRows::LastOfEach)?;
    }
    println!("{}\n", stream.finish()?);

    let cached = session.cache().next_position(SeqId::ONLY).unwrap_or(0);
    let read = session.counters().bytes_read - before.bytes_read;
    println!("{cached} tokens held in {}", Bytes(session.kv_bytes()));
    println!("{} of KV read per new token: what is held, not what fits", Bytes(read / 40));
    assert!(read / 40 < u64::from(cached) * 4096, "reads are bounded by occupancy");
    Ok(())
}
