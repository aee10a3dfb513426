//! Four ways to remove tokens: evict a whole sequence, roll back and continue differently, drop the oldest tokens
//! explicitly, and let a ring drop them in constant memory.
//!
//! `cargo run --release -p kvist-engine --example rollback_and_window`
use kvist_cache::SeqId;
use kvist_device::{Bytes, MemoryBudget};
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_engine::{Error, devices};
use kvist_model::{LoadOptions, Model, ModelFile, top_two};
use std::sync::Arc;

const A: SeqId = SeqId::ONLY;
const B: SeqId = SeqId(1);

/// Decodes greedily, starting with `token`.
fn go_on(session: &mut ModelSession, mut token: u32, n: usize) -> Result<Vec<u32>, Error> {
    let mut said = vec![token];
    while said.len() < n {
        session.forward(&[SequenceInput::chain(A, &[token])], LogitRows::LastOfEach)?;
        token = top_two(session.logits_row(0)).expect("logits are numbers").0;
        said.push(token);
    }
    Ok(said)
}

pub fn main() -> Result<(), Error> {
    let (options, budget) = (LoadOptions::default(), MemoryBudget::unlimited());
    let device = devices::Cpu::default();
    let model = Arc::new(Model::load(&ModelFile::Embedded, device, &options, &budget, &mut |_, _| {})?);
    let tokenizer = model.tokenizer().expect("the embedded model has one");
    let encode = |text: &str| tokenizer.encode(text, true);
    let config = CacheConfig { kind: "cells".into(), ..CacheConfig::new(256) };
    let mut session = ModelSession::new(&model, &devices::all(), &config)?;
    let used = |session: &mut ModelSession| session.cache().report()[0].used_cells;

    let prompt = encode("Rust has two kinds of strings. The first is")?;
    session.cache().sequences().expect("cells has them").seq_new(B)?;
    session.prefill(B, &encode("Another conversation, which will be evicted")?, &mut |_| true)?;
    session.prefill(A, &prompt, &mut |_| true)?;
    let both = used(&mut session);
    session.cache().sequences().expect("cells has them").seq_rm(B, 0, u32::MAX)?;
    println!("evicted: {both} cells in use before, {} after", used(&mut session));
    assert_eq!(used(&mut session) as usize, prompt.len());

    let first = top_two(session.logits_row(0)).expect("logits are numbers").0;
    let said = go_on(&mut session, first, 16)?;
    println!("said:      …{:?}", tokenizer.decode(&said)?);
    session.cache().sequences().expect("cells has them").seq_rm(A, prompt.len() as u32, u32::MAX)?;
    let again = go_on(&mut session, first, 16)?;
    assert_eq!(said, again, "a rollback leaves nothing behind");
    session.cache().sequences().expect("cells has them").seq_rm(A, prompt.len() as u32, u32::MAX)?;
    let other = encode(" a mutable")?;
    println!("backtrack: …{:?}", tokenizer.decode(&go_on(&mut session, other[1], 16)?)?);

    // Positions do not change: the tokens after the gap keep theirs.
    let (len, next) = (session.cache().seq_len(A), session.cache().next_position(A));
    session.cache().sequences().expect("cells has them").seq_rm(A, 2, 10)?;
    println!("dropped the oldest 8 but two: {len:?} tokens before, {:?} after", session.cache().seq_len(A));
    assert_eq!((session.cache().seq_len(A), session.cache().next_position(A)), (len.map(|n| n - 8), next));
    go_on(&mut session, other[1], 4)?;

    let config =
        CacheConfig { kind: "ring".into(), window: Some(64), sinks: 4, max_step_tokens: 16, ..config };
    let mut ring = ModelSession::new(&model, &devices::all(), &config)?;
    ring.prefill(A, &prompt, &mut |_| true)?;
    go_on(&mut ring, first, 300)?;
    let position = ring.cache().next_position(A).unwrap_or(0);
    println!("a ring: {position} tokens went through {}, {} cells", Bytes(ring.kv_bytes()), 4 + 64 + 16 - 1);
    assert_eq!(ring.kv_bytes(), u64::next_multiple_of(4 + 64 + 16 - 1, 16) * 4096); // whole blocks of cells
    Ok(())
}
