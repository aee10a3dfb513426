//! The schemas of all request bodies of a server.
use crate::cache;
use crate::openai::request::{self, Bounds};
use crate::sessions::SessionSchemas;
use serde_json::Value;

/// All request schemas of this server.
pub(crate) struct Schemas {
    pub completions: Value,
    pub chat: Value,
    pub tokenize: Value,
    pub detokenize: Value,
    pub sessions: SessionSchemas,
    pub cache: Value,
}

impl Schemas {
    pub fn new(bounds: &Bounds) -> Self {
        Schemas {
            completions: request::completions(bounds),
            chat: request::chat(bounds),
            tokenize: request::tokenize(bounds),
            detokenize: request::detokenize(bounds),
            sessions: SessionSchemas::new(bounds),
            cache: cache::schema(),
        }
    }
}
