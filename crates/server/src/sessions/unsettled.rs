//! Counts the generations whose output is not in the history of its session yet.
use tokio::sync::watch;

/// Generations of sessions that still record their output. A task of its own records each, and a server that ends waits
/// for all of them before it stops to write sessions. Clones share the count.
#[derive(Clone)]
pub(crate) struct Unsettled(watch::Sender<usize>);

/// One of them. Dropping it ends it.
pub(crate) struct UnsettledOutput(Unsettled);

impl Default for Unsettled {
    fn default() -> Self {
        Unsettled(watch::Sender::new(0))
    }
}

impl Unsettled {
    pub fn begin(&self) -> UnsettledOutput {
        self.0.send_modify(|n| *n += 1);
        UnsettledOutput(self.clone())
    }

    /// Waits until there is none.
    pub async fn until_none(&self) {
        // `self` is also a sender, so the channel stays open.
        let _ = self.0.subscribe().wait_for(|n| *n == 0).await;
    }
}

impl Drop for UnsettledOutput {
    fn drop(&mut self) {
        self.0.0.send_modify(|n| *n -= 1);
    }
}
