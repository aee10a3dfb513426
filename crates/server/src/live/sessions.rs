//! The list of sessions for the live view, with the blocks of each that are still cached.
//!
//! A session that is not generating owns no block. Listeners therefore see what its next generation would find in the
//! prefix index: ids, sizes and blocks, but no tokens, names or salts. The list has the [`MOST`] most recently used
//! sessions, and is sent again when anything in it has changed.
//!
//! The engine thread looks the blocks up between two turns. Listeners share one result ([`Looks`]).
use crate::app::App;
use crate::sessions::{Rest, SessionId};
use futures_util::stream::{Stream, unfold};
use kvist_cache::{Content, GroupId};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// Largest number of sessions in the list.
const MOST: usize = 64;
/// Interval between two lookups.
const EVERY: Duration = Duration::from_millis(400);

#[derive(Serialize)]
struct Told {
    /// In the order of creation.
    sessions: Vec<Session>,
    /// Number of sessions that are not listed.
    more: usize,
}

#[derive(Serialize)]
struct Session {
    id: String,
    parent: Option<String>,
    tokens: usize,
    running: bool,
    /// Per layer group, the cached blocks of the history; `null` outside a sliding window. Empty while the session
    /// runs: its sequence owns the blocks.
    tables: Vec<Vec<Option<u32>>>,
}

/// The last result, which all listeners share. The engine thread is asked once per interval, however many listeners
/// there are, and looks no blocks up while sessions and prefix index stay unchanged.
#[derive(Default)]
pub(crate) struct Looks {
    last: Mutex<Option<Look>>,
    lookups: AtomicU64,
}

struct Look {
    at: Instant,
    /// The sessions that the result describes.
    of: Vec<Seen>,
    more: usize,
    prefix_version: u64,
    told: Arc<str>,
}

/// State of a session. The JSON for listeners depends only on this and on the prefix index.
struct Seen {
    id: SessionId,
    parent: Option<SessionId>,
    running: bool,
    /// Identifies the tokens by pointer. While this weak reference exists, a change of the tokens moves them to a new
    /// allocation.
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

    /// The list as JSON: current if `as_of_now`, otherwise at most [`EVERY`] old. `None` if the engine has ended.
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

/// A stream of the list as JSON: once at the start, then after every change.
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

    /// Tokens are compared by address.
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
        // First the way generations append tokens, then the way a history is replaced.
        Arc::make_mut(&mut tokens).push(4);
        assert!(before != seen(&tokens));
        let before = seen(&tokens);
        tokens = Arc::new(vec![1, 2, 3, 4]);
        assert!(before != seen(&tokens));
    }
}
