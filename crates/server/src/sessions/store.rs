//! Every session of a server: who owns it, what it was forked from, what happens to it, when it expires.
//!
//! Integers and texts alone: a session holds nothing in the cache. One change at a time: whoever changes a session, or
//! generates in it, holds its [`Claim`]; forks and looks need none. Whose a session is, nobody else learns: to others
//! it does not exist.
//!
//! Quotas are counted as histories change, token by token while they are generated; `Inner::audit` counts anew.
use super::history::History;
use crate::config::SessionsSection;
use crate::error::ApiError;
use axum::http::StatusCode;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Drawn at random: nobody finds another one's by counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SessionId(pub u128);

impl SessionId {
    fn draw() -> Self {
        SessionId(crate::openai::random_id())
    }

    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("sess-")?;
        let canonical = digits.len() == 32 && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        canonical.then(|| u128::from_str_radix(digits, 16).ok().map(SessionId))?
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sess-{:032x}", self.0)
    }
}

/// Now, on both clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub instant: Instant,
    /// Seconds since 1970.
    pub unix_s: u64,
}

/// What a session begins with.
pub(crate) struct Draft {
    pub name: Option<String>,
    pub cache_salt: Option<String>,
    /// Of prefixes: made of the key's name and `cache_salt`.
    pub salt: Arc<str>,
    pub history: History,
}

struct Session {
    owner: Arc<str>,
    name: Option<String>,
    cache_salt: Option<String>,
    salt: Arc<str>,
    created_s: u64,
    /// When it was last changed, forked or made.
    touched: Instant,
    history: History,
    parent: Option<SessionId>,
    children: BTreeSet<SessionId>,
    /// The call that forked it: its siblings have the same.
    fork: Option<u64>,
    /// Tokens from the first whose K and V have been computed once, here or where it was forked.
    computed: usize,
    busy: Option<Busy>,
}

/// Somebody changes it.
struct Busy {
    claim: u64,
    generates: bool,
    /// Of a generation before its first token: what is being computed. Whoever waits for that hears the sender go.
    computing: Option<(Arc<[u32]>, watch::Sender<()>)>,
    /// Whoever holds the claim hears it go with the session.
    _held: watch::Sender<()>,
}

/// What is told of a session.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub id: SessionId,
    pub name: Option<String>,
    pub cache_salt: Option<String>,
    pub created_s: u64,
    pub expires_s: u64,
    pub n_tokens: usize,
    pub n_messages: Option<usize>,
    pub parent: Option<SessionId>,
    /// Tokens from the first that its parent has too.
    pub shared_tokens: usize,
    pub children: Vec<SessionId>,
    pub running: bool,
}

#[derive(Default)]
struct Inner {
    sessions: BTreeMap<SessionId, Session>,
    /// Sessions and charge of every owner that has any.
    used: BTreeMap<Arc<str>, (usize, u64)>,
    /// Numbers of claims and forks.
    next: u64,
}

pub(crate) struct Store {
    inner: Mutex<Inner>,
    quota: SessionsSection,
    /// What is shared in the cache is whole blocks.
    block_tokens: usize,
}

/// The right to change one session, until it is dropped.
pub(crate) struct Claim {
    store: Arc<Store>,
    pub id: SessionId,
    number: u64,
    pub history: History,
    pub salt: Arc<str>,
    pub owner: Arc<str>,
    deleted: watch::Receiver<()>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut inner = self.store.lock();
        if let Some(session) = inner.claimed(self.id, self.number) {
            session.busy = None;
        }
    }
}

impl Store {
    pub fn new(quota: SessionsSection, block_tokens: u32) -> Arc<Self> {
        Arc::new(Store { inner: Mutex::default(), quota, block_tokens: block_tokens.max(1) as usize })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// With what has expired gone.
    fn at(&self, at: Moment) -> MutexGuard<'_, Inner> {
        let mut inner = self.lock();
        let idle = self.quota.idle();
        let old = |s: &Session| s.busy.is_none() && at.instant.saturating_duration_since(s.touched) >= idle;
        let expired: Vec<SessionId> =
            inner.sessions.iter().filter(|(_, s)| old(s)).map(|(id, _)| *id).collect();
        expired.into_iter().for_each(|id| inner.remove(id));
        inner
    }

    fn not_found(&self, id: &dyn fmt::Display) -> ApiError {
        let idle = self.quota.idle_s;
        let message = format!(
            "there is no session {id}: it was deleted, has expired after {idle} s without use, or is not of this key"
        );
        ApiError::new(StatusCode::NOT_FOUND, "session_not_found", message)
    }

    fn session<'a>(
        &self,
        inner: &'a mut Inner,
        owner: &str,
        id: SessionId,
    ) -> Result<&'a mut Session, ApiError> {
        let session = inner.sessions.get_mut(&id).filter(|session| &*session.owner == owner);
        session.ok_or_else(|| self.not_found(&id))
    }

    /// The id in a path; 404 if it is none.
    pub fn id(&self, text: &str) -> Result<SessionId, ApiError> {
        let shown: String = text.chars().take(64).collect();
        SessionId::parse(text).ok_or_else(|| self.not_found(&shown))
    }

    /// Refused, with nothing changed, if `n` more sessions of `charge` each would be too many.
    fn admit(&self, inner: &Inner, owner: &str, n: usize, charge: u64) -> Result<(), ApiError> {
        let (sessions, tokens) = inner.used.get(owner).copied().unwrap_or_default();
        if sessions + n > self.quota.max_sessions {
            let message = format!(
                "this key has {sessions} sessions, and {n} more would pass its {}: delete some, or keep a winner",
                self.quota.max_sessions
            );
            return Err(too_many(message));
        }
        self.admit_tokens(tokens, charge.saturating_mul(n as u64))
    }

    fn admit_tokens(&self, tokens: u64, more: u64) -> Result<(), ApiError> {
        match tokens.saturating_add(more) > self.quota.max_tokens {
            true => Err(self.too_long(tokens, more)),
            false => Ok(()),
        }
    }

    fn too_long(&self, tokens: u64, more: u64) -> ApiError {
        too_many(format!(
            "the sessions of this key have {tokens} tokens, and {more} more would pass its {}: delete some, or roll back",
            self.quota.max_tokens
        ))
    }

    pub fn create(&self, at: Moment, owner: &Arc<str>, draft: Draft) -> Result<Seen, ApiError> {
        let mut inner = self.at(at);
        self.admit(&inner, owner, 1, draft.history.charge())?;
        let session = Session {
            owner: owner.clone(),
            name: draft.name,
            cache_salt: draft.cache_salt,
            salt: draft.salt,
            created_s: at.unix_s,
            touched: at.instant,
            history: draft.history,
            parent: None,
            children: BTreeSet::new(),
            fork: None,
            computed: 0,
            busy: None,
        };
        let id = inner.add(session);
        Ok(inner.see(id, at, &self.quota))
    }

    /// A copy of what is there now.
    pub fn look(&self, at: Moment, owner: &str, id: SessionId) -> Result<(Seen, History), ApiError> {
        let mut inner = self.at(at);
        let history = self.session(&mut inner, owner, id)?.history.clone();
        Ok((inner.see(id, at, &self.quota), history))
    }

    /// In the order in which they were made, as far as seconds tell.
    pub fn list(&self, at: Moment, owner: &str) -> Vec<Seen> {
        let inner = self.at(at);
        let own = inner.sessions.iter().filter(|(_, session)| &*session.owner == owner);
        let mut seen: Vec<Seen> = own.map(|(id, _)| inner.see(*id, at, &self.quota)).collect();
        seen.sort_by_key(|one| (one.created_s, one.id));
        seen
    }

    /// `n` sessions with this beginning of the history of `id`.
    pub fn fork(
        &self,
        at: Moment,
        owner: &str,
        id: SessionId,
        history: &History,
        n: usize,
        name: Option<&str>,
    ) -> Result<Vec<Seen>, ApiError> {
        let mut inner = self.at(at);
        let parent = self.session(&mut inner, owner, id)?;
        parent.touched = at.instant;
        let computed = parent.computed.min(parent.history.in_common(history));
        let (owner, salt, cache_salt) =
            (parent.owner.clone(), parent.salt.clone(), parent.cache_salt.clone());
        self.admit(&inner, &owner, n, history.charge())?;
        let fork = inner.number();
        let one = |_| Session {
            owner: owner.clone(),
            name: name.map(str::to_string),
            cache_salt: cache_salt.clone(),
            salt: salt.clone(),
            created_s: at.unix_s,
            touched: at.instant,
            history: history.clone(),
            parent: Some(id),
            children: BTreeSet::new(),
            fork: Some(fork),
            computed,
            busy: None,
        };
        let forked: Vec<Session> = (0..n).map(one).collect();
        let ids: Vec<SessionId> = forked.into_iter().map(|session| inner.add(session)).collect();
        Ok(ids.into_iter().map(|id| inner.see(id, at, &self.quota)).collect())
    }

    /// Deletes it; its forks go on, as forks of its parent.
    pub fn delete(&self, at: Moment, owner: &str, id: SessionId) -> Result<(), ApiError> {
        let mut inner = self.at(at);
        self.session(&mut inner, owner, id)?;
        inner.remove(id);
        Ok(())
    }

    /// Deletes the other forks of the call that made it, unless they are among `also`, and all that was forked from
    /// those. Says which.
    pub fn keep(
        &self,
        at: Moment,
        owner: &str,
        id: SessionId,
        also: &[SessionId],
    ) -> Result<Vec<SessionId>, ApiError> {
        let mut inner = self.at(at);
        let fork = self.session(&mut inner, owner, id)?.fork;
        let Some(fork) = fork else {
            let message = format!("session {id} was not forked: it has no siblings that could be deleted");
            return Err(ApiError::new(StatusCode::CONFLICT, "not_a_fork", message));
        };
        let sibling = |inner: &Inner, id: &SessionId| {
            inner.sessions.get(id).is_some_and(|s| &*s.owner == owner && s.fork == Some(fork))
        };
        for (i, id) in also.iter().enumerate() {
            if !sibling(&inner, id) {
                let message = format!("`also[{i}]` is {id}, which is no sibling: none of the same fork");
                return Err(ApiError::invalid(format!("also[{i}]"), message));
            }
        }
        let mut losers: Vec<SessionId> = inner.sessions.keys().copied().collect();
        losers.retain(|other| *other != id && !also.contains(other) && sibling(&inner, other));
        // Their descendants, level by level.
        let mut level = losers.clone();
        while !level.is_empty() {
            let below = level.iter().filter_map(|id| inner.sessions.get(id)).flat_map(|s| &s.children);
            level = below.copied().collect();
            losers.extend(&level);
        }
        losers.iter().for_each(|id| inner.remove(*id));
        self.session(&mut inner, owner, id)?.touched = at.instant;
        Ok(losers)
    }

    /// The right to change it; 409 while somebody else has it.
    pub fn claim(
        self: &Arc<Self>,
        at: Moment,
        owner: &str,
        id: SessionId,
        generates: bool,
    ) -> Result<Claim, ApiError> {
        let mut inner = self.at(at);
        let number = inner.number();
        let session = self.session(&mut inner, owner, id)?;
        if let Some(busy) = &session.busy {
            let what = if busy.generates { "generates" } else { "is being changed by another request" };
            let message = format!("session {id} {what}: wait for its end, fork it, or delete it");
            return Err(ApiError::new(StatusCode::CONFLICT, "session_busy", message));
        }
        let (held, deleted) = watch::channel(());
        session.busy = Some(Busy { claim: number, generates, computing: None, _held: held });
        session.touched = at.instant;
        let (history, salt, owner) = (session.history.clone(), session.salt.clone(), session.owner.clone());
        Ok(Claim { store: self.clone(), id, number, history, salt, owner, deleted })
    }

    #[cfg(test)]
    pub fn audit(&self) {
        self.lock().audit();
    }
}

fn too_many(message: String) -> ApiError {
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, "session_quota", message)
}

impl Claim {
    fn gone(&self) -> ApiError {
        let message = format!("session {} was deleted meanwhile", self.id);
        ApiError::new(StatusCode::NOT_FOUND, "session_not_found", message)
    }

    /// Resolves when the session is deleted, to what its user is told.
    pub fn deleted(&self) -> impl Future<Output = ApiError> + Send + use<> {
        let (mut deleted, error) = (self.deleted.clone(), self.gone());
        async move {
            while deleted.changed().await.is_ok() {}
            error
        }
    }

    /// Make it the session's history. Refused, with nothing changed, beyond the quota; becoming shorter never is.
    pub fn commit(&mut self, at: Moment, history: History) -> Result<Seen, ApiError> {
        let mut inner = self.store.lock();
        let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
        let (before, after) = (session.history.charge(), history.charge());
        if after > before {
            let (_, tokens) = inner.used.get(&self.owner).copied().unwrap_or_default();
            self.store.admit_tokens(tokens, after - before)?;
        }
        let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
        session.computed = session.computed.min(session.history.in_common(&history));
        session.touched = at.instant;
        session.history = history.clone();
        self.history = history;
        inner.charge(&self.owner, before, after);
        Ok(inner.see(self.id, at, &self.store.quota))
    }

    /// A generated token. The first one makes `began`, its prompt, the session's history: it has been computed.
    /// Refused when the session is gone, or its owner's quota is full.
    pub fn push(&mut self, began: Option<History>, token: u32) -> Result<(), ApiError> {
        let mut inner = self.store.lock();
        let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
        let before = session.history.charge();
        if let Some(began) = began {
            session.history = began;
            session.computed = session.history.tokens.len();
            // Whoever waits for it goes on.
            if let Some(busy) = &mut session.busy {
                busy.computing = None;
            }
        }
        Arc::make_mut(&mut session.history.tokens).push(token);
        session.computed = session.history.tokens.len() - 1;
        let after = session.history.charge();
        inner.charge(&self.owner, before, after);
        let (_, tokens) = inner.used.get(&self.owner).copied().unwrap_or_default();
        if tokens > self.store.quota.max_tokens {
            return Err(self.store.too_long(tokens, 1));
        }
        Ok(())
    }

    /// Its generation has ended, or will not go on: `last` settles the history. It may take a while, and holds nobody
    /// up: no other may change the history meanwhile.
    pub fn end(&mut self, now: Instant, last: impl FnOnce(&mut History)) {
        let there = self.store.lock().claimed(self.id, self.number).map(|session| session.history.clone());
        let Some(mut history) = there else { return };
        last(&mut history);
        let mut inner = self.store.lock();
        let Some(session) = inner.claimed(self.id, self.number) else { return };
        let before = session.history.charge();
        session.history = history;
        let n_tokens = session.history.tokens.len();
        session.computed = session.computed.min(n_tokens);
        session.touched = now;
        session.busy = None;
        let after = session.history.charge();
        inner.charge(&self.owner, before, after);
    }

    /// Say that `prompt` is about to be computed, unless a generation of the same salt computes more of it right now than
    /// ever was: then a receiver that fails when that one has its first token, or has ended.
    ///
    /// So branches of a trunk that nobody has computed yet, all set going at once, compute it once: one goes ahead, the
    /// others find it in the cache. Each wait is for a longer beginning than the one before, so it ends.
    pub fn announce(&self, prompt: &Arc<[u32]>) -> Result<Option<watch::Receiver<()>>, ApiError> {
        let mut inner = self.store.lock();
        let computed = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?.computed;
        let mut best: Option<(usize, watch::Receiver<()>)> = None;
        for session in inner.sessions.values().filter(|session| session.salt == self.salt) {
            let Some((other, sender)) = session.busy.as_ref().and_then(|busy| busy.computing.as_ref()) else {
                continue;
            };
            let same = other.iter().zip(prompt.iter()).take_while(|(a, b)| a == b).count();
            let found = same - same % self.store.block_tokens;
            if found > computed && best.as_ref().is_none_or(|(most, _)| found > *most) {
                best = Some((found, sender.subscribe()));
            }
        }
        let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
        Ok(match best {
            Some((found, receiver)) => {
                session.computed = found;
                Some(receiver)
            }
            None => {
                if let Some(busy) = &mut session.busy {
                    busy.computing = Some((prompt.clone(), watch::Sender::new(())));
                }
                None
            }
        })
    }
}

impl Inner {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn claimed(&mut self, id: SessionId, number: u64) -> Option<&mut Session> {
        let held = |session: &&mut Session| session.busy.as_ref().is_some_and(|busy| busy.claim == number);
        self.sessions.get_mut(&id).filter(held)
    }

    fn add(&mut self, session: Session) -> SessionId {
        let used = self.used.entry(session.owner.clone()).or_default();
        used.0 += 1;
        used.1 += session.history.charge();
        let mut id = SessionId::draw();
        while self.sessions.contains_key(&id) {
            id = SessionId::draw();
        }
        if let Some(parent) = session.parent.and_then(|parent| self.sessions.get_mut(&parent)) {
            parent.children.insert(id);
        }
        self.sessions.insert(id, session);
        id
    }

    fn remove(&mut self, id: SessionId) {
        let Some(gone) = self.sessions.remove(&id) else { return };
        for child in &gone.children {
            if let Some(child) = self.sessions.get_mut(child) {
                child.parent = gone.parent;
            }
        }
        if let Some(parent) = gone.parent.and_then(|parent| self.sessions.get_mut(&parent)) {
            parent.children.remove(&id);
            parent.children.extend(&gone.children);
        }
        if let Some(used) = self.used.get_mut(&gone.owner) {
            used.0 -= 1;
            used.1 -= gone.history.charge();
            if used.0 == 0 {
                self.used.remove(&gone.owner);
            }
        }
    }

    fn charge(&mut self, owner: &Arc<str>, before: u64, after: u64) {
        if let Some(used) = self.used.get_mut(owner) {
            used.1 = used.1 - before + after;
        }
    }

    fn see(&self, id: SessionId, at: Moment, quota: &SessionsSection) -> Seen {
        let session = &self.sessions[&id];
        let idle = at.instant.saturating_duration_since(session.touched);
        let left = if session.busy.is_some() { quota.idle() } else { quota.idle().saturating_sub(idle) };
        let parent = session.parent.and_then(|parent| self.sessions.get(&parent));
        Seen {
            id,
            name: session.name.clone(),
            cache_salt: session.cache_salt.clone(),
            created_s: session.created_s,
            expires_s: at.unix_s + left.saturating_add(Duration::from_millis(999)).as_secs(),
            n_tokens: session.history.tokens.len(),
            n_messages: session.history.n_messages(),
            parent: session.parent,
            shared_tokens: parent.map_or(0, |parent| parent.history.in_common(&session.history)),
            children: session.children.iter().copied().collect(),
            running: session.busy.as_ref().is_some_and(|busy| busy.generates),
        }
    }

    /// What is counted is what is there, and parents are.
    #[cfg(test)]
    fn audit(&self) {
        let mut used: BTreeMap<Arc<str>, (usize, u64)> = BTreeMap::new();
        for (id, session) in &self.sessions {
            let used = used.entry(session.owner.clone()).or_default();
            used.0 += 1;
            used.1 += session.history.charge();
            let forked = self.sessions.iter().filter(|(_, other)| other.parent == Some(*id));
            let children: BTreeSet<SessionId> = forked.map(|(id, _)| *id).collect();
            assert_eq!(children, session.children, "the children of {id}");
            let mut above = session.parent;
            let mut steps = 0;
            while let Some(parent) = above {
                let parent =
                    self.sessions.get(&parent).unwrap_or_else(|| panic!("{id} has a parent that is gone"));
                assert_eq!(parent.owner, session.owner, "{id} was forked from another owner's");
                assert!(session.computed <= session.history.tokens.len());
                above = parent.parent;
                steps += 1;
                assert!(steps <= self.sessions.len(), "{id} is its own ancestor");
            }
        }
        assert_eq!(used, self.used);
    }
}

#[cfg(test)]
mod tests {
    use super::super::history::MIN_CHARGE;
    use super::*;

    /// Numbers that are the same in every run of a seed.
    struct Draw(u64);

    impl Draw {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as usize % n
        }
    }

    /// Histories in a vector: what the store should hold.
    struct Twin {
        id: SessionId,
        owner: usize,
        tokens: Vec<u32>,
        touched_s: u64,
    }

    fn charge(n_tokens: usize) -> usize {
        n_tokens.max(MIN_CHARGE as usize)
    }

    /// Random verbs of two owners; what is there, what is counted, and what is shared, against vectors.
    #[test]
    fn the_store_and_a_list_of_vectors() {
        for seed in 0..40 {
            let mut draw = Draw(seed);
            let quota = SessionsSection { idle_s: 50.0, max_sessions: 8, max_tokens: 150 };
            let store = Store::new(quota, 4);
            let owners: [Arc<str>; 2] = ["a".into(), "b".into()];
            let mut twins: Vec<Twin> = Vec::new();
            let (start, mut second) = (Instant::now(), 0);
            for step in 0..400 {
                let what = format!("seed {seed}, step {step}");
                second += draw.below(8) as u64;
                let at = Moment { instant: start + Duration::from_secs(second), unix_s: 1000 + second };
                twins.retain(|twin| second - twin.touched_s < 50);
                let owner = draw.below(2);
                let me = &owners[owner];
                let used = |twins: &[Twin]| {
                    let own = twins.iter().filter(|twin| twin.owner == owner);
                    own.fold((0, 0), |(n, tokens), twin| (n + 1, tokens + charge(twin.tokens.len())))
                };
                let (n, used) = used(&twins);
                let fits = |more: usize, tokens: usize| n + more <= 8 && used + more * charge(tokens) <= 150;
                let own: Vec<usize> = (0..twins.len()).filter(|i| twins[*i].owner == owner).collect();
                let picked = (!own.is_empty()).then(|| own[draw.below(own.len())]);
                match (draw.below(5), picked) {
                    (0, _) | (_, None) => {
                        let tokens: Vec<u32> = (0..draw.below(40)).map(|i| i as u32).collect();
                        let history = History::of_tokens(tokens.clone());
                        let draft = Draft { name: None, cache_salt: None, salt: me.clone(), history };
                        let made = store.create(at, me, draft);
                        assert_eq!(made.is_ok(), fits(1, tokens.len()), "{what}");
                        twins.extend(made.map(|made| Twin { id: made.id, owner, tokens, touched_s: second }));
                    }
                    (1, Some(i)) => {
                        let (n, cut) = (1 + draw.below(3), draw.below(twins[i].tokens.len() + 1));
                        let tokens = twins[i].tokens[..cut].to_vec();
                        let made =
                            store.fork(at, me, twins[i].id, &History::of_tokens(tokens.clone()), n, None);
                        assert_eq!(made.is_ok(), fits(n, cut), "{what}");
                        twins[i].touched_s = second;
                        for seen in made.into_iter().flatten() {
                            assert_eq!((seen.shared_tokens, seen.parent), (cut, Some(twins[i].id)), "{what}");
                            twins.push(Twin {
                                id: seen.id,
                                owner,
                                tokens: tokens.clone(),
                                touched_s: second,
                            });
                        }
                    }
                    (2, Some(i)) => {
                        let mut claim = store.claim(at, me, twins[i].id, true).unwrap();
                        let again = store.claim(at, me, twins[i].id, false);
                        assert_eq!(again.map(|_| ()).unwrap_err().status, StatusCode::CONFLICT, "{what}");
                        let mut began = Some(History::of_tokens(twins[i].tokens.clone()));
                        let others = used - charge(twins[i].tokens.len());
                        for k in 0..draw.below(30) {
                            let pushed = claim.push(began.take(), 90 + k as u32);
                            twins[i].tokens.push(90 + k as u32);
                            assert_eq!(
                                pushed.is_ok(),
                                others + charge(twins[i].tokens.len()) <= 150,
                                "{what}"
                            );
                            if pushed.is_err() {
                                break;
                            }
                        }
                        claim.end(at.instant, |_| ());
                        twins[i].touched_s = second;
                    }
                    (3, Some(i)) => {
                        let mut claim = store.claim(at, me, twins[i].id, false).unwrap();
                        let mut tokens = twins[i].tokens.clone();
                        tokens.truncate(draw.below(tokens.len() + 1));
                        tokens.extend((0..draw.below(20)).map(|k| 70 + k as u32));
                        let grows = charge(tokens.len()).saturating_sub(charge(twins[i].tokens.len()));
                        let done = claim.commit(at, History::of_tokens(tokens.clone()));
                        assert_eq!(done.is_ok(), grows == 0 || used + grows <= 150, "{what}");
                        if done.is_ok() {
                            twins[i].tokens = tokens;
                        }
                        twins[i].touched_s = second;
                    }
                    (_, Some(i)) => {
                        let twin = twins.swap_remove(i);
                        let other = &owners[1 - owner];
                        assert!(store.delete(at, other, twin.id).is_err(), "{what}: another one's");
                        store.delete(at, me, twin.id).unwrap();
                    }
                }
                store.audit();
                for (owner, name) in owners.iter().enumerate() {
                    let mut seen: Vec<_> =
                        store.list(at, name).into_iter().map(|s| (s.id, s.n_tokens)).collect();
                    let own = twins.iter().filter(|twin| twin.owner == owner);
                    let mut expected: Vec<_> = own.map(|twin| (twin.id, twin.tokens.len())).collect();
                    seen.sort_unstable();
                    expected.sort_unstable();
                    assert_eq!(seen, expected, "{what}");
                }
                if let Some(twin) = twins.last() {
                    let (_, history) = store.look(at, &owners[twin.owner], twin.id).unwrap();
                    assert_eq!(*history.tokens, twin.tokens, "{what}");
                }
            }
        }
    }

    #[test]
    fn ids_are_read_as_they_are_written() {
        let id = SessionId::draw();
        assert_eq!(SessionId::parse(&id.to_string()), Some(id));
        assert_ne!(SessionId::draw(), id);
        for bad in ["", "sess-", "sess-0", &id.to_string().to_uppercase(), &format!("{id}0"), "sess-+123"] {
            assert_eq!(SessionId::parse(bad), None, "{bad:?}");
        }
    }
}
