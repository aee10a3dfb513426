//! The list of sessions for the live view, with the blocks of each that are still cached.
//!
//! A session that is not generating owns no block. Listeners therefore see what its next generation would find in the
//! prefix index: ids, sizes and blocks, but no tokens, names or salts. The list has the [`MAX`] most recently used
//! sessions, and is sent again when anything in it has changed.
//!
//! The engine thread looks the blocks up between two steps. Listeners share one result ([`SessionListCache`]).
use futures_util::stream::{Stream, unfold};
use kvist_cache::{Content, GroupId};
use kvist_engine::serving::Engine;
use kvist_engine::sessions::{SessionId, SessionStore, SessionTokens};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// Largest number of sessions in the list.
const MAX: usize = 64;
/// Interval between two lookups.
const EVERY: Duration = Duration::from_millis(400);

#[derive(Serialize)]
struct SessionList {
    /// In the order of creation.
    sessions: Vec<ListedSession>,
    /// Number of sessions that are not listed.
    more: usize,
}

#[derive(Serialize)]
struct ListedSession {
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
pub(crate) struct SessionListCache {
    engine: Engine,
    sessions: Arc<SessionStore>,
    last: Mutex<Option<CachedList>>,
    lookups: AtomicU64,
}

struct CachedList {
    at: Instant,
    /// The sessions that the result describes.
    of: Vec<SessionVersion>,
    more: usize,
    prefix_version: u64,
    json: Arc<str>,
}

/// State of a session. The JSON for listeners depends only on this and on the prefix index.
struct SessionVersion {
    id: SessionId,
    parent: Option<SessionId>,
    running: bool,
    /// Identifies the tokens by pointer. While this weak reference exists, a change of the tokens moves them to a new
    /// allocation.
    tokens: Weak<Vec<u32>>,
}

impl From<&SessionTokens> for SessionVersion {
    fn from(session: &SessionTokens) -> SessionVersion {
        let tokens = Arc::downgrade(&session.tokens);
        SessionVersion { id: session.id, parent: session.parent, running: session.running, tokens }
    }
}

impl PartialEq for SessionVersion {
    fn eq(&self, other: &SessionVersion) -> bool {
        let is = |seen: &SessionVersion| (seen.id, seen.parent, seen.running);
        is(self) == is(other) && self.tokens.ptr_eq(&other.tokens)
    }
}

impl CachedList {
    fn is_recent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < EVERY
    }
}

impl SessionListCache {
    pub fn new(engine: Engine, sessions: Arc<SessionStore>) -> Arc<Self> {
        Arc::new(SessionListCache { engine, sessions, last: Mutex::default(), lookups: AtomicU64::new(0) })
    }

    /// How often blocks were looked up.
    pub fn n_lookups(&self) -> u64 {
        self.lookups.load(SeqCst)
    }

    /// The list as JSON: current if `as_of_now`, otherwise at most [`EVERY`] old. `None` if the engine has ended.
    async fn get(self: &Arc<Self>, as_of_now: bool) -> Option<Arc<str>> {
        let mut last = self.last.lock().await;
        let at = Instant::now();
        if let Some(recent) = last.as_ref().filter(|list| !as_of_now && list.is_recent(at)) {
            return Some(recent.json.clone());
        }
        let (recent, more) = self.sessions.recent(at, MAX);
        let of: Vec<SessionVersion> = recent.iter().map(SessionVersion::from).collect();
        let same = last.as_ref().filter(|list| list.more == more && list.of == of);
        let known = same.map(|list| (list.prefix_version, list.json.clone()));
        let list = self.clone();
        let found = self.engine.inspect(move |state| {
            let cache = state.scheduler.cache();
            let prefix_version = cache.prefix_version();
            if let Some((_, json)) = known.filter(|(version, _)| *version == prefix_version) {
                return (prefix_version, json);
            }
            list.lookups.fetch_add(1, SeqCst);
            let groups = u16::try_from(cache.n_groups()).unwrap_or(u16::MAX);
            let session = |session: SessionTokens| {
                let content = Content::Tokens(&session.tokens);
                let known = |group| cache.lookup_blocks(GroupId(group), &session.salt, &content);
                ListedSession {
                    id: session.id.to_string(),
                    parent: session.parent.map(|id| id.to_string()),
                    tokens: session.tokens.len(),
                    running: session.running,
                    tables: if session.running { Vec::new() } else { (0..groups).map(known).collect() },
                }
            };
            let sessions = SessionList { sessions: recent.into_iter().map(session).collect(), more };
            (prefix_version, serde_json::to_string(&sessions).unwrap_or_default().into())
        });
        let (prefix_version, json) = found.await?;
        *last = Some(CachedList { at, of, more, prefix_version, json: json.clone() });
        Some(json)
    }
}

/// A stream of the list as JSON: once at the start, then after every change.
pub(crate) fn watch(list: Arc<SessionListCache>) -> impl Stream<Item = String> {
    let begin: (Arc<SessionListCache>, Option<Arc<str>>) = (list, None);
    unfold(begin, |(list, before)| async move {
        loop {
            if before.is_some() {
                tokio::time::sleep(EVERY).await;
            }
            let now = list.get(before.is_none()).await?;
            if before.as_ref() != Some(&now) {
                return Some((now.to_string(), (list, Some(now))));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_serves_until_the_next_is_due() {
        let at = Instant::now();
        let list = CachedList { at, of: Vec::new(), more: 0, prefix_version: 0, json: "".into() };
        assert!(list.is_recent(at) && list.is_recent(at + EVERY / 2));
        assert!(!list.is_recent(at + EVERY));
    }

    /// Tokens are compared by address.
    #[test]
    fn changed_tokens_are_seen() {
        let mut tokens = Arc::new(vec![1, 2, 3]);
        let seen = |tokens: &Arc<Vec<u32>>| SessionVersion {
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
