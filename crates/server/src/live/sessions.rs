//! Which sessions there are, and what of each the cache still has: for the live view.
//!
//! A session at rest holds no block. What its next generation would find is in the prefix index, and that is what a
//! listener is told: ids, sizes and blocks; no token, no name, no salt. It is told of [`MOST`] sessions, those that were
//! used last, and again when anything about them has changed.
//!
//! The engine's thread looks the blocks up, between two turns, so that listeners share what was found ([`Looks`]).
use crate::app::App;
use crate::sessions::{Rest, SessionId};
use futures_util::stream::{Stream, unfold};
use kvist_cache::{Content, GroupId};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// Sessions that are told of.
const MOST: usize = 64;
/// Between two looks.
const EVERY: Duration = Duration::from_millis(400);

#[derive(Serialize)]
struct Told {
    /// In the order in which they were made.
    sessions: Vec<Session>,
    /// How many there are beside these.
    more: usize,
}

#[derive(Serialize)]
struct Session {
    id: String,
    parent: Option<String>,
    tokens: usize,
    running: bool,
    /// Per layer group, the blocks that it would find; `null` behind a window. Empty while it runs: its sequence has them.
    tables: Vec<Vec<Option<u32>>>,
}

/// What was found last. All listeners share it: it promises that the engine's thread is asked once per interval, however
/// many listen, and that it looks no blocks up while sessions and prefix index stay as they are.
#[derive(Default)]
pub(crate) struct Looks {
    last: Mutex<Option<Look>>,
    lookups: AtomicU64,
}

struct Look {
    at: Instant,
    /// Of what it is.
    of: Vec<Seen>,
    more: usize,
    prefix_version: u64,
    told: Arc<str>,
}

/// A session as it was. What a listener is told of it is a function of this and of the prefix index.
struct Seen {
    id: SessionId,
    parent: Option<SessionId>,
    running: bool,
    /// Tokens that are changed are others from then on: while this names them, they cannot be changed where they are.
    tokens: Weak<Vec<u32>>,
}

impl From<&Rest> for Seen {
    fn from(rest: &Rest) -> Seen {
        let tokens = Arc::downgrade(&rest.tokens);
        Seen { id: rest.id, parent: rest.parent, running: rest.running, tokens }
    }
}

impl PartialEq for Seen {
    fn eq(&self, other: &Seen) -> bool {
        let is = |seen: &Seen| (seen.id, seen.parent, seen.running);
        is(self) == is(other) && self.tokens.ptr_eq(&other.tokens)
    }
}

impl Look {
    fn is_young(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < EVERY
    }
}

impl Looks {
    pub fn n_lookups(&self) -> u64 {
        self.lookups.load(SeqCst)
    }

    /// The state of all sessions as JSON: as of now, or at most [`EVERY`] old. `None` when the engine has ended.
    async fn look(self: &Arc<Self>, app: &App, as_of_now: bool) -> Option<Arc<str>> {
        let mut last = self.last.lock().await;
        let at = Instant::now();
        if let Some(young) = last.as_ref().filter(|look| !as_of_now && look.is_young(at)) {
            return Some(young.told.clone());
        }
        let (rests, more) = app.sessions.rests(at, MOST);
        let of: Vec<Seen> = rests.iter().map(Seen::from).collect();
        let same = last.as_ref().filter(|look| look.more == more && look.of == of);
        let known = same.map(|look| (look.prefix_version, look.told.clone()));
        let looks = self.clone();
        let found = app.engine.inspect(move |state| {
            let cache = state.scheduler.cache();
            let prefix_version = cache.prefix_version();
            if let Some((_, told)) = known.filter(|(version, _)| *version == prefix_version) {
                return (prefix_version, told);
            }
            looks.lookups.fetch_add(1, SeqCst);
            let groups = u16::try_from(cache.n_groups()).unwrap_or(u16::MAX);
            let session = |rest: Rest| {
                let content = Content::Tokens(&rest.tokens);
                let known = |group| cache.lookup_blocks(GroupId(group), &rest.salt, &content);
                Session {
                    id: rest.id.to_string(),
                    parent: rest.parent.map(|id| id.to_string()),
                    tokens: rest.tokens.len(),
                    running: rest.running,
                    tables: if rest.running { Vec::new() } else { (0..groups).map(known).collect() },
                }
            };
            let told = Told { sessions: rests.into_iter().map(session).collect(), more };
            (prefix_version, serde_json::to_string(&told).unwrap_or_default().into())
        });
        let (prefix_version, told) = found.await?;
        *last = Some(Look { at, of, more, prefix_version, told: told.clone() });
        Some(told)
    }
}

/// The state of all sessions as JSON: now, and whenever it has changed.
pub(crate) fn watch(app: Arc<App>) -> impl Stream<Item = String> {
    let begin: (Arc<App>, Option<Arc<str>>) = (app, None);
    unfold(begin, |(app, before)| async move {
        let looks = app.engine.live().sessions.clone();
        loop {
            if before.is_some() {
                tokio::time::sleep(EVERY).await;
            }
            let now = looks.look(&app, before.is_none()).await?;
            if before.as_ref() != Some(&now) {
                return Some((now.to_string(), (app, Some(now))));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_serves_until_the_next_is_due() {
        let at = Instant::now();
        let look = Look { at, of: Vec::new(), more: 0, prefix_version: 0, told: "".into() };
        assert!(look.is_young(at) && look.is_young(at + EVERY / 2));
        assert!(!look.is_young(at + EVERY));
    }

    /// What is compared of tokens is where they lie.
    #[test]
    fn changed_tokens_are_seen() {
        let mut tokens = Arc::new(vec![1, 2, 3]);
        let seen = |tokens: &Arc<Vec<u32>>| Seen {
            id: SessionId(1),
            parent: None,
            running: false,
            tokens: Arc::downgrade(tokens),
        };
        let before = seen(&tokens);
        assert!(before == seen(&tokens));
        // As generations push them, and as changed histories have them.
        Arc::make_mut(&mut tokens).push(4);
        assert!(before != seen(&tokens));
        let before = seen(&tokens);
        tokens = Arc::new(vec![1, 2, 3, 4]);
        assert!(before != seen(&tokens));
    }
}
