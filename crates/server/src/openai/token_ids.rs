//! `return_token_ids`: the tokens of prompts and answers in a response, as vLLM returns them.
use super::generation_request::GenerationRequest;
use kvist_engine::serving::Token;
use serde_json::{Value, json};
use std::sync::Arc;

/// Adds tokens to choices.
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

    /// Adds `token_ids` to this choice of an answer, and `prompt_token_ids` to its first one.
    pub fn add(&mut self, choice: &mut Value, index: usize, tokens: &[Token]) {
        if !self.are_wanted() {
            return;
        }
        choice["token_ids"] = tokens.iter().map(|token| token.id).collect();
        self.add_prompt(choice, index);
    }

    /// Adds `prompt_token_ids`, unless an earlier choice of this answer has them.
    pub fn add_prompt(&mut self, choice: &mut Value, index: usize) {
        if self.are_wanted() && !std::mem::replace(&mut self.begun[index], true) {
            choice["prompt_token_ids"] = json!(&*self.prompts[index / self.n]);
        }
    }
}
