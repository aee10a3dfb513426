//! The places of a socket. A peer that says nothing takes one only until another peer needs it.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// The peers of a socket.
pub(super) struct Peers {
    places: Arc<Semaphore>,
    silent: Mutex<Silent>,
}

#[derive(Default)]
struct Silent {
    /// The next number in the order.
    next: u64,
    /// How to close those that are silent, in the order in which they fell silent.
    peers: BTreeMap<u64, Arc<Notify>>,
    /// Another peer waits for a place, and none was silent.
    is_awaited: bool,
}

impl Silent {
    /// Closes the one that is silent longest. Returns whether there is one.
    fn close_one(&mut self) -> bool {
        let longest = self.peers.pop_first();
        longest.inspect(|(_, close)| close.notify_one()).is_some()
    }
}

impl Peers {
    pub fn new(most: usize) -> Peers {
        Peers { places: Arc::new(Semaphore::new(most)), silent: Mutex::default() }
    }

    fn silent(&self) -> MutexGuard<'_, Silent> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place, silent for now. If all are taken, the peer that is silent longest is closed; if none is, waits for the first that
    /// falls silent or goes. One caller at a time.
    pub async fn admit(self: &Arc<Self>) -> Peer {
        let place = match self.places.clone().try_acquire_owned() {
            Ok(place) => Some(place),
            Err(_) => {
                {
                    let mut silent = self.silent();
                    silent.is_awaited = !silent.close_one();
                }
                // It is never closed.
                let place = self.places.clone().acquire_owned().await.ok();
                self.silent().is_awaited = false;
                place
            }
        };
        let peer =
            Peer { peers: self.clone(), number: Mutex::new(None), close: Arc::default(), _place: place };
        peer.set_silent(true);
        peer
    }
}

/// A connected peer. Its place is free when this is dropped.
pub(super) struct Peer {
    peers: Arc<Peers>,
    /// Its number in [`Silent::peers`], while it is silent.
    number: Mutex<Option<u64>>,
    close: Arc<Notify>,
    _place: Option<OwnedSemaphorePermit>,
}

impl Peer {
    /// Whether nothing is to be sent to it: it has no subscription, or waits for no replay. One that falls silent again is the last.
    pub fn set_silent(&self, is_silent: bool) {
        let mut number = self.number.lock().unwrap_or_else(PoisonError::into_inner);
        let mut silent = self.peers.silent();
        if let Some(before) = number.take() {
            silent.peers.remove(&before);
        }
        if is_silent {
            *number = Some(silent.next);
            let next = silent.next;
            silent.peers.insert(next, self.close.clone());
            silent.next += 1;
            if std::mem::take(&mut silent.is_awaited) {
                silent.close_one();
            }
        }
    }

    /// Resolves when another peer needs its place.
    pub async fn closed(&self) {
        self.close.notified().await;
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.set_silent(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    fn is_closed(peer: &Peer) -> bool {
        poll(pin!(peer.closed())).is_some()
    }

    #[test]
    fn the_one_that_is_silent_longest_makes_room() {
        let peers = Arc::new(Peers::new(3));
        let admit = || poll(pin!(peers.admit())).expect("there is a place");
        let (first, second, third) = (admit(), admit(), admit());
        first.set_silent(false);
        second.set_silent(false);
        // It was silent before, and is again: after the third.
        second.set_silent(true);
        let mut fourth = pin!(peers.admit());
        assert!(poll(fourth.as_mut()).is_none());
        assert_eq!([&first, &second, &third].map(is_closed), [false, false, true]);
        drop(third);
        let fourth = poll(fourth).expect("the place of the third");
        fourth.set_silent(false);
        let mut fifth = pin!(peers.admit());
        assert!(poll(fifth.as_mut()).is_none() && is_closed(&second));
        drop(second);
        let fifth = poll(fifth).expect("the place of the second");
        fifth.set_silent(false);
        // None is silent: the first that falls silent is closed, and no other one.
        let mut sixth = pin!(peers.admit());
        assert!(poll(sixth.as_mut()).is_none());
        fourth.set_silent(true);
        fifth.set_silent(true);
        assert_eq!([&first, &fourth, &fifth].map(is_closed), [false, true, false]);
        drop(fourth);
        let sixth = poll(sixth).expect("the place of the fourth");
        assert_eq!([&first, &fifth, &sixth].map(is_closed), [false; 3]);
        drop((first, fifth, sixth));
        assert!(peers.silent().peers.is_empty());
        assert_eq!(peers.places.available_permits(), 3);
    }
}
