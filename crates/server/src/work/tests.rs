//! Tests that work waits for memory in turn, and never takes more than there is.
use super::*;
use kvist_model::template::Conversation;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Waker};
use tokio::sync::mpsc::unbounded_channel;

const MAX_BODY: usize = 4 << 20;

fn names(n: usize) -> Vec<Arc<str>> {
    (0..n).map(|i| format!("name-{i}").into()).collect()
}

fn poll<F: Future>(future: &mut Pin<&mut F>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// A runtime with one blocking thread.
fn runtime() -> tokio::runtime::Runtime {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).max_blocking_threads(1).enable_all().build().unwrap()
}

/// Returns whether everything can be reserved and no name counts as using memory.
fn is_free(work: &WorkMemory, name: &str) -> bool {
    let permit = work.common.try_take(name, work.units);
    let reserve = work.reserve.try_take(name, units(RESERVE_BYTES));
    permit.is_some() && reserve.is_some() && work.taken.values().all(|taken| *taken.borrow() == 0)
}

/// The reserved memory must match what a rendering may take.
#[test]
fn the_largest_conversation_has_room() {
    let kwargs = serde_json::Map::new();
    for bytes in [0, 1000, MAX_BODY] {
        let messages = [serde_json::json!({"role": "user", "content": "a".repeat(bytes)})];
        let conversation =
            Conversation { messages: &messages, tools: &[], add_generation_prompt: true, kwargs: &kwargs };
        let rendering = conversation.rendering_bytes();
        assert!(
            rendering >= work_bytes(bytes) && rendering < work_bytes(bytes + 1000),
            "{bytes}: {rendering}"
        );
    }
}

/// Regression: requests that waited for memory occupied the threads, so requests that needed none waited behind them.
#[test]
fn a_request_that_waits_for_room_holds_no_thread() {
    let names = names(2);
    let (a, b) = (names[0].clone(), names[1].clone());
    let work = Arc::new(WorkMemory::new(MAX_BODY, &names));
    runtime().block_on(async {
        let permit = work.try_permit(&a, work.bytes()).unwrap();
        let (tell, mut began) = unbounded_channel();
        let run = |name: &Arc<str>, bytes: usize| {
            let (work, name, tell) = (work.clone(), name.clone(), tell.clone());
            tokio::spawn(async move {
                let own = work.clone();
                let done = own.run(&name, move || {
                    let _ = tell.send(());
                    work.take(bytes, "messages").map(|_| bytes)
                });
                done.await.map_err(|error| error.code)
            })
        };
        let waiting: Vec<_> = (0..3 * THREADS).map(|_| run(&a, work.bytes())).collect();
        // All have run once.
        for _ in 0..waiting.len() {
            began.recv().await.unwrap();
        }
        // A small request of another name passes, and so does one that needs no memory.
        assert_eq!(run(&b, RENDERING_BYTES).await.unwrap(), Ok(RENDERING_BYTES));
        assert_eq!(run(&a, 0).await.unwrap(), Ok(0));
        assert!(waiting.iter().all(|run| !run.is_finished()));
        drop(permit);
        for waiting in waiting {
            assert_eq!(waiting.await.unwrap(), Ok(work.bytes()));
        }
        assert!(is_free(&work, &b));
        // A request that can never fit does not wait.
        assert_eq!(run(&a, work.bytes() + 1).await.unwrap(), Err("invalid_value"));
    });
}

#[test]
fn a_name_that_has_all_the_room_leaves_the_reserve() {
    for n in [1, 2, 3] {
        let names = names(n);
        let work = WorkMemory::new(MAX_BODY, &names);
        let all = work.try_permit(&names[0], work.bytes()).unwrap();
        let reserve = |name: &Arc<str>| work.try_permit(name, RESERVE_BYTES);
        // A single name uses the reserve for its own small requests.
        assert_eq!(reserve(&names[0]).is_some(), n == 1);
        for name in &names[1..] {
            assert!(work.try_permit(name, RESERVE_BYTES + 1).is_none());
            let permit = reserve(name);
            assert!(permit.is_some() && reserve(name).is_none());
        }
        drop(all);
        assert!(is_free(&work, &names[0]));
    }
}

/// Regression: large requests of one name stood in line before those of all other names.
#[tokio::test]
async fn names_have_the_room_in_turn() {
    let names = names(2);
    let work = WorkMemory::new(MAX_BODY, &names);
    let max = work.bytes();
    let permit = work.try_permit(&names[0], max).unwrap();
    let mut first = pin!(work.permit(&names[0], max));
    let mut second = pin!(work.permit(&names[0], max));
    let mut other = pin!(work.permit(&names[1], max));
    assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
    assert!(poll(&mut other).is_pending());
    drop(permit);
    // The name that had the memory waits in its own line, and is behind the other name again.
    let now = poll(&mut other);
    assert!(now.is_ready() && poll(&mut first).is_pending() && poll(&mut second).is_pending());
    drop(now);
    assert!(poll(&mut first).is_ready());
}

/// Regression: whether a small request may use the reserve was checked only once, when it began to wait.
#[tokio::test]
async fn a_small_request_has_the_reserve_when_its_name_has_nothing_else() {
    let names = names(2);
    let work = WorkMemory::new(MAX_BODY, &names);
    let max = work.bytes();
    let permit = work.try_permit(&names[0], max).unwrap();
    let mut other = pin!(work.permit(&names[1], max));
    let mut small = pin!(work.permit(&names[0], UNIT));
    assert!(poll(&mut other).is_pending() && poll(&mut small).is_pending());
    drop(permit);
    let Poll::Ready(Some(all)) = poll(&mut other) else { panic!("it is its turn") };
    let Poll::Ready(Some(permit)) = poll(&mut small) else { panic!("the reserve is free") };
    assert!(permit.of.is_none());
    drop((all, permit));
    // While a name uses common memory, it may not use the reserve.
    let _permit = [0, 1].map(|i| work.try_permit(&names[i], max / 2).unwrap());
    let mut small = pin!(work.permit(&names[0], UNIT));
    assert!(poll(&mut small).is_pending());
    assert!(work.try_permit(&names[0], UNIT).is_none());
}

/// Settling a session reserves its memory beforehand, and does not start over.
#[test]
fn work_that_is_not_begun_again_has_its_room_in_hand() {
    let names = names(1);
    let work = WorkMemory::new(MAX_BODY, &names);
    let all = work.bytes();
    let permit = work.try_permit(&names[0], all);
    let reserve = work.reserve.try_take(&names[0], units(RESERVE_BYTES));
    assert!(permit.is_some() && reserve.is_some());
    let twice = with(names[0].clone(), permit, all, || {
        let first = work.take(all, "session").map(drop).is_ok();
        // Memory that was given back is available again, and no more than that.
        let taken = work.take(all, "session");
        (first, taken.is_ok(), work.take(1, "session").is_err())
    });
    assert_eq!(twice, (true, true, true));
    drop(reserve);
    assert!(is_free(&work, &names[0]));
    // Without a reservation the work takes what is free, and fails if nothing is.
    assert!(with(names[0].clone(), None, 0, || work.take(all, "session").is_ok()));
    let _permit = work.try_permit(&names[0], all);
    assert!(with(names[0].clone(), None, 0, || work.take(all, "session").is_err()));
}

#[tokio::test]
async fn a_client_that_leaves_gives_its_place_back() {
    let names = names(1);
    let work = WorkMemory::new(MAX_BODY, &names);
    let max = work.bytes();
    let permit = work.try_permit(&names[0], max / 2).unwrap();
    {
        // It already uses the half that was free.
        let mut waiting = pin!(work.permit(&names[0], max));
        assert!(poll(&mut waiting).is_pending());
        let mut small = pin!(work.permit(&names[0], UNIT));
        assert!(poll(&mut small).is_ready(), "the reserve is no part of that");
    }
    assert!(work.try_permit(&names[0], max / 2).is_some());
    drop(permit);
    assert!(is_free(&work, &names[0]));
}

#[test]
fn waiting_has_its_time() {
    let names = names(1);
    let work = Arc::new(WorkMemory::new(MAX_BODY, &names));
    runtime().block_on(async {
        let permit = work.try_permit(&names[0], work.bytes()).unwrap();
        let own = work.clone();
        let max = work.bytes();
        let late = work
            .run_within(Duration::from_millis(20), &names[0], move || own.take(max, "messages").map(|_| ()));
        assert_eq!(late.await.unwrap_err().code, ApiError::deadline().code);
        drop(permit);
        assert!(is_free(&work, &names[0]));
    });
}

/// Regression: eight concurrent renderings, each within its own limit, killed the process. Together they had no
/// limit.
#[test]
fn all_work_together_has_its_bound() {
    let names = names(3);
    let work = Arc::new(WorkMemory::new(MAX_BODY, &names));
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).max_blocking_threads(THREADS).enable_all().build().unwrap();
    let (now, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    runtime.block_on(async {
        let run = |i: usize| {
            let (work, now, peak, name) = (work.clone(), now.clone(), peak.clone(), names[i % 3].clone());
            tokio::spawn(async move {
                let own = work.clone();
                // A rendering, and then a tokenization that takes more or less memory.
                let pieces = [RENDERING_BYTES + i * 99_991, (i % 7) * (9 << 20) + 1];
                let done = own.run(&name, move || {
                    for bytes in pieces {
                        let taken = work.take(bytes, "messages")?;
                        peak.fetch_max(now.fetch_add(bytes, SeqCst) + bytes, SeqCst);
                        std::thread::yield_now();
                        now.fetch_sub(bytes, SeqCst);
                        drop(taken);
                    }
                    Ok(())
                });
                done.await.is_ok()
            })
        };
        let runs: Vec<_> = (0..200).map(run).collect();
        for run in runs {
            assert!(run.await.unwrap());
        }
    });
    let peak = peak.load(SeqCst);
    assert!(peak <= work_bytes(MAX_BODY) + RESERVE_BYTES, "{peak}");
    assert!(is_free(&work, &names[0]));
}

/// Sessions of other workers are read whole, beside everything else; a quota without a bound bounds them no more than a body does.
#[test]
fn sessions_that_are_taken_over_are_counted() {
    let mut config = ServerConfig::default();
    let without = request_bytes(&config, 4096);
    config.sessions.store = Some("redis://host/kvist".into());
    for (max_tokens, most) in [(1000, 1000), (1 << 40, MAX_BODY as u64 / 2)] {
        config.sessions.max_tokens = max_tokens;
        assert_eq!(config.most_taken_over(4096), most);
        let more = request_bytes(&config, 4096) - without;
        // Four of them, each with tokens and as a conversation of 16 bytes a token.
        assert!(more >= 4 * most * (4 + 16), "{more}");
        assert_eq!(more, taking_over_bytes(most));
    }
    // A context may be longer than what a body has.
    config.limits.max_body_bytes = 1024;
    config.cache.tokens = Some(8192);
    assert_eq!(config.most_taken_over(4096), 4096);
}

/// What the tiers have of each prompt is found while it waits, and what routers are told is kept for them.
#[test]
fn lookups_in_tiers_and_events_are_counted() {
    let config = |ram_bytes, endpoint: Option<&str>| {
        let mut config = ServerConfig::default();
        config.tiers.ram_bytes = ram_bytes;
        config.kv_events.endpoint = endpoint.map(|endpoint| endpoint.parse().unwrap());
        request_bytes(&config, 4096)
    };
    let without = config(0, None);
    let places = ServerConfig::default();
    let places = places.queue_places() as u64 + u64::from(places.scheduler.max_batch);
    // The tokens, and a key of 32 bytes for each of 256 blocks, as found and as asked.
    assert!(config(1 << 30, None) - without >= places * (4096 * 4 + 2 * 256 * 32));
    assert!(config(0, Some("tcp://127.0.0.1:5557")) - without >= 64 << 20);
}
