//! Tests the store against a simple reference model, and counts how many sessions an operation looks at.
use super::super::history::MIN_CHARGE;
use super::*;
use kvist_testing::SplitMix64;

/// Reference model of a session.
struct Reference {
    id: SessionId,
    owner: usize,
    tokens: Vec<u32>,
    touched_s: u64,
}

fn charge(n_tokens: usize) -> usize {
    n_tokens.max(MIN_CHARGE as usize)
}

/// Random operations of two owners; compares contents, quota and shared prefixes with the reference model.
#[test]
fn the_store_and_a_list_of_vectors() {
    for seed in 0..40 {
        let mut draw = SplitMix64(seed);
        let quota = SessionLimits { idle: Duration::from_secs(50), max_sessions: 8, max_tokens: 150 };
        let store = SessionStore::new(quota);
        let owners: [Arc<str>; 2] = ["a".into(), "b".into()];
        let mut references: Vec<Reference> = Vec::new();
        let (start, mut second) = (Instant::now(), 0);
        for step in 0..400 {
            let what = format!("seed {seed}, step {step}");
            second += draw.index(8) as u64;
            let at = Timestamp { instant: start + Duration::from_secs(second), unix_s: 1000 + second };
            references.retain(|reference| second - reference.touched_s < 50);
            let owner = draw.index(2);
            let me = &owners[owner];
            let used = |references: &[Reference]| {
                let own = references.iter().filter(|reference| reference.owner == owner);
                own.fold((0, 0), |(n, tokens), reference| (n + 1, tokens + charge(reference.tokens.len())))
            };
            let (n, used) = used(&references);
            let fits = |more: usize, tokens: usize| n + more <= 8 && used + more * charge(tokens) <= 150;
            let own: Vec<usize> = (0..references.len()).filter(|i| references[*i].owner == owner).collect();
            let picked = (!own.is_empty()).then(|| own[draw.index(own.len())]);
            match (draw.index(5), picked) {
                (0, _) | (_, None) => {
                    let tokens: Vec<u32> = (0..draw.index(40)).map(|i| i as u32).collect();
                    let history = History::of_tokens(tokens.clone());
                    let draft = NewSession { name: None, cache_salt: None, salt: me.clone(), history };
                    let made = store.create(at, me, draft);
                    assert_eq!(made.is_ok(), fits(1, tokens.len()), "{what}");
                    references.extend(made.map(|made| Reference {
                        id: made.id,
                        owner,
                        tokens,
                        touched_s: second,
                    }));
                }
                (1, Some(i)) => {
                    let (n, cut) = (1 + draw.index(3), draw.index(references[i].tokens.len() + 1));
                    let tokens = references[i].tokens[..cut].to_vec();
                    let made =
                        store.fork(at, me, references[i].id, &History::of_tokens(tokens.clone()), n, None);
                    assert_eq!(made.is_ok(), fits(n, cut), "{what}");
                    references[i].touched_s = second;
                    for seen in made.into_iter().flatten() {
                        assert_eq!(
                            (seen.shared_tokens, seen.parent),
                            (cut, Some(references[i].id)),
                            "{what}"
                        );
                        references.push(Reference {
                            id: seen.id,
                            owner,
                            tokens: tokens.clone(),
                            touched_s: second,
                        });
                    }
                }
                (2, Some(i)) => {
                    let mut claim = store.claim(at, me, references[i].id, true).unwrap();
                    let again = store.claim(at, me, references[i].id, false);
                    assert!(matches!(again, Err(SessionError::Busy { .. })), "{what}");
                    let mut prompt = Some(History::of_tokens(references[i].tokens.clone()));
                    let others = used - charge(references[i].tokens.len());
                    for k in 0..draw.index(30) {
                        let pushed = claim.push(prompt.take(), 90 + k as u32);
                        references[i].tokens.push(90 + k as u32);
                        assert_eq!(
                            pushed.is_ok(),
                            others + charge(references[i].tokens.len()) <= 150,
                            "{what}"
                        );
                        if pushed.is_err() {
                            break;
                        }
                    }
                    claim.end(at.instant, |_| ());
                    references[i].touched_s = second;
                }
                (3, Some(i)) => {
                    let mut claim = store.claim(at, me, references[i].id, false).unwrap();
                    let mut tokens = references[i].tokens.clone();
                    tokens.truncate(draw.index(tokens.len() + 1));
                    tokens.extend((0..draw.index(20)).map(|k| 70 + k as u32));
                    let grows = charge(tokens.len()).saturating_sub(charge(references[i].tokens.len()));
                    let done = claim.commit(at, History::of_tokens(tokens.clone()));
                    assert_eq!(done.is_ok(), grows == 0 || used + grows <= 150, "{what}");
                    if done.is_ok() {
                        references[i].tokens = tokens;
                    }
                    references[i].touched_s = second;
                }
                (_, Some(i)) => {
                    let reference = references.swap_remove(i);
                    let other = &owners[1 - owner];
                    assert!(store.delete(at, other, reference.id).is_err(), "{what}: another one's");
                    store.delete(at, me, reference.id).unwrap();
                }
            }
            store.audit();
            for (owner, name) in owners.iter().enumerate() {
                let mut seen: Vec<_> = store.list(at, name).into_iter().map(|s| (s.id, s.n_tokens)).collect();
                let own = references.iter().filter(|reference| reference.owner == owner);
                let mut expected: Vec<_> =
                    own.map(|reference| (reference.id, reference.tokens.len())).collect();
                seen.sort_unstable();
                expected.sort_unstable();
                assert_eq!(seen, expected, "{what}");
            }
            if let Some(reference) = references.last() {
                let (_, history) = store.get(at, &owners[reference.owner], reference.id).unwrap();
                assert_eq!(*history.tokens, reference.tokens, "{what}");
            }
        }
    }
}

fn text(salt: &str, tokens: &[u32]) -> NewSession {
    NewSession {
        name: None,
        cache_salt: None,
        salt: salt.into(),
        history: History::of_tokens(tokens.to_vec()),
    }
}

/// A claimed session may pass its expiry time. If the claim is released unused, the session is removed; if the
/// session was used, its full idle time starts again.
#[test]
fn a_claimed_session_expires_when_it_is_let_go() {
    let store =
        SessionStore::new(SessionLimits { idle: Duration::from_secs(50), max_sessions: 8, max_tokens: 1000 });
    let me: Arc<str> = "a".into();
    let start = Instant::now();
    let at = |s: u64| Timestamp { instant: start + Duration::from_secs(s), unix_s: s };
    let ids: Vec<SessionId> = (0..3).map(|_| store.create(at(0), &me, text("s", &[1])).unwrap().id).collect();
    let mut claims: Vec<SessionGuard> =
        ids.iter().map(|id| store.claim(at(10), &me, *id, true).unwrap()).collect();
    for s in [49, 50, 60, 200] {
        assert_eq!(store.list(at(s), &me).len(), 3, "{s}");
        store.audit();
    }
    claims[0].end(at(201).instant, |_| ());
    store.audit();
    drop(claims.remove(1));
    let there: Vec<SessionId> = store.list(at(202), &me).into_iter().map(|seen| seen.id).collect();
    let mut expected = [ids[0], ids[2]];
    expected.sort_unstable();
    assert_eq!(there, expected);
    assert_eq!(store.list(at(250), &me).len(), 2);
    assert_eq!(store.list(at(251), &me).len(), 1, "the one that is in use");
    drop(claims);
    assert_eq!(store.list(at(251), &me).len(), 0);
    store.audit();
}

/// Operations do not scan sessions of other owners; a session is only checked when it may have expired.
#[test]
fn a_verb_does_not_look_at_all_sessions() {
    let store = SessionStore::new(SessionLimits {
        idle: Duration::from_secs(50),
        max_sessions: 2000,
        max_tokens: 1 << 20,
    });
    let (me, other): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
    let start = Instant::now();
    let at = |ms: u64| Timestamp { instant: start + Duration::from_millis(ms), unix_s: 0 };
    for _ in 0..1000 {
        store.create(at(0), &other, text("b", &[1])).unwrap();
    }
    let mine = store.create(at(0), &me, text("a", &[1])).unwrap().id;
    for ms in 0..1000 {
        store.claim(at(ms * 30), &me, mine, false).unwrap();
        store.get(at(ms * 30), &me, mine).unwrap();
    }
    assert_eq!(store.lock().n_checked, 0, "no session's time is over");
    for ms in 0..1000 {
        store.claim(at(40_000 + ms * 40), &me, mine, false).unwrap();
    }
    assert_eq!(store.list(at(80_000), &other).len(), 0);
    let looked = store.lock().n_checked;
    assert!((1000..1010).contains(&looked), "{looked} looked at");
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
