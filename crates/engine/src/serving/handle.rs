//! What a client holds of its job.
#[cfg(doc)]
use super::FinishReason;
use super::thread::Command;
use super::{Event, Shared};
use kvist_scheduler::RequestId;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::Sender;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// Events that the engine sent and the client has not received yet, and the number of tokens among them.
pub(super) struct UnreadEvents {
    pub events: mpsc::UnboundedReceiver<Event>,
    pub n: Arc<AtomicUsize>,
}

/// A job in the queue or the batch. Dropping it cancels the job: its memory is free before the next step.
pub struct GenerationHandle {
    pub id: RequestId,
    pub(super) events: UnreadEvents,
    pub(super) ended: bool,
    pub(super) shared: Arc<Shared>,
}

impl GenerationHandle {
    /// The next event. `None` after the last one, or if the engine thread died.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.events.events.recv().await;
        self.received(event)
    }

    /// The next event, if there is one; otherwise it wakes the task.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.events.events.poll_recv(context).map(|event| self.received(event))
    }

    /// The next event, for callers without an async runtime: blocks this thread until there is one.
    ///
    /// # Panics
    /// If it is called on a thread that runs an async task.
    pub fn blocking_next(&mut self) -> Option<Event> {
        let event = self.events.events.blocking_recv();
        self.received(event)
    }

    /// Cancels the job from elsewhere, while a thread waits for its events.
    pub fn canceller(&self) -> Canceller {
        Canceller { id: self.id, commands: self.shared.commands.clone() }
    }

    fn received(&mut self, event: Option<Event>) -> Option<Event> {
        if matches!(event, Some(Event::Token(_))) {
            self.events.n.fetch_sub(1, SeqCst);
        }
        self.ended |= matches!(event, None | Some(Event::Done(_) | Event::Failed(_)));
        event
    }
}

/// Cancels one job, from any thread.
pub struct Canceller {
    id: RequestId,
    commands: Sender<Command>,
}

impl Canceller {
    /// Ends the job with [`FinishReason::Cancelled`] before the next step, unless it has ended. Events that were sent already come first.
    pub fn cancel(&self) {
        // The thread may have ended already.
        let _ = self.commands.send(Command::Cancel(self.id));
    }
}

impl Drop for GenerationHandle {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.shared.commands.send(Command::Cancel(self.id));
        }
    }
}
