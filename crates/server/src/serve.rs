//! The main loop of a server: accepts connections until it must stop, and then drains.
use crate::accept::accept;
use crate::app::{reserve, router};
use crate::sessions::Unsettled;
use crate::state::ServerState;
use crate::work::THREADS;
use hyper_util::server::graceful::GracefulShutdown;
use kvist_engine::sessions::{SessionKeeper, SharedSessions};
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// How long a connection may take to end once all answers are sent.
const CLOSING_TIME: Duration = Duration::from_secs(10);

/// How long shutdown waits for the disk to take the rest of a recording.
const RECORDING_TIME: Duration = Duration::from_secs(10);

/// How long shutdown waits for the last output of generations to be added to their sessions.
const SETTLING_TIME: Duration = Duration::from_secs(10);

/// How long shutdown waits for the disk, and for a shared store, to take the last changes of sessions.
const SAVING_TIME: Duration = Duration::from_secs(60);

/// Waits until the recording, if there is one, is completely written.
async fn recorded(state: &ServerState) {
    if tokio::time::timeout(RECORDING_TIME, state.live.recorded(&state.engine)).await.is_err() {
        tracing::error!(target: "kvist::server", "the end of the recording is missing: the disk is too slow");
    }
}

/// The runtime that [`serve`] needs.
pub fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2) // they only move text; computing happens on other threads
        .max_blocking_threads(THREADS) // they tokenize; each additional one would keep its own heap
        .enable_all()
        .build()
}

/// Accept and serve until `shutdown` resolves, then drain: new requests get a 503, and running requests may continue
/// for `limits.grace_s`, after which they are notified and ended. A recording is written to its end. Returns an error
/// if the engine ends by itself: a supervisor should then restart the program.
pub async fn serve(
    listener: TcpListener,
    state: Arc<ServerState>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let limits = &state.limits;
    let (router, reserve) = (router(state.clone()), reserve(state.clone()));
    let graceful = GracefulShutdown::new();
    let accept = accept(&listener, &state, router, reserve, &graceful);
    let drained = async {
        shutdown.await;
        tracing::info!(target: "kvist::server", "draining");
        state.drain();
        let end = tokio::time::Instant::now() + limits.grace();
        if tokio::time::timeout_at(end, state.engine.until_idle()).await.is_err() {
            tracing::warn!(target: "kvist::server", "the grace period is over: ending the running requests");
            state.stopping.send_replace(true);
        }
        end
    };
    let end = tokio::select! {
        () = accept => tokio::time::Instant::now(),
        end = drained => end,
        () = state.engine.until_ended() => {
            recorded(&state).await;
            return Err(io::Error::other("the engine has stopped because of a bug in kvist: restart the server"));
        }
    };
    drop(listener);
    // The engine finishes before its answers are sent. And after the first answer of a request, others may follow.
    let mut sent = std::pin::pin!(graceful.shutdown());
    if tokio::time::timeout_at(end, &mut sent).await.is_err() {
        state.stopping.send_replace(true);
        let _ = tokio::time::timeout(CLOSING_TIME, sent).await;
    }
    recorded(&state).await;
    let unsettled = state.unsettled.clone();
    let close = async {
        let shared = state.clone();
        let on_disk = tokio::task::spawn_blocking(move || state.keeper.get().map(SessionKeeper::close));
        // The other workers of a fleet wait for these, if one of them continues the sessions at once.
        let in_store =
            tokio::task::spawn_blocking(move || shared.shared_sessions.get().map(SharedSessions::close));
        // At the same time: a slow store costs no session on the disk.
        let _ = tokio::join!(on_disk, in_store);
    };
    saved(&unsettled, close).await;
    Ok(())
}

/// Writes the sessions with `close`, after the last change. Handlers have ended, but tasks of their own record the
/// output of generations, also that of a client which has left.
async fn saved(unsettled: &Unsettled, close: impl Future<Output = ()>) {
    if tokio::time::timeout(SETTLING_TIME, unsettled.until_none()).await.is_err() {
        tracing::error!(target: "kvist::server", "the last output of some sessions is not saved");
    }
    if tokio::time::timeout(SAVING_TIME, close).await.is_err() {
        tracing::error!(target: "kvist::server", "not all sessions are saved: the disk or the shared store is too slow");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use tokio::time::timeout;

    /// Regression: the sessions were written while a task was still about to add an answer to one of them, which was lost.
    #[tokio::test(start_paused = true)]
    async fn sessions_are_written_after_their_last_output() {
        let closed = AtomicBool::new(false);
        let close = || async { closed.store(true, SeqCst) };
        let unsettled = Unsettled::default();
        let outputs = [unsettled.begin(), unsettled.begin()];
        let mut saving = std::pin::pin!(saved(&unsettled, close()));
        for output in outputs {
            assert!(timeout(SETTLING_TIME / 4, &mut saving).await.is_err());
            assert!(!closed.load(SeqCst), "an output is missing");
            drop(output);
        }
        saving.await;
        assert!(closed.swap(false, SeqCst));
        // A task that hangs costs only its own session.
        let _hangs = unsettled.begin();
        saved(&unsettled, close()).await;
        assert!(closed.load(SeqCst));
    }
}
