//! `return_token_ids`: the tokens of prompts and answers in a response, as vLLM returns them. A completion has
//! `prompt_token_ids` in its choice. A chat completion has them beside its choices, because these share one prompt.
use super::generation_request::GenerationRequest;
use kvist_engine::serving::Token;
use serde_json::{Value, json};
use std::sync::Arc;

/// Adds tokens to a response.
#[derive(Default)]
pub(super) struct TokenIds {
    /// The prompts, if their tokens were asked for.
    prompts: Vec<Arc<[u32]>>,
    /// Number of answers to each prompt.
    n: usize,
    /// Answers whose prompt has been written.
    begun: Vec<bool>,
}

impl TokenIds {
    pub fn new(request: &GenerationRequest) -> Self {
        if !request.return_token_ids {
            return TokenIds::default();
        }
        let n = request.n as usize;
        TokenIds { prompts: request.prompts.clone(), n, begun: vec![false; request.prompts.len() * n] }
    }

    pub fn are_wanted(&self) -> bool {
        !self.prompts.is_empty()
    }

    /// Adds `token_ids` to this choice.
    pub fn add(&self, choice: &mut Value, tokens: &[Token]) {
        if self.are_wanted() {
            choice["token_ids"] = tokens.iter().map(|token| token.id).collect();
        }
    }

    /// Adds `prompt_token_ids` of this answer, unless they were added before.
    pub fn add_prompt(&mut self, to: &mut Value, index: usize) {
        if self.are_wanted() && !std::mem::replace(&mut self.begun[index], true) {
            to["prompt_token_ids"] = json!(&*self.prompts[index / self.n]);
        }
    }
}
