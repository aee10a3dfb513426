//! Speculative decoding by hand: a target and a draft, each with a tree cache. The draft proposes a tree, the target verifies
//! all of it in one pass, both commit the same path, and the target's next token is the root of the next tree.
//! (`kvist_engine::speculate` does this for you, with drafters of several kinds.)
//!
//! `cargo run --release -p kvist-engine --example speculative_decoding`
use kvist_cache::{NodeId, SeqId};
use kvist_device::MemoryBudget;
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_engine::{Error, devices};
use kvist_model::weights::WeightFormat;
use kvist_model::{LoadOptions, Model, ModelFile};
use std::sync::Arc;

const SEQ: SeqId = SeqId::ONLY;
const DEPTH: usize = 4;

fn session(format: WeightFormat) -> Result<ModelSession, Error> {
    let options = LoadOptions { format, ..LoadOptions::default() };
    let (device, budget) = (devices::Cpu::default(), MemoryBudget::unlimited());
    let model = Arc::new(Model::load(&ModelFile::Embedded, device, &options, &budget, &mut |_, _| {})?);
    let config = CacheConfig { kind: "tree".into(), max_rows: 16, ..CacheConfig::new(256) };
    ModelSession::new(&model, &devices::all(), &config)
}

/// The `n` most likely tokens of a row of logits.
fn top(logits: &[f32], n: usize) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
    tokens.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    tokens.truncate(n);
    tokens
}

pub fn main() -> Result<(), Error> {
    // The draft is the same model with coarser weights, so that this needs no second file. A real draft is smaller.
    let (mut target, mut draft) = (session(WeightFormat::F32)?, session(WeightFormat::Q8_0)?);
    let model = target.model().clone();
    let tokenizer = model.tokenizer().expect("the embedded model has one");
    let prompt = tokenizer.encode("A vector stores its elements", true)?;
    target.prefill(SEQ, &prompt, &mut |_| true)?;
    draft.prefill(SEQ, &prompt, &mut |_| true)?;
    let mut text = vec![top(target.logits_row(0), 1)[0]];
    let mut passes = 0;
    while text.len() < 40 {
        // Propose: node 0 is the last known token; below it, the two most likely tokens at each depth.
        let (mut tokens, mut parents) = (vec![text[text.len() - 1]], vec![None]);
        draft.forward(&[SequenceInput::draft_tree(SEQ, &tokens, &parents)], LogitRows::All)?;
        for _ in 0..DEPTH {
            let (first, parent) = (tokens.len(), NodeId((tokens.len().max(2) - 2) as u32));
            tokens.extend(top(draft.logits_row(0), 2));
            parents.extend([Some(parent); 2]);
            let level = SequenceInput::draft_tree(SEQ, &tokens[first..], &parents[first..]);
            draft.forward(&[level], LogitRows::All)?;
        }
        // Verify: one pass of the target over the whole tree.
        target.forward(&[SequenceInput::draft_tree(SEQ, &tokens, &parents)], LogitRows::All)?;
        passes += 1;
        let mut path = vec![NodeId(0)];
        loop {
            let at = path[path.len() - 1];
            text.push(top(target.logits_row(at.0 as usize), 1)[0]);
            let accepted =
                (0..tokens.len()).find(|i| parents[*i] == Some(at) && tokens[*i] == text[text.len() - 1]);
            let Some(accepted) = accepted else { break };
            path.push(NodeId(accepted as u32));
        }
        // Commit: the accepted path becomes part of both sequences, the other nodes are freed, and no byte moves.
        for session in [&mut target, &mut draft] {
            session.cache().trees().expect("tree has them").commit_path(SEQ, &path)?;
        }
    }
    println!("{} tokens in {passes} passes: …{:?}", text.len(), tokenizer.decode(&text)?);
    assert!(passes * 2 < text.len(), "a pass gives more than two tokens");
    Ok(())
}
