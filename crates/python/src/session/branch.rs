//! The texts of a session, and the engine's session that they share.
use crate::wait::lock;
use kvist_cache::{NodeId, SeqId};
use kvist_engine::Error;
use kvist_engine::session::ModelSession;
use kvist_engine::speculate::Speculator;
use std::sync::{Arc, Mutex, MutexGuard};

/// The engine's session, which the branches use in turn. Its lock is waited for without the GIL only.
pub struct Pool {
    core: Mutex<Core>,
    /// Branches that are gone. Their sequences are removed when the lock is next taken, so that dropping a branch never
    /// waits.
    dropped: Mutex<Vec<Dropped>>,
}

/// What is left of a branch.
struct Dropped {
    seq: SeqId,
    tokens: Vec<u32>,
    /// As in [`Branch`].
    answer: usize,
}

pub struct Core {
    pub session: ModelSession,
    /// Drafts for the texts of all branches; `None` without.
    pub speculator: Option<Speculator>,
    pub next_seq: u32,
    /// The branch that was extended last.
    pub fed: SeqId,
}

impl Core {
    /// Notes which branch is extended now.
    pub fn extends(&mut self, seq: SeqId) {
        self.fed = seq;
    }
}

impl Pool {
    pub fn new(core: Core) -> Self {
        Pool { core: Mutex::new(core), dropped: Mutex::default() }
    }

    pub fn lock(&self) -> MutexGuard<'_, Core> {
        let mut core = lock(&self.core);
        for Dropped { seq, tokens, answer } in std::mem::take(&mut *lock(&self.dropped)) {
            if let Some(speculator) = &mut core.speculator {
                speculator.end(u64::from(seq.0), "", &tokens, answer);
            }
            if let Some(mut sequences) = core.session.cache().sequences() {
                // A sequence that is not there needs no removal.
                let _ = sequences.seq_rm(seq, 0, u32::MAX);
            }
        }
        core
    }
}

/// One text of a pool.
pub struct Branch {
    pub pool: Arc<Pool>,
    pub seq: SeqId,
    /// The whole text. The cache holds the first of these tokens, the others are computed in the next pass.
    pub tokens: Vec<u32>,
    /// Index of the last answer's first token, or the number of tokens if there is no answer: drafters learn from answers that are removed.
    pub answer: usize,
    /// Tokens of draft nodes behind the text, by the number of the node. They are no part of it until they are accepted.
    pub nodes: Vec<u32>,
    /// Counts what changes the text, so that an older generation cannot go on with it.
    pub version: u64,
}

impl Drop for Branch {
    fn drop(&mut self) {
        let (seq, tokens, answer) = (self.seq, std::mem::take(&mut self.tokens), self.answer);
        lock(&self.pool.dropped).push(Dropped { seq, tokens, answer });
    }
}

impl Branch {
    /// Replaces the text. What both texts begin with stays in the cache, except for at least one token, whose logits are
    /// needed to go on. On `Err` text and cache belong together as before.
    pub fn set(&mut self, core: &mut Core, tokens: Vec<u32>) -> Result<(), Error> {
        if !self.nodes.is_empty() {
            self.accept(core, &[])?;
        }
        let session = &mut core.session;
        let held = session.cache().next_position(self.seq).unwrap_or(0) as usize;
        let same = self.tokens.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let mut keep = same.min(tokens.len().saturating_sub(1)).min(held);
        // While another branch was extended, the newest tokens of this one may have lost their recent rows in f16.
        if keep < held || (core.fed != self.seq && held > 0) {
            keep = session.config().cut_before(u32::try_from(keep).unwrap_or(u32::MAX)) as usize;
        }
        if keep < held {
            session.truncate(self.seq, keep as u32)?;
        }
        if let Some(speculator) = core.speculator.as_mut().filter(|_| same < self.tokens.len()) {
            speculator.removed(u64::from(self.seq.0), "", &self.tokens, same.max(self.answer));
        }
        self.answer = tokens.len(); // report removed tokens only once
        self.tokens = tokens;
        self.version += 1;
        Ok(())
    }

    /// Makes a path of the draft nodes part of the text, and drops the others. On `Err` nothing changes.
    pub fn accept(&mut self, core: &mut Core, path: &[NodeId]) -> Result<(), Error> {
        if let Some(mut trees) = core.session.cache().trees() {
            trees.commit_path(self.seq, path)?;
        }
        let nodes = std::mem::take(&mut self.nodes);
        self.tokens.extend(path.iter().filter_map(|node| nodes.get(node.0 as usize)));
        Ok(())
    }

    /// Where the cache ends.
    pub fn held(&self, core: &mut Core) -> usize {
        core.session.cache().next_position(self.seq).unwrap_or(0) as usize
    }
}
