//! An agent that tries several continuations at once. The common prefix is prefilled once and every branch shares its
//! cells. The best branch is kept and the others are removed. No KV byte is copied.
//!
//! `cargo run --release -p kvist-engine --example agent_fork`
use kvist_cache::SeqId;
use kvist_device::MemoryBudget;
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_engine::{Error, devices};
use kvist_model::{LoadOptions, Model, ModelFile, top_two};
use std::sync::Arc;

const TRUNK: &str =
    "A program that reads a file can fail in many ways. The function returns a `Result`, and its caller";
const WAYS: [&str; 3] = [" must check", " can use the `?` operator", " may panic"];

pub fn main() -> Result<(), Error> {
    let (options, budget) = (LoadOptions::default(), MemoryBudget::unlimited());
    let device = devices::Cpu::default();
    let model = Arc::new(Model::load(&ModelFile::Embedded, device, &options, &budget, &mut |_, _| {})?);
    let tokenizer = model.tokenizer().expect("the embedded model has one");
    let config = CacheConfig { kind: "cells".into(), max_rows: 3, ..CacheConfig::new(512) };
    let mut session = ModelSession::new(&model, &devices::all(), &config)?;

    let trunk = tokenizer.encode(TRUNK, true)?;
    session.prefill(SeqId::ONLY, &trunk, &mut |_| true)?;
    let branches: Vec<SeqId> = (1..=3).map(SeqId).collect();
    for branch in &branches {
        session.cache().sequences().expect("cells has them").fork(SeqId::ONLY, *branch)?;
    }
    assert_eq!(
        session.cache().report()[0].used_cells as usize,
        trunk.len(),
        "three more owners, no more cells"
    );

    // All branches decode in the same steps. The sum of the logit leads measures how certain the model was.
    let mut next = WAYS.map(|way| tokenizer.encode(way, false)).into_iter().collect::<Result<Vec<_>, _>>()?;
    let (mut texts, mut sure) = (next.clone(), [0.0; 3]);
    for _ in 0..16 {
        let feeds: Vec<SequenceInput> =
            branches.iter().zip(&next).map(|(seq, tokens)| SequenceInput::chain(*seq, tokens)).collect();
        session.forward(&feeds, LogitRows::LastOfEach)?;
        for branch in 0..3 {
            let (token, lead) = top_two(session.logits_row(branch)).expect("logits are numbers");
            sure[branch] += lead;
            texts[branch].push(token);
            next[branch] = vec![token];
        }
    }
    for (text, sure) in texts.iter().zip(sure) {
        println!("{sure:5.1} …{}\n", tokenizer.decode(text)?);
    }
    let best = (0..3).max_by(|a, b| sure[*a].total_cmp(&sure[*b])).unwrap_or(0);

    let used = session.cache().report()[0].used_cells;
    session.cache().sequences().expect("cells has them").seq_keep(branches[best], 0, u32::MAX)?;
    let kept = session.cache().report()[0].used_cells;
    let moved = session.counters().bytes_moved;
    println!("trunk of {} tokens read once for {} branches", trunk.len(), branches.len());
    println!("kept branch {}: {used} cells in use before, {kept} after; {moved} KV bytes copied", best + 1);
    assert_eq!(moved, 0);
    assert_eq!(Some(kept), session.cache().seq_len(branches[best]));
    Ok(())
}
