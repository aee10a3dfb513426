//! An OpenAI-compatible HTTP server: one model, many users, one KV cache. Requests share cached prefixes if their salts
//! are equal.
//!
//! One thread owns the scheduler, the cache and the weights, and runs one turn after the other ([`Engine`]). All other
//! code talks to it through [`Job`]s and [`Event`]s. The server guarantees two things: a request whose client has
//! disconnected holds no cache after the next step, and the server takes no memory beyond the plan that it printed at
//! startup.
//!
//! [`ServerConfig`] is the configuration of a server, [`App`] the state that its handlers share, and [`serve`] the loop
//! that accepts connections. The API is OpenAI's. A parameter that is not supported is refused by name, never ignored:
//! request bodies are checked against the schemas that `/openapi.json` shows.
#![forbid(unsafe_code)]

mod accept;
mod app;
mod auth;
mod body;
pub mod config;
mod connection;
mod connections;
mod dashboard;
mod error;
mod http;
mod job;
mod live;
mod metrics;
mod openai;
mod openapi;
mod schema;
mod sessions;
mod shares;
pub mod structured;
pub mod tools;
mod work;
mod worker;

pub use app::App;
pub use config::{ConfigError, ServerConfig};
pub use error::ApiError;
pub use http::{router, runtime, serve};
pub use job::*;
pub use live::LiveView;
pub use work::request_bytes;
pub use worker::{Engine, EngineConfig, Generation, State, Stats, Watch};
