//! kvist over HTTP: one model, many users, one cache that they share as far as their salts allow.
//!
//! One thread owns the scheduler, the cache and the weights, and takes one turn after the other ([`Engine`]); everything
//! else talks to it through [`Job`]s and [`Event`]s. It promises that a request whose client has left holds
//! nothing after the next step, and that no memory is taken beyond the plan that was printed at the start.
//!
//! [`ServerConfig`] is what a server is told, [`App`] what its handlers share, [`serve`] the loop that accepts
//! connections. The API is OpenAI's; what of it is not supported is refused by name, never ignored: request bodies are
//! checked against the schemas that `/openapi.json` shows.
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
