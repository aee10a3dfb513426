//! The texts of many jobs at once, for callers that want them whole.
use super::{Engine, Event, Failure, GenerationHandle, Job, Rejected};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll};

/// Why [`Engine::generate_all`] has no texts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unserved {
    #[error(transparent)]
    Rejected(#[from] Rejected),
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// The texts of the jobs that were sent, in their order, and the handles of those that have not ended.
#[derive(Default)]
struct Texts {
    all: Vec<String>,
    live: Vec<(usize, GenerationHandle)>,
}

impl Texts {
    /// Takes every event that has come, of all texts alike: while one text is waited for, none of the others may collect so many unread
    /// tokens that it is [cut off](Failure::Unread). Returns whether there was any. Otherwise the next event of any text wakes the task.
    fn receive(&mut self, context: &mut Context<'_>) -> Result<bool, Failure> {
        let (mut any, mut failed) = (false, None);
        let Texts { all, live } = self;
        live.retain_mut(|(at, handle)| {
            while let Poll::Ready(event) = handle.poll_next(context) {
                any = true;
                match event {
                    Some(Event::Admitted { .. } | Event::Prompt(_)) => {}
                    Some(Event::Token(token)) => all[*at] += &token.text,
                    Some(Event::Done(done)) => {
                        all[*at] += &done.text;
                        return false;
                    }
                    Some(Event::Failed(failure)) => {
                        failed.get_or_insert(failure);
                        return false;
                    }
                    None => return false,
                }
            }
            true
        });
        failed.map_or(Ok(any), Err)
    }

    fn push(&mut self, handle: GenerationHandle) {
        self.live.push((self.all.len(), handle));
        self.all.push(String::new());
    }
}

impl Engine {
    /// Generates the texts of all jobs, and returns them in the order of the jobs. There may be more jobs than places in the queue: the
    /// next one is sent when a place is free. A job that is cancelled gives the text that it has until then.
    ///
    /// # Errors
    /// [`Rejected`] if the engine drains or ends before all jobs were sent, or if the queue has no place and no job lives that could free
    /// one; the [`Failure`] of the first job that fails. The other jobs are cancelled then, as they are if the future is dropped.
    pub async fn generate_all(&self, jobs: impl IntoIterator<Item = Job>) -> Result<Vec<String>, Unserved> {
        let mut jobs = jobs.into_iter().peekable();
        let mut texts = Texts::default();
        let (mut live, mut is_gone) = (self.shared.live.subscribe(), self.shared.is_gone.clone());
        loop {
            // Whatever ends after this wakes the wait below.
            live.mark_unchanged();
            while let Some(job) = jobs.peek() {
                let may_wait = || *self.shared.live.borrow() > 0;
                // What waits here was not rejected, and does not count as such.
                if !self.has_room(&job.tenant) && may_wait() {
                    break;
                }
                let permit = match self.reserve(&job.tenant, 1) {
                    Err(Rejected::Full { .. }) if may_wait() => break,
                    permits => permits?.pop(),
                };
                let (Some(permit), Some(job)) = (permit, jobs.next()) else { break };
                texts.push(self.submit_in(job, permit)?);
            }
            let all_sent = jobs.peek().is_none();
            let mut changed = pin!(live.changed());
            let mut gone = pin!(is_gone.changed());
            let mut next = |context: &mut Context<'_>| -> Result<Poll<()>, Unserved> {
                let any = texts.receive(context)?;
                if all_sent {
                    return Ok(if texts.live.is_empty() { Poll::Ready(()) } else { Poll::Pending });
                }
                if gone.as_mut().poll(context).is_ready() {
                    return Err(Rejected::Draining.into());
                }
                // A place is free when a job is admitted or ends, of others too.
                let may_send = any || changed.as_mut().poll(context).is_ready();
                Ok(if may_send { Poll::Ready(()) } else { Poll::Pending })
            };
            poll_fn(|context| match next(context) {
                Ok(poll) => poll.map(Ok),
                Err(why) => Poll::Ready(Err(why)),
            })
            .await?;
            if all_sent {
                return Ok(texts.all);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::handle::UnreadEvents;
    use super::super::{Done, EngineConfig, FinishReason, Token, Usage};
    use super::*;
    use crate::devices::{self, Cpu};
    use crate::memory::CacheConfig;
    use kvist_device::MemoryBudget;
    use kvist_model::{LoadOptions, Model, ModelFile};
    use kvist_scheduler::RequestId;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::Waker;
    use tokio::sync::mpsc;

    /// Handles were read one after the other: while the first text went on, the tokens of the others remained unread, and a long text was
    /// cut off.
    #[test]
    fn no_text_waits_for_another_to_be_read() {
        let (options, budget) = (LoadOptions::default(), MemoryBudget::unlimited());
        let model =
            Model::load(&ModelFile::Embedded, Cpu::default(), &options, &budget, &mut |_, _| {}).unwrap();
        let config = EngineConfig::new(CacheConfig::new(64));
        let engine = Engine::start(Arc::new(model), &devices::all(), config).unwrap();
        let text = |id, unread: &Arc<AtomicUsize>| {
            let (sender, events) = mpsc::unbounded_channel();
            let events = UnreadEvents { events, n: unread.clone() };
            let handle =
                GenerationHandle { id: RequestId(id), events, ended: false, shared: engine.shared.clone() };
            (sender, handle)
        };
        let unread = Arc::new(AtomicUsize::new(3));
        let (_silent, first) = text(100, &Arc::default());
        let (sender, second) = text(101, &unread);
        let mut texts = Texts::default();
        texts.push(first);
        texts.push(second);
        let mut context = Context::from_waker(Waker::noop());
        for (id, text) in (0..).zip(["a", "b", "c"]) {
            sender.send(Event::Token(Token { id, text: text.into(), logprob: None })).unwrap();
        }
        assert_eq!(texts.receive(&mut context), Ok(true));
        assert_eq!((unread.load(SeqCst), texts.all[1].as_str()), (0, "abc"));
        assert_eq!(texts.receive(&mut context), Ok(false));
        let done = Done { finish: FinishReason::Length, text: "d".into(), usage: Usage::default() };
        sender.send(Event::Done(done)).unwrap();
        assert_eq!(texts.receive(&mut context), Ok(true));
        assert_eq!(texts.all[1], "abcd");
        assert_eq!(texts.live.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [0]);
    }
}
