//! Several conversations in one cache. All prompts are prefilled in one step, and every further step decodes one token
//! for each sequence, so that the weights are read once for all of them.
//!
//! `cargo run --release -p kvist-engine --example batched_sequences`
use kvist_cache::SeqId;
use kvist_device::MemoryBudget;
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_engine::{Error, devices};
use kvist_model::{LoadOptions, Model, ModelFile, top_two};
use std::sync::Arc;

const PROMPTS: [&str; 3] = ["The borrow checker", "A trait is", "To open a file for reading, call"];

pub fn main() -> Result<(), Error> {
    let (options, budget) = (LoadOptions::default(), MemoryBudget::unlimited());
    let device = devices::Cpu::default();
    let model = Arc::new(Model::load(&ModelFile::Embedded, device, &options, &budget, &mut |_, _| {})?);
    let tokenizer = model.tokenizer().expect("the embedded model has one");

    // `cells` stores many sequences. The capacity is for all of them together; each needs one row of logits.
    let config = CacheConfig { kind: "cells".into(), max_rows: 3, ..CacheConfig::new(256) };
    let mut session = ModelSession::new(&model, &devices::all(), &config)?;
    let seqs: Vec<SeqId> = (0..3).map(SeqId).collect();
    for seq in &seqs[1..] {
        session.cache().sequences().expect("cells has them").seq_new(*seq)?; // the first one exists already
    }

    let prompts = PROMPTS.map(|text| tokenizer.encode(text, true));
    let prompts = prompts.into_iter().collect::<Result<Vec<_>, _>>()?;
    let feeds: Vec<SequenceInput> =
        seqs.iter().zip(&prompts).map(|(seq, tokens)| SequenceInput::chain(*seq, tokens)).collect();
    session.forward(&feeds, LogitRows::LastOfEach)?; // three prompts of different lengths, one pass

    let mut texts = vec![Vec::new(); 3];
    for _ in 0..24 {
        for (row, text) in texts.iter_mut().enumerate() {
            text.push(top_two(session.logits_row(row)).expect("logits are numbers").0);
        }
        let last: Vec<&[u32]> = texts.iter().map(|text| &text[text.len() - 1..]).collect();
        let feeds: Vec<SequenceInput> =
            seqs.iter().zip(last).map(|(seq, token)| SequenceInput::chain(*seq, token)).collect();
        session.forward(&feeds, LogitRows::LastOfEach)?;
    }
    for (prompt, text) in PROMPTS.iter().zip(&texts) {
        println!("— {prompt}{}\n", tokenizer.decode(text)?);
    }
    let report = &session.cache().report()[0];
    println!("25 steps for {} tokens in {} sequences", report.used_cells, report.sequences.len());
    let tokens: usize = prompts.iter().chain(&texts).map(Vec::len).sum();
    assert_eq!(report.used_cells as usize, tokens);
    Ok(())
}
