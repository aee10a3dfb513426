//! Drafters propose tokens that may come next.
use super::DraftTree;
use kvist_cache::LayerId;
use kvist_model::Error;

/// Limits of one draft tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Most nodes.
    pub tokens: u32,
    /// Most nodes on a path.
    pub depth: u32,
    /// Most children of a node; 1 gives chains.
    pub width: u32,
}

/// A request for a draft.
#[derive(Debug)]
pub struct DraftRequest<'a> {
    /// Id of the text, the same in every step.
    pub id: u64,
    /// What is learned from this text may only serve texts with the same salt.
    pub salt: &'a str,
    /// All known tokens, prompt and answer. The last one is not computed yet: the tree continues it.
    pub tokens: &'a [u32],
    pub bounds: Bounds,
    /// Empty at first; the drafter fills it. Parents come before their children, likelier siblings first.
    pub tree: &'a mut DraftTree,
}

/// Proposes tokens that may follow. A wrong proposal costs time and changes no text.
pub trait Drafter: Send {
    /// Layers of the target whose output this drafter reads, in the order of [`features`](Self::features);
    /// [`EMBEDDING`](kvist_device::EMBEDDING) stands for the input of the first one.
    fn taps(&self) -> &[LayerId] {
        &[]
    }

    /// Fills the trees of `requests`, within their bounds. A tree may stay empty.
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error>;

    /// The target has computed the tokens at positions `first..` of text `id`, of its prompt or its answer. `taps` has the
    /// rows of each tapped layer, `[tokens, hidden]`. `known` are the text's known tokens; some of the newest may be missing.
    /// Rejected nodes are not reported, nor are tokens that the target did not compute because it found them in a cache.
    /// Positions that were reported before replace what was said of them and of all later ones.
    fn features(&mut self, id: u64, first: u32, known: &[u32], taps: &[&[f32]]) -> Result<(), Error> {
        let _ = (id, first, known, taps);
        Ok(())
    }

    /// Text `id` has ended. `tokens` are all its tokens, of which the first `prompt` are its prompt.
    fn end(&mut self, id: u64, salt: &str, tokens: &[u32], prompt: usize) {
        let _ = (id, salt, tokens, prompt);
    }
}
