//! The outcome of a planned batch: which tokens each request keeps, and which it emitted.
//!
//! A chunk of a prompt, a decode step, several decode rounds in one submission and a verified draft are one case: a
//! request keeps the beginning of its planned tokens, and emits some new ones after its known tokens.
use crate::executor::Batch;
use crate::executor::Work;
use crate::request::RequestId;
use kvist_cache::{Kept, NodeId, Refused};
use std::ops::Range;

/// The result of a batch. The object is reused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Duration of the step on the driver's clock.
    pub elapsed_ns: u64,
    /// True if the whole step failed. Nothing is committed then, and no request advances.
    pub failed: bool,
    advances: Vec<Stored>,
    tokens: Vec<u32>,
    nodes: Vec<NodeId>,
}

/// What one request of the batch keeps and emits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advance<'a> {
    /// Its planned tokens whose K and V become part of its sequence.
    pub kept: Kept<'a>,
    /// The tokens generated in this step. They follow the tokens known before, all of which must be kept.
    pub emitted: Emitted<'a>,
    /// True if the request ends with this step.
    pub finished: bool,
}

/// Generated tokens of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emitted<'a> {
    /// Their ids, in order.
    Tokens(&'a [u32]),
    /// Only their number is known, as in a simulation.
    Unknown(u32),
}

impl Emitted<'_> {
    /// No token: the request is still computing its prompt.
    pub const NONE: Emitted<'static> = Emitted::Unknown(0);

    /// Number of tokens.
    pub fn n_tokens(self) -> u32 {
        match self {
            Emitted::Tokens(tokens) => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            Emitted::Unknown(n_tokens) => n_tokens,
        }
    }
}

/// One token sampled for a request in a step without drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// The token id; `None` in a simulation.
    pub token: Option<u32>,
    /// True if it was the last token of its request.
    pub finished: bool,
}

/// An [`Advance`] whose tokens and nodes lie in the lists of the outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stored {
    kept: StoredKept,
    n_emitted: u32,
    /// Index of the first emitted token; `None` if the ids are unknown.
    first_token: Option<u32>,
    finished: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum StoredKept {
    All,
    First(u32),
    Path(Range<usize>),
}

impl Outcome {
    /// Empties the outcome for the next batch.
    pub fn clear(&mut self) {
        self.elapsed_ns = 0;
        self.failed = false;
        self.advances.clear();
        self.tokens.clear();
        self.nodes.clear();
    }

    /// Adds the outcome of the next [`Work`] of the batch. There must be one for each, in order, unless the step
    /// failed.
    pub fn push(&mut self, advance: Advance<'_>) {
        let kept = match advance.kept {
            Kept::All => StoredKept::All,
            Kept::First(n) => StoredKept::First(n),
            Kept::Path(path) => {
                let first = self.nodes.len();
                self.nodes.extend_from_slice(path);
                StoredKept::Path(first..self.nodes.len())
            }
        };
        let first_token = match advance.emitted {
            Emitted::Unknown(_) => None,
            Emitted::Tokens(tokens) => {
                let first = self.tokens.len() as u32;
                self.tokens.extend_from_slice(tokens);
                Some(first)
            }
        };
        let (n_emitted, finished) = (advance.emitted.n_tokens(), advance.finished);
        self.advances.push(Stored { kept, n_emitted, first_token, finished });
    }

    /// Adds the outcome of the next [`Work`] when all its planned tokens are kept and one token was sampled after them,
    /// or none if `sampled` is `None`. In a run of several steps, the run emitted one token per step, of unknown ids.
    pub fn push_sampled(&mut self, batch: Batch<'_>, sampled: Option<Sampled>) {
        let Some(Sampled { token, finished }) = sampled else {
            return self.push(Advance { kept: Kept::All, emitted: Emitted::NONE, finished: false });
        };
        let emitted = match &token {
            Some(token) if batch.steps == 1 => Emitted::Tokens(std::slice::from_ref(token)),
            _ => Emitted::Unknown(batch.steps),
        };
        self.push(Advance { kept: Kept::All, emitted, finished });
    }

    /// Adds the outcome of a whole batch without drafts: `sample` is asked for every [`Work`] that samples.
    pub fn sample_each(&mut self, batch: Batch<'_>, mut sample: impl FnMut(&Work) -> Sampled) {
        for work in batch.work {
            self.push_sampled(batch, work.samples.then(|| sample(work)));
        }
    }

    /// Keeps of each path only the beginning whose K and V lie where they belong, for executors that cannot move them. The
    /// emitted tokens stay: the next step computes those that are not kept.
    pub fn keep_in_place(&mut self) {
        for stored in &mut self.advances {
            if let StoredKept::Path(path) = &mut stored.kept {
                let in_place = (0..).zip(&self.nodes[path.clone()]).take_while(|(i, node)| node.0 == *i);
                path.end = path.start + in_place.count();
            }
        }
    }

    /// What every request of the batch keeps and emits, in batch order.
    pub fn advances(&self) -> impl ExactSizeIterator<Item = Advance<'_>> {
        self.advances.iter().map(|stored| self.advance(stored))
    }

    pub(crate) fn n_advances(&self) -> usize {
        self.advances.len()
    }

    pub(crate) fn nth(&self, i: usize) -> Advance<'_> {
        self.advance(&self.advances[i])
    }

    fn advance(&self, stored: &Stored) -> Advance<'_> {
        let kept = match &stored.kept {
            StoredKept::All => Kept::All,
            StoredKept::First(n) => Kept::First(*n),
            StoredKept::Path(path) => Kept::Path(&self.nodes[path.clone()]),
        };
        let emitted = match stored.first_token {
            None => Emitted::Unknown(stored.n_emitted),
            Some(first) => {
                let first = first as usize;
                Emitted::Tokens(&self.tokens[first..first + stored.n_emitted as usize])
            }
        };
        Advance { kept, emitted, finished: stored.finished }
    }

    /// True if every request keeps all its planned tokens.
    pub(crate) fn keeps_all(&self) -> bool {
        self.advances.iter().all(|stored| stored.kept == StoredKept::All)
    }
}

/// An outcome that does not fit its batch. The step is then abandoned: nothing is committed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadOutcome {
    /// The number of advances is not the number of requests.
    #[error("the batch has {requests} requests, but the outcome covers {got}")]
    Count {
        /// Requests of the batch.
        requests: usize,
        /// Advances of the outcome.
        got: usize,
    },
    /// A request emitted a token before all its known tokens were computed.
    #[error("request {0} emits a token, but not all its known tokens are computed and kept")]
    EmitsEarly(RequestId),
    /// A request generated more than its `max_new`.
    #[error("request {id} has generated {generated} tokens, more than its max_new of {max_new}")]
    EmitsTooMany {
        /// The request.
        id: RequestId,
        /// Its generated tokens, those of this step included.
        generated: u64,
        /// What it may generate.
        max_new: u32,
    },
    /// A request continues, but the next token to compute for it is not known.
    #[error(
        "request {0} continues, but all its known tokens are computed: it must emit a token or keep fewer"
    )]
    NothingToCompute(RequestId),
    /// The cache cannot keep these tokens.
    #[error("the cache cannot keep the tokens of this outcome: {0}")]
    Kept(#[from] Refused),
    /// The cache has changed since the step was planned, for example because its driver committed the step.
    #[error(
        "the cache has changed since the step was planned: leave the commit of a planned step to the scheduler"
    )]
    CacheChanged,
}
