//! Continuous batching: requests join while others decode. A long prompt is prefilled in chunks. Each chunk shares its
//! step with one token of each running request, so that no request waits for the prefill. A request that does not fit
//! stays in the queue until another one ends.
//!
//! `cargo run --release -p kvist-engine --example continuous_admission`
use kvist_cache::SeqId;
use kvist_device::MemoryBudget;
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_engine::{Error, devices};
use kvist_model::{LoadOptions, Model, ModelFile, top_two};
use std::collections::VecDeque;
use std::sync::Arc;

const CELLS: usize = 160;
const CHUNK: usize = 24;

struct Request {
    seq: SeqId,
    text: Vec<u32>, // prompt and answer
    fed: usize,
    end: usize,
}

pub fn main() -> Result<(), Error> {
    let (options, budget) = (LoadOptions::default(), MemoryBudget::unlimited());
    let device = devices::Cpu::default();
    let model = Arc::new(Model::load(&ModelFile::Embedded, device, &options, &budget, &mut |_, _| {})?);
    let tokenizer = model.tokenizer().expect("the embedded model has one");
    let config = CacheConfig { kind: "cells".into(), max_rows: 8, ..CacheConfig::new(CELLS as u32) };
    let mut session = ModelSession::new(&model, &devices::all(), &config)?;
    session.cache().sequences().expect("cells has them").seq_rm(SeqId::ONLY, 0, u32::MAX)?;

    let long = "Memory is given back when its owner goes out of scope. ".repeat(4);
    let mut queue = VecDeque::new();
    for (i, (prompt, answer)) in
        [("A trait is", 30), ("The compiler", 12), (&*long, 10), ("Vec", 50)].iter().enumerate()
    {
        let text = tokenizer.encode(prompt, true)?;
        queue.push_back(Request { seq: SeqId(i as u32), fed: 0, end: text.len() + answer, text });
    }
    let (mut running, mut mixed): (Vec<Request>, usize) = (Vec::new(), 0);
    for step in 0.. {
        // Admission: all cells that a request may need must be free. At most one request joins per step.
        let promised: usize = running.iter().map(|r| r.end).sum();
        let fits = queue.front().is_some_and(|r| promised + r.end <= CELLS);
        if fits && let Some(request) = queue.pop_front() {
            session.cache().sequences().expect("cells has them").seq_new(request.seq)?;
            println!("step {step:2}: request {} joins, {} tokens to read", request.seq, request.text.len());
            running.push(request);
        }
        if running.is_empty() {
            break;
        }
        let chunks: Vec<&[u32]> =
            running.iter().map(|r| &r.text[r.fed..r.text.len().min(r.fed + CHUNK)]).collect();
        mixed += usize::from(chunks.iter().any(|c| c.len() > 1) && chunks.iter().any(|c| c.len() == 1));
        let feeds: Vec<SequenceInput> =
            running.iter().zip(&chunks).map(|(r, c)| SequenceInput::chain(r.seq, c)).collect();
        session.forward(&feeds, LogitRows::LastOfEach)?;
        for (row, r) in running.iter_mut().enumerate() {
            r.fed = r.text.len().min(r.fed + CHUNK);
            if r.fed == r.text.len() {
                r.text.push(top_two(session.logits_row(row)).expect("logits are numbers").0);
            }
        }
        for done in running.extract_if(.., |r| r.text.len() > r.end) {
            session.cache().sequences().expect("cells has them").seq_rm(done.seq, 0, u32::MAX)?;
            println!(
                "step {step:2}: request {} ends: {:?}",
                done.seq,
                tokenizer.decode(&done.text[..done.end])?
            );
        }
    }
    println!("{mixed} steps held a prefill and a decode at once");
    assert!(mixed > 0 && queue.is_empty() && session.cache().report()[0].used_cells == 0);
    Ok(())
}
