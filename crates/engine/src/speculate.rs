//! Speculative decoding: a drafter proposes tokens, the target model verifies them in one pass, and the text stays the
//! same.
//!
//! ```text
//! known tokens ─► Drafter::propose ─► DraftTree ─► one pass of the target over the last known token and all nodes
//!      ▲                                                          │ logits of every node
//!      └────── accepted path + one more token ◄─── verify ◄───────┘
//! ```
//!
//! [`verify`] walks the tree with the request's own sampler. At the last known token and at every accepted node it draws
//! the next token from the target's logits, exactly as without a draft, and goes on if a node proposes that token. So
//! every token is drawn from the distribution that it would have been drawn from anyway, with the same random numbers,
//! penalties, grammar and stop strings: drafts decide how many tokens a pass gives and nothing else. Trees of
//! candidates without random choice are accepted as often as with multi-round rejection sampling (Leviathan et al.,
//! 2023; Miao et al., SpecInfer, 2024): there, too, a node is accepted with the probability that the target gives it.
mod control;
mod costs;
mod draft_model;
mod drafter;
mod eagle;
mod expand;
mod ngram;
mod options;
mod pass;
mod shapes;
mod speculator;
mod suffix;
mod texts;
mod tree;

pub use costs::Costs;
pub use draft_model::{DraftModel, check_vocabulary};
pub use drafter::{Bounds, DraftRequest, Drafter};
pub use eagle::Eagle;
pub use ngram::Ngram;
pub use options::{
    DRAFT_TOKENS, DraftMode, DraftOptions, DraftWeights, OpenedDraft, PlacedDraft, step_draft_tokens,
};
pub use pass::DraftedPass;
pub(crate) use pass::end_speculation;
pub use speculator::{Counts, Draft, DraftContext, SpeculationConfig, Speculator};
pub use suffix::{Suffix, SuffixConfig};
pub use tree::{DraftTree, Verified, verify};
