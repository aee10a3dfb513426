//! Dynamo's standalone indexer on loopback: `dynamo-peer` prints `serving http://127.0.0.1:PORT` and answers until it is killed.
//!
//! Dynamo's own `run_server` is the same behind a port on all addresses.
use dynamo_kv_router::services::indexer::server::{AppState, create_router};
use std::error::Error;
use std::sync::Arc;
use tokio::net::TcpListener;

/// One thread: events and queries are answered in the order in which they come.
const INDEXER_THREADS: usize = 1;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let state = Arc::new(AppState::new(INDEXER_THREADS)?);
    state.registry.signal_ready();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("serving http://{}", listener.local_addr()?);
    axum::serve(listener, create_router(state)).await?;
    Ok(())
}
