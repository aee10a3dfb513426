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

impl Bounds {
    /// The bounds of drafts whose depth and width are not given. A draft model computes a pass for each level of its trees, and for
    /// each node of a level: unless its trees are shaped by measurements, short chains are best.
    pub fn new(tokens: u32, depth: Option<u32>, width: Option<u32>, of_draft_model: bool) -> Bounds {
        let (usual_depth, usual_width) = if of_draft_model { (5, 1) } else { (8, 4) };
        Bounds { tokens, depth: depth.unwrap_or(usual_depth), width: width.unwrap_or(usual_width) }
    }
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

    /// Comes before [`propose`](Self::propose) with the same requests: here a drafter computes or indexes their prompts, a bounded
    /// number of tokens per call. That is needed once for each text, and `auto` does not count it against the drafts.
    fn prepare(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        let _ = requests;
        Ok(())
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

    /// The tokens from number `kept` on are removed from text `id`, which goes on. A drafter may learn from them.
    fn removed(&mut self, id: u64, salt: &str, tokens: &[u32], kept: usize) {
        let _ = (id, salt, tokens, kept);
    }

    /// Text `id` has ended. `tokens` are all its tokens, of which the first `prompt` are its prompt.
    fn end(&mut self, id: u64, salt: &str, tokens: &[u32], prompt: usize) {
        let _ = (id, salt, tokens, prompt);
    }
}
