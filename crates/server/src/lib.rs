//! An OpenAI-compatible HTTP server: one model, many users, one KV cache. Requests share cached prefixes if their salts
//! are equal.
//!
//! The crate is HTTP around [`kvist_engine::serving`], which runs the model, and [`kvist_engine::sessions`]. It
//! guarantees two things: a request whose client has disconnected uses no cache after the next step, and the server
//! takes no memory beyond the plan that it printed at startup.
//!
//! [`ServerConfig`] is the configuration of a server, [`ServerState`] the state that its handlers share, and [`serve()`]
//! the loop that accepts connections. The API is OpenAI's. A parameter that is not supported is refused by name, never
//! ignored: request bodies are checked against the schemas that `/openapi.json` shows.
#![forbid(unsafe_code)]

mod accept;
mod app;
mod auth;
mod blocking;
mod bodies;
mod body;
mod cache;
mod checks;
pub mod config;
mod connection;
mod connections;
mod dashboard;
mod deletions;
mod error;
mod extract;
mod health;
mod kv_events;
mod live;
mod memory;
mod metrics;
mod openai;
mod openapi;
mod schema;
mod schemas;
mod serve;
mod sessions;
mod state;
mod work;

pub use app::router;
pub use config::{ConfigError, LongAnswers, ServerConfig};
pub use error::ApiError;
pub use kv_events::{KvEventFeed, KvEventSockets, KvEvents};
pub use live::LiveView;
pub use serve::{runtime, serve};
pub use state::ServerState;
pub use work::request_bytes;
