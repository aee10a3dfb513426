//! The options of drafts, and what speculation has achieved, as C has them.
#![allow(unsafe_code, non_camel_case_types)]
use super::Drafts;
use crate::ffi::optional_text;
use crate::model::{kvist_model, model_of};
use crate::status::{Failure, Outcome};
use kvist_engine::speculate::{Counts, DraftMode, DraftOptions};
use std::ffi::c_char;

/// Drafts: tokens are proposed, and several are verified in one pass. The texts stay the same; they come sooner where proposals are right
/// (docs/speculation.md). All zeros and nulls are none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_draft_options {
    /// What proposes: "auto" (as much as pays off), "ngram", "suffix", "draft" (a smaller model) or "eagle" (a head). Null or "off" is
    /// nothing, and then the other fields are zero and null.
    pub speculate: *const c_char,
    /// For "draft" and "auto": a model with the same vocabulary. Its cache is in its own memory; it may be freed before the session or batch.
    /// Null is the embedded model's own with "draft", if that is the target.
    pub draft_model: *const kvist_model,
    /// For "eagle" and "auto": the folder of a head that was trained for the model, with config.json and safetensors. It is loaded for this
    /// session or batch alone, in the memory of its model. Null is the embedded model's own with "eagle", if that is the target.
    pub draft_head: *const c_char,
    /// Most tokens of a draft; 0 is 16.
    pub draft_tokens: u32,
    /// Most tokens on a path of it; 0 is 8, and 5 with "draft".
    pub draft_depth: u32,
    /// Most continuations of the same token; 0 is 4, and 1 with "draft". 1 drafts chains, which every kind verifies; trees need "tree" or
    /// "paged".
    pub draft_width: u32,
}

/// What speculation has achieved.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_speculation {
    /// Passes that gave tokens; in a batch a pass counts once for each text in it.
    pub target_passes: u64,
    /// Passes of them that verified a draft.
    pub drafts: u64,
    /// Draft tokens that were verified, and of them those that were accepted.
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    /// A drafter has failed: texts go on without drafts.
    pub has_failed: bool,
}

/// What options say of drafts; `None` if there are none.
///
/// # Safety
/// Strings of the options are null or null-terminated, and `draft_model` is null or came from `kvist_model_open`.
pub(crate) unsafe fn drafts_of(options: &kvist_draft_options) -> Outcome<Option<Drafts>> {
    // SAFETY: as the caller promises.
    let (speculate, head) = unsafe {
        (optional_text(options.speculate, "speculate")?, optional_text(options.draft_head, "draft_head")?)
    };
    let numbers = [
        ("draft_tokens", options.draft_tokens),
        ("draft_depth", options.draft_depth),
        ("draft_width", options.draft_width),
    ];
    let Some(speculate) = speculate.filter(|speculate| *speculate != "off") else {
        let given = [("draft_model", !options.draft_model.is_null()), ("draft_head", head.is_some())];
        let given = given.into_iter().chain(numbers.map(|(name, number)| (name, number > 0)));
        return match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => Err(Failure::argument(format!(
                "{name}: nothing is drafted: give speculate too, such as \"auto\", or leave it out"
            ))),
            None => Ok(None),
        };
    };
    let mode: DraftMode = speculate.parse().map_err(|why| Failure::argument(format!("speculate: {why}")))?;
    // SAFETY: not null; the rest as the caller promises.
    let model =
        (!options.draft_model.is_null()).then(|| unsafe { model_of(options.draft_model) }).transpose()?;
    let given = |number: u32| (number > 0).then_some(number);
    let new = DraftOptions::new(mode);
    let [tokens, depth, width] = numbers.map(|(_, number)| given(number));
    let options = DraftOptions { tokens: tokens.unwrap_or(new.tokens), depth, width, ..new };
    Drafts::new(options, model.cloned(), head.map(Into::into)).map(Some)
}

/// Counts for C.
pub(crate) fn counts_of(counts: &Counts) -> kvist_speculation {
    kvist_speculation {
        target_passes: counts.target_passes,
        drafts: counts.drafts,
        drafted_tokens: counts.drafted,
        accepted_tokens: counts.accepted,
        has_failed: counts.failure.is_some(),
    }
}
