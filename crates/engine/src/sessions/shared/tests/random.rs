//! Two workers over one store against one simple model: a list of sessions, as a single server has them. `KVIST_ROUNDS=50` for more.
use super::*;
use kvist_testing::SplitMix64;
use std::collections::BTreeSet;

/// A session of the model.
#[derive(Clone)]
struct Model {
    owner: &'static str,
    tokens: Vec<u32>,
    parent: Option<SessionId>,
}

const OWNERS: [&str; 2] = ["ann", "bob"];

fn rounds() -> u64 {
    std::env::var("KVIST_ROUNDS").map_or(1, |rounds| rounds.parse().expect("KVIST_ROUNDS is a number"))
}

/// Kills a worker in mid-answer, after everything before is recorded, and starts another one with nothing.
fn kill(worker: &mut Worker, runtime: &Runtime, frames: &Arc<Frames>, session: Option<(SessionId, &Model)>) {
    let guard = session.map(|(id, model)| {
        let mut guard = worker.claim(model.owner, id).unwrap();
        guard.push(Some(History::of_tokens(model.tokens.clone())), 999).unwrap();
        worker.shared.flush();
        guard
    });
    // A process that is killed drops nothing.
    std::mem::forget((guard, std::mem::replace(worker, Worker::start(runtime, frames))));
}

/// Each change is recorded before the next request, as it is between two turns of a conversation: wherever the request goes, the
/// answer is that of one server.
#[test]
fn two_workers_are_as_one() {
    let runtime = runtime();
    for seed in 0..20 * rounds() {
        let mut draw = SplitMix64(seed);
        let frames = Arc::new(Frames::default());
        let mut workers = [0, 1].map(|_| Worker::start(&runtime, &frames));
        let mut model: BTreeMap<SessionId, Model> = BTreeMap::new();
        let mut gone: Vec<SessionId> = Vec::new();
        for step in 0..150 {
            let what = format!("seed {seed}, step {step}");
            let at = draw.index(2);
            let picked = model.keys().nth(draw.index(model.len().max(1))).copied();
            if draw.below(25) == 0 {
                kill(&mut workers[at], &runtime, &frames, picked.map(|id| (id, &model[&id])));
                continue;
            }
            let worker = &workers[at];
            let Some(id) = picked.filter(|_| draw.below(5) > 0) else {
                let owner = draw.pick(&OWNERS);
                let tokens: Vec<u32> = (0..draw.below(20)).collect();
                model.insert(worker.create(owner, &tokens), Model { owner, tokens, parent: None });
                worker.shared.flush();
                continue;
            };
            let Model { owner, tokens, parent } = model[&id].clone();
            let (info, found) = worker.get(owner, id).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!((&found, info.parent), (&tokens, parent), "{what}");
            assert!(worker.get(OWNERS[usize::from(owner == "ann")], id).is_err(), "{what}: another one's");
            match draw.below(4) {
                0 => {
                    let mut guard = worker.claim(owner, id).unwrap();
                    let mut prompt = Some(History::of_tokens(tokens));
                    for token in 0..draw.below(10) {
                        guard.push(prompt.take(), 100 + token).unwrap();
                        model.get_mut(&id).unwrap().tokens.push(100 + token);
                    }
                    guard.end(std::time::Instant::now(), |_| ());
                }
                1 => {
                    let mut guard = worker.claim(owner, id).unwrap();
                    let mut changed = tokens;
                    changed.truncate(draw.index(changed.len() + 1));
                    changed.extend((0..draw.below(6)).map(|token| 200 + token));
                    guard.commit(Timestamp::now(), History::of_tokens(changed.clone())).unwrap();
                    model.get_mut(&id).unwrap().tokens = changed;
                }
                2 => {
                    let tokens = tokens[..draw.index(tokens.len() + 1)].to_vec();
                    let history = History::of_tokens(tokens.clone());
                    let n = 1 + draw.index(2);
                    for fork in worker.sessions.fork(Timestamp::now(), owner, id, &history, n, None).unwrap()
                    {
                        model.insert(fork.id, Model { owner, tokens: tokens.clone(), parent: Some(id) });
                    }
                }
                // A worker moves the forks that it has to the parent's parent, so one without forks is deleted.
                _ if model.values().all(|session| session.parent != Some(id)) => {
                    worker.sessions.delete(Timestamp::now(), owner, id).unwrap();
                    model.remove(&id);
                    gone.push(id);
                }
                _ => {}
            }
            worker.shared.flush();
            for worker in &workers {
                worker.sessions.audit();
                for id in gone.iter().rev().take(3) {
                    assert!(
                        OWNERS.iter().all(|owner| worker.tokens(owner, *id).is_none()),
                        "{what}: deleted"
                    );
                }
            }
        }
        let conflicts: u64 = workers.iter().map(|worker| worker.shared.counts().conflicts).sum();
        assert_eq!(conflicts, 0, "seed {seed}");
    }
}

/// Appends a token, if the session is still there. Returns its tokens.
fn try_append(worker: &Worker, id: SessionId, token: u32) -> Option<Vec<u32>> {
    worker.find("ann", id).ok()?;
    let mut guard = worker.sessions.claim(Timestamp::now(), "ann", id, false).ok()?;
    let tokens = [guard.history.tokens.as_slice(), &[token]].concat();
    guard.commit(Timestamp::now(), History::of_tokens(tokens.clone())).ok()?;
    Some(tokens)
}

/// Changes on both workers at any time, with a store that is down now and then: in the end both have the same, and it is a state that
/// one of them had. What was deleted is gone.
#[test]
fn two_workers_agree_in_the_end() {
    let runtime = runtime();
    let mut conflicts = 0;
    for seed in 0..30 * rounds() {
        let mut draw = SplitMix64(1000 + seed);
        let frames = Arc::new(Frames::default());
        let workers = [0, 1].map(|_| Worker::start(&runtime, &frames));
        let mut states: BTreeMap<SessionId, BTreeSet<Vec<u32>>> = BTreeMap::new();
        let mut gone: BTreeSet<SessionId> = BTreeSet::new();
        for step in 0..120 {
            if draw.below(6) == 0 {
                frames.is_down.fetch_xor(true, Ordering::Relaxed);
            }
            let worker = &workers[draw.index(2)];
            let picked = states.keys().nth(draw.index(states.len().max(1))).copied();
            let Some(id) = picked.filter(|_| draw.below(8) > 0) else {
                let tokens = vec![step];
                states.entry(worker.create("ann", &tokens)).or_default().insert(tokens);
                continue;
            };
            // It may be nowhere yet, or out of reach.
            match draw.below(8) {
                0 => {
                    let is_found = worker.find("ann", id).is_ok();
                    if is_found && worker.sessions.delete(Timestamp::now(), "ann", id).is_ok() {
                        gone.insert(id);
                    }
                }
                1 => worker.shared.flush(),
                _ => states.get_mut(&id).unwrap().extend(try_append(worker, id, step)),
            }
            workers.iter().for_each(|worker| worker.sessions.audit());
        }
        frames.is_down.store(false, Ordering::Relaxed);
        // One's deletions may remove what the other has just recorded.
        (0..2).for_each(|_| workers.iter().for_each(|worker| worker.shared.flush()));
        for (id, states) in &states {
            let found = [0, 1].map(|at| workers[at].tokens("ann", *id));
            assert_eq!(found[0], found[1], "seed {seed}");
            match &found[0] {
                None => assert!(gone.contains(id), "seed {seed}: lost"),
                Some(tokens) => {
                    assert!(states.contains(tokens) && !gone.contains(id), "seed {seed}: {tokens:?}");
                }
            }
        }
        conflicts += workers.iter().map(|worker| worker.shared.counts().conflicts).sum::<u64>();
    }
    assert!(conflicts > 10, "{conflicts} changes met others: the test is about them");
}
