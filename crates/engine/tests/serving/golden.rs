//! Golden log: replaying an engine's event log without the engine gives the same decisions, byte for byte. The
//! tokens and times come from the log; the cache is rebuilt from the configuration or from the log's header
//! alone.
use crate::engines::*;
use kvist_engine::serving::*;
use kvist_engine::speculate::Suffix;
use kvist_scheduler::{Config, Preempted, PrefixOrder, RequestId, replay};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Only ends tests that would hang; nothing is measured against it.
const PATIENCE: Duration = Duration::from_secs(600);

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector. This is not \
     to be confused with the length of a vector, which specifies the number of actual elements within the vector. If a \
     vector's length exceeds its capacity, its capacity will automatically be increased.";

/// The engine's logs. It waits for its clients, so that requests meet and leave in the same steps however slow their thread is.
#[derive(Clone, Default)]
struct Logs {
    texts: Arc<Mutex<(String, String)>>,
    /// Steps that the engine may run before it waits for more requests.
    steps: Arc<AtomicU64>,
    /// Clients that will leave, and after how many tokens.
    leavers: Arc<Mutex<BTreeMap<RequestId, u32>>>,
}

impl Logs {
    /// Whether a client has its tokens and has not left yet.
    fn is_leaving(&self, state: &EngineState) -> bool {
        let leavers = self.leavers.lock().unwrap();
        let generated = |id| state.scheduler.status(id).map_or(0, |status| status.generated);
        leavers.iter().any(|(id, goes_after)| generated(*id) > *goes_after)
    }
}

impl Watcher for Logs {
    fn stepped(&mut self, now_ns: u64, end_ns: u64, state: &mut EngineState) {
        if end_ns > now_ns {
            let _ = self.steps.fetch_update(SeqCst, SeqCst, |steps| steps.checked_sub(1));
        }
        let began = Instant::now();
        while (self.steps.load(SeqCst) == 0 || self.is_leaving(state)) && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_micros(100));
        }
        let mut logs = self.texts.lock().unwrap();
        logs.0 += &state.scheduler.events().take();
        logs.1 += &state.scheduler.decisions().take();
    }
}

/// Prompts with a few common prefixes; some clients wait for the whole answer, some disconnect.
async fn load(engine: &Engine, all: &[u32], logs: &Logs) {
    // The engine stands after its first step.
    receive(&mut engine.submit(greedy(&all[..1], 1)).unwrap()).await;
    let mut users = tokio::task::JoinSet::new();
    for i in 0..28usize {
        let family = 7 * (i % 3);
        let prompt = &all[family..family + 40 + i % 5 * 3];
        let salt = if i % 7 == 6 { "another" } else { "" };
        // Some prompts are scored and therefore get no prefix hits; one of these generates nothing.
        let scored = i % 9 == 5;
        // Clients disconnect long before the end.
        let goes_after = (i % 4 == 3).then_some(i as u32 % 6);
        let max_new = match goes_after {
            Some(_) => 100,
            None if i == 14 => 0,
            None => 8 + (i as u32 * 5) % 31,
        };
        let logprobs = scored.then_some(2);
        let job = Job {
            salt: salt.into(),
            priority: i as i32 % 3,
            logprobs,
            prompt_logprobs: scored,
            ..greedy(prompt, max_new)
        };
        let mut generation = engine.submit(job).unwrap();
        let leavers = logs.leavers.clone();
        leavers.lock().unwrap().extend(goes_after.map(|max| (generation.id, max)));
        users.spawn(async move {
            let mut n = 0;
            while let Some(event) = generation.next().await {
                n += u32::from(matches!(event, Event::Token(_)));
                if goes_after.is_some_and(|max| n > max) {
                    break;
                }
            }
            let id = generation.id;
            drop(generation); // cancels, if it has not ended
            leavers.lock().unwrap().remove(&id);
        });
        // The next requests are submitted while others run: after a few steps, unless all earlier ones have ended.
        if i % 5 == 4 {
            logs.steps.store(3, SeqCst);
            let becomes_idle = || tokio::time::timeout(Duration::from_micros(200), engine.until_idle());
            while logs.steps.load(SeqCst) > 0 && becomes_idle().await.is_err() {}
        }
    }
    // A request that is cancelled while it waits, and one that can never fit.
    drop(engine.submit(greedy(&all[..30], 5)).unwrap());
    let mut too_long = engine.submit(greedy(&all[..60], 1000)).unwrap();
    logs.steps.store(u64::MAX, SeqCst);
    receive(&mut too_long).await;
    while users.join_next().await.is_some() {}
    tokio::time::timeout(PATIENCE, engine.until_idle()).await.expect("a job is still live");
}

#[tokio::test]
async fn recorded_events_give_the_same_decisions() {
    let all = tokens(TEXT);
    let narrow = |scheduler: &Config| Config { max_batch: 5, max_batch_tokens: 24, ..scheduler.clone() };
    type Change = fn(Config) -> Config;
    let kept: Change = |config| Config { preempted: Preempted::Kept, ..config };
    let ways: [(&str, &str, bool, Change); 6] = [
        ("fcfs", "lru", false, |config| config),
        ("srpt", "cost", false, kept),
        ("priority", "lfu_decay", false, |config| Config { prefix_order: PrefixOrder::Window(4), ..config }),
        ("sjf", "fifo", false, |config| Config { prefix_order: PrefixOrder::Ties, ..config }),
        ("fcfs", "lru", true, |config| config),
        ("srpt", "cost", true, kept),
    ];
    for (policy, eviction, speculates, change) in ways {
        let logs = Logs::default();
        let mut config = config(176);
        config.paged.block_tokens = 8;
        config.paged.prefix.as_mut().unwrap().policy = eviction.into();
        config.scheduler = change(Config { policy: policy.into(), ..narrow(&config.scheduler) });
        config.record = true;
        config.watchers.push(Box::new(logs.clone()));
        config.fit();
        if speculates {
            config = speculating(config, SMALL, Box::new(Suffix::default()));
        }
        let paged = config.paged.clone();
        let engine = engine(config);
        load(&engine, &all, &logs).await;
        let counters = engine.stats().counters;
        drop(engine);
        let (events, decisions) = logs.texts.lock().unwrap().clone();

        // Check that the load exercised the scheduler.
        let n = |what: &str| decisions.matches(what).count();
        assert!(counters.preemptions > 0, "{policy}: no request was preempted: {counters:?}");
        assert!(counters.hit_tokens > 0, "{policy}: nothing was found");
        assert_eq!(counters.accepted_tokens > 0, speculates, "{policy}: {counters:?}");
        assert_eq!(events.contains("\"drafts\":") && events.contains("\"path\":"), speculates, "{policy}");
        assert!(events.matches("\"cancel\":").count() > 2, "{policy}: no request was cancelled");
        assert!(n("\"how\":\"cancelled\"") > 2 && n("\"how\":\"never_fits\"") > 0, "{policy}: {decisions}");
        assert!(events.matches("\"fresh\":true").count() == 3, "{policy}: no prompt was scored");
        assert!(n("\"chunk\":") > n("\"admit\":"), "{policy}: no prompt was cut into chunks");

        let cache = paged.cache(model().config()).unwrap();
        let by_configuration = replay(events.as_bytes(), cache, None).unwrap();
        same(policy, "the configuration", &decisions, &by_configuration);
        let by_header = replay(events.as_bytes(), None, None).unwrap();
        same(policy, "the log's header", &decisions, &by_header);

        // A changed log does not replay to the same decisions.
        let longer = events.replacen("\"max_new\":8,", "\"max_new\":9,", 1);
        assert!(longer != events);
        let found = replay(longer.as_bytes(), None, None);
        assert!(
            found.is_err() || found.unwrap() != decisions,
            "{policy}: another answer, and the same decisions"
        );
    }
}

fn same(policy: &str, from: &str, expected: &str, found: &str) {
    if expected == found {
        return;
    }
    let differs = expected.lines().zip(found.lines()).enumerate().find(|(_, (a, b))| a != b);
    panic!("{policy}, cache from {from}: line, recorded, replayed: {differs:#?}");
}
