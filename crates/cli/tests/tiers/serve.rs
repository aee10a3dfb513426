//! `kvist serve` with tiers on a disk and on servers: the same texts as without, also by another process, after kills, and while
//! the store is down.
use crate::program::server::Server;
use crate::program::{self, kvist};
use kvist_testing::gate::Gate;
use kvist_testing::servers::{Redis, S3};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector. This is not \
     to be confused with the length of a vector, which specifies the number of actual elements within the vector.";

const FLOAT: [&str; 4] = ["--kv", "f32", "--weights", "f32"];

/// Loads whatever a tier has, because the model is so small that computing would often be faster, and waits for it, because this
/// machine may be slow.
fn start(context: &str, args: &[&[&str]]) -> Server {
    let cache = ["--port", "0", "--context", context, "--max-batch-tokens", "64"];
    let args = args.concat();
    let is_tier = |arg: &&str| ["--tier-ram", "--tier-disk", "--tier-store"].contains(arg);
    let load: &[&str] = if args.iter().any(is_tier) { &["--tier-load", "always"] } else { &[] };
    Server::spawn(&mut kvist(), &[&cache, load, &["--tier-grace", "10m"], &args])
}

/// The text, and how many prompt tokens came from the tier of this name.
fn complete(server: &Server, prompt: &str, tier: &str) -> (String, u64) {
    let (text, loaded, _) = explain(server, prompt, tier);
    (text, loaded)
}

/// Also why no more came.
fn explain(server: &Server, prompt: &str, tier: &str) -> (String, u64, Option<String>) {
    let body = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true, "kvist": {"explain": true}});
    let (status, answer) = server.send("POST", "/v1/completions", &body.to_string());
    let answer: Value = serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}"));
    assert_eq!(status, 200, "{answer}");
    let explained = &answer["kvist"]["prompts"][0];
    let loaded = explained["loaded_tokens"][tier].as_u64().unwrap_or(0);
    assert!(loaded <= explained["cached_tokens"].as_u64().unwrap(), "{answer}");
    assert!(explained["miss"]["position"].as_u64().unwrap() >= loaded, "it is about what follows: {answer}");
    let why = explained["not_loaded"].as_str().map(str::to_owned);
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), loaded, why)
}

fn figure(server: &Server, name: &str) -> f64 {
    let (_, text) = server.send("GET", "/metrics", "");
    let of = |line: &&str| line.starts_with(name) && line[name.len()..].starts_with(['{', ' ']);
    let value = |line: &str| line.rsplit_once(' ').and_then(|(_, value)| value.parse::<f64>().ok());
    text.lines().filter(of).filter_map(value).sum()
}

/// Waits until all copies have been written.
pub fn settle(server: &Server, blocks: f64) {
    let began = std::time::Instant::now();
    let is_on_its_way = || {
        figure(server, "kvist_tier_store_bytes") > 0.0
            || figure(server, "kvist_tier_stored_blocks_total") < blocks
    };
    while is_on_its_way() {
        assert!(began.elapsed() < program::server::PATIENCE, "copies do not end");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn prompts() -> Vec<String> {
    (0..4).map(|i| format!("{i}. {TEXT}")).collect()
}

fn expected() -> Vec<String> {
    let server = start("512", &[&FLOAT]);
    prompts().iter().map(|prompt| complete(&server, prompt, "").0).collect()
}

fn disk(dir: &Path) -> [&str; 4] {
    ["--tier-disk", dir.to_str().unwrap(), "--tier-disk-size", "128MiB"]
}

#[test]
fn a_disk_has_what_a_killed_server_computed() {
    let (dir, expected) = (tempfile::tempdir().unwrap(), expected());
    let dir = dir.path().join("blocks");
    for round in 0..4 {
        let mut server = start("512", &[&FLOAT, &disk(&dir)]);
        for (prompt, expected) in prompts().iter().zip(&expected) {
            let (text, loaded) = complete(&server, prompt, "disk");
            assert_eq!(&text, expected, "round {round}");
            // In the first round only what the short prompts share is there, if it was written already.
            assert!(round == 0 || loaded >= 32, "round {round}: {loaded} tokens");
        }
        settle(&server, if round == 0 { 16.0 } else { 0.0 });
        match round % 2 {
            0 => server.signal("-KILL"),
            _ => server.signal("-TERM"),
        }
        server.wait();
    }
    // Another cache, weights that are computed with otherwise: other K and V.
    let cases: [&[&str]; 4] = [
        &["--kv", "f16", "--weights", "f32"],
        &["--kv", "f32", "--weights", "q8_0"],
        &["--kv", "f32", "--weights", "f32", "--block-tokens", "32"],
        &["--kv", "f32", "--weights", "f32", "--deterministic"],
    ];
    for other in cases {
        let server = start("512", &[other, &disk(&dir)]);
        assert_eq!(complete(&server, &prompts()[0], "disk").1, 0, "{other:?}");
    }
}

/// What the first server computes is a hit of the second, right to the last token; with their store gone both go on.
#[test]
fn two_servers_share_a_redis() {
    let Some(redis) = Redis::new() else { return };
    let (expected, url) = (expected(), redis.url("kvist"));
    let [first, second] = [0, 1].map(|_| start("512", &[&FLOAT, &["--tier-store", &url]]));
    for (prompt, expected) in prompts().iter().zip(&expected) {
        assert_eq!(&complete(&first, prompt, "redis").0, expected);
    }
    settle(&first, 16.0);
    for (prompt, expected) in prompts()[..2].iter().zip(&expected) {
        let (text, loaded) = complete(&second, prompt, "redis");
        assert!(&text == expected && loaded >= 32, "{text:?}, {loaded} tokens");
    }
    let port = redis.kill();
    for (i, (prompt, expected)) in prompts().iter().zip(&expected).enumerate() {
        let (text, loaded) = complete(&second, prompt, "redis");
        assert!(&text == expected && (i < 2 || loaded == 0), "{text:?}, {loaded} tokens");
    }
    assert!(figure(&second, "kvist_tier_errors_total") > 0.0);
    let Some(_redis) = Redis::again(port) else { return };
    for (prompt, expected) in prompts().iter().zip(&expected) {
        assert_eq!(&complete(&first, prompt, "redis").0, expected);
    }
}

/// Two servers over one store. The first has room for all prompts, and has computed them. The second is so small that every prompt
/// displaces the last one, and is loaded again.
struct Pair {
    first: Server,
    second: Server,
    tier: &'static str,
    prompts: Vec<String>,
    expected: Vec<String>,
    began: std::time::Instant,
    /// Prompts so far that had not been asked for before.
    n_new: usize,
}

impl Pair {
    /// With the URLs by which each finds the store. What the first has computed is a hit of the second when it asks for the first time.
    fn start(tier: &'static str, first: &str, second: &str) -> Pair {
        let first = start("512", &[&FLOAT, &["--tier-store", first]]);
        let second = start("160", &[&FLOAT, &["--tier-store", second]]);
        let (prompts, expected, began) = (prompts(), expected(), std::time::Instant::now());
        let pair = Pair { first, second, tier, prompts, expected, began, n_new: 0 };
        pair.ask_first();
        settle(&pair.first, 16.0);
        for i in 0..4 {
            let loaded = pair.ask(i);
            assert!(loaded >= 32, "prompt {i}: {loaded} tokens of what the first server has computed");
        }
        pair
    }

    /// Asks the second server for a prompt. Returns how many of its tokens were loaded.
    fn ask(&self, i: usize) -> u64 {
        let (text, loaded) = complete(&self.second, &self.prompts[i], self.tier);
        assert_eq!(text, self.expected[i]);
        loaded
    }

    /// Asks the first server for all prompts. What it has in its cache it does not read from the store; so no read of its own is held.
    fn ask_first(&self) {
        for (prompt, expected) in self.prompts.iter().zip(&self.expected) {
            assert_eq!(&complete(&self.first, prompt, self.tier).0, expected);
        }
    }

    /// Waits until the second server loads prompt 1, and displaces it again. A store that was down is tried again after a pause.
    fn until_it_is_used(&self) {
        loop {
            let loaded = self.ask(1);
            (2..4).for_each(|i| {
                self.ask(i);
            });
            if loaded >= 32 {
                return;
            }
            assert!(self.began.elapsed() < program::server::PATIENCE, "the store is not used");
        }
    }

    /// Waits until the second server loads what the first has just computed: both have to try the store again.
    fn until_it_is_shared(&mut self) {
        loop {
            self.n_new += 1;
            let prompt = format!("New {}. {TEXT}", self.n_new);
            let (expected, loaded) = complete(&self.first, &prompt, self.tier);
            assert_eq!(loaded, 0, "no server has computed this prompt");
            settle(&self.first, 0.0);
            let (text, loaded) = complete(&self.second, &prompt, self.tier);
            assert_eq!(text, expected);
            if loaded >= 32 {
                return;
            }
            assert!(self.began.elapsed() < program::server::PATIENCE, "the store is not shared");
        }
    }
}

/// The store is killed while a load is in flight, and comes back: every text of both servers stays right, and it is used again.
#[test]
fn a_redis_that_dies_in_mid_load_changes_no_text() {
    let Some(redis) = Redis::new() else { return };
    let gate = Arc::new(Gate::default());
    let held = format!("redis://:secret@127.0.0.1:{}/kvist", gate.before(redis.port()));
    // Only what the second server reads passes the gate.
    let mut pair = Pair::start("redis", &redis.url("kvist"), &held);
    let mut redis = Some(redis);
    for round in 1..=2 {
        pair.until_it_is_used();
        let loads = figure(&pair.second, "kvist_tier_loads_total");
        gate.hold();
        std::thread::scope(|scope| {
            let answer = scope.spawn(|| explain(&pair.second, &pair.prompts[1], "redis"));
            // A read of it is held from now on; the figures follow.
            gate.wait_for_read();
            while figure(&pair.second, "kvist_tier_loads_total") <= loads {
                assert!(pair.began.elapsed() < program::server::PATIENCE, "round {round}: no load has begun");
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            let port = redis.take().map(Redis::kill);
            gate.open();
            let (text, loaded, why) = answer.join().unwrap();
            let expected = &pair.expected[1];
            assert_eq!((&text, loaded, why.as_deref()), (expected, 0, Some("failed")), "round {round}");
            pair.ask_first();
            (0..4)
                .for_each(|i| assert_eq!(pair.ask(i), 0, "round {round}: loaded from a store that is down"));
            redis = port.and_then(Redis::again);
        });
        pair.ask_first();
        pair.until_it_is_shared();
    }
}

/// The store is killed while it is read, with all that it has, and comes back: every text of both servers stays right, and it is used
/// again.
#[test]
fn an_s3_that_dies_in_mid_load_changes_no_text() {
    let s3 = Arc::new(S3::default());
    let url = s3.start();
    let mut pair = Pair::start("s3", &url, &url);
    for round in 1..=2 {
        pair.until_it_is_used();
        let failed = figure(&pair.second, "kvist_tier_failed_loads_total");
        s3.hold_gets();
        std::thread::scope(|scope| {
            let answer = scope.spawn(|| explain(&pair.second, &pair.prompts[1], "s3"));
            s3.wait_for_get();
            s3.kill();
            let (text, loaded, why) = answer.join().unwrap();
            assert_eq!((&text, loaded, why.as_deref()), (&pair.expected[1], 0, Some("failed")));
        });
        assert!(
            figure(&pair.second, "kvist_tier_failed_loads_total") > failed,
            "round {round}: no load has failed"
        );
        pair.ask_first();
        (0..4).for_each(|i| assert_eq!(pair.ask(i), 0, "round {round}: loaded from a store that is down"));
        s3.again();
        pair.ask_first();
        pair.until_it_is_shared();
    }
    let (_, metrics) = pair.second.send("GET", "/metrics", "");
    for name in ["damaged", "evicted", "expired"] {
        let name = format!("kvist_tier_{name}_blocks_total{{");
        let mut lines = metrics.lines();
        assert!(
            lines.any(|line| line.starts_with(&name) && line.contains("tier=\"s3\"")),
            "{name} {metrics}"
        );
    }
}

#[test]
fn two_servers_share_an_s3_that_fails_now_and_then() {
    let (expected, s3) = (expected(), Arc::new(S3::default()));
    let url = s3.start();
    let [first, second] = [0, 1].map(|_| start("512", &[&FLOAT, &["--tier-store", &url]]));
    for (prompt, expected) in prompts().iter().zip(&expected) {
        assert_eq!(&complete(&first, prompt, "s3").0, expected);
    }
    settle(&first, 16.0);
    let (text, loaded) = complete(&second, &prompts()[0], "s3");
    assert!(text == expected[0] && loaded >= 32, "{text:?}, {loaded} tokens");
    s3.error_every.store(5, std::sync::atomic::Ordering::SeqCst);
    s3.short_every.store(3, std::sync::atomic::Ordering::SeqCst);
    for (prompt, expected) in prompts().iter().zip(&expected) {
        assert_eq!(&complete(&second, prompt, "s3").0, expected);
    }
}

/// What was deleted is found neither by this server, nor after a restart, nor by another one with the same store.
#[test]
fn deleted_texts_stay_away() {
    let Some(redis) = Redis::new() else { return };
    let (dir, url) = (tempfile::tempdir().unwrap(), redis.url("kvist"));
    let dir = dir.path().join("blocks");
    let own = disk(&dir);
    let both = || start("160", &[&FLOAT, &own, &["--tier-store", &url]]);
    let loaded = |server: &Server, salt: &str, i: usize| {
        let body = json!({
            "prompt": prompts()[i], "max_tokens": 2, "temperature": 0, "ignore_eos": true, "cache_salt": salt,
            "kvist": {"explain": true},
        });
        let (status, answer) = server.send("POST", "/v1/completions", &body.to_string());
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(status, 200, "{answer}");
        let from = &answer["kvist"]["prompts"][0]["loaded_tokens"];
        from["disk"].as_u64().unwrap_or(0) + from["redis"].as_u64().unwrap_or(0)
    };
    // Until these tiers alone have not been told: an answer waits two seconds at most, and the machine may be slow.
    let delete = |server: &Server, salt: &str, pending: Value| {
        let began = std::time::Instant::now();
        loop {
            let (status, answer) = server.send("DELETE", &format!("/v1/cache?cache_salt={salt}"), "");
            assert_eq!(status, 200, "{answer}");
            if serde_json::from_str::<Value>(&answer).unwrap()["pending_tiers"] == pending {
                return;
            }
            assert!(began.elapsed() < program::server::PATIENCE, "{answer}, not {pending}");
        }
    };
    let mut first = both();
    for salt in ["a", "b"] {
        (0..4).for_each(|i| {
            loaded(&first, salt, i);
        });
    }
    settle(&first, 32.0);
    // Each displaces the last one from the cache.
    (0..3).for_each(|i| assert!(loaded(&first, "a", i) >= 32, "prompt {i} is in the tiers"));
    delete(&first, "a", json!([]));
    (0..3).for_each(|i| assert_eq!(loaded(&first, "a", i), 0, "prompt {i} was deleted"));
    delete(&first, "a", json!([])); // again
    first.signal("-KILL");
    first.wait();
    let mut again = both();
    let other = start("160", &[&FLOAT, &["--tier-store", &url]]);
    // Each computes two of the prompts, and stores them.
    for (server, i) in [(&again, 0), (&other, 1), (&again, 2), (&other, 3)] {
        assert_eq!(loaded(server, "a", i), 0, "prompt {i} was deleted before the start");
        assert!(loaded(server, "b", i) >= 32, "prompt {i} of another salt is there");
    }
    // A tier that is down is named, and the others know.
    redis.kill();
    delete(&again, "b", json!(["redis"]));
    again.signal("-KILL");
    again.wait();
    let last = start("160", &[&FLOAT, &own]);
    (0..3).for_each(|i| assert_eq!(loaded(&last, "b", i), 0, "prompt {i} was deleted on the disk"));
}

#[test]
fn tiers_that_cannot_be_opened_are_refused_before_weights_are_loaded() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("thesis.txt"), "mine").unwrap();
    let (dir, new) = (dir.path().to_str().unwrap(), dir.path().join("new"));
    let new = new.to_str().unwrap();
    // What only a look at the disk shows; and what a plan refuses too, with its exit status.
    let on_disk: [(&[&str], &str); 1] =
        [(&["--tier-disk", dir, "--tier-disk-size", "1GiB"], "contains files that are not a store's")];
    let refused: [(&[&str], &str, i32); 11] = [
        (&["--tier-disk", new], "--tier-disk-size", 2),
        (&["--tier-disk-size", "1GiB"], "--tier-disk", 2),
        (&["--tier-disk", new, "--tier-disk-size", "1MiB"], "too small", 1),
        (&["--tier-disk", new, "--tier-disk-size", "900TiB"], "--tier-disk-size", 1),
        (&["--tier-store", "ftp://me:secret@host/x"], "--tier-store (tiers.store)", 1),
        (&["--tier-store", "redis://me:secret@"], "redis://", 1),
        (&["--sessions-store", "redis://me:secret@host/x?tls=on"], "--sessions-store (sessions.store)", 1),
        (&["--tier-write", "back"], "tiers.write (--tier-write)", 2),
        (&["--tier-load", "always"], "a tier too", 2),
        (&["--tier-ram", "64MiB", "--tier-grace", "soon"], "`soon` is not a duration", 2),
        (&["--tier-ram", "64MiB", "--tier-grace", "0ms"], "1 ms at least (--tier-grace)", 2),
    ];
    for (args, part) in on_disk.into_iter().chain(refused.map(|(args, part, _)| (args, part))) {
        let output = kvist().args(["serve", "--port", "0"]).args(args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && text.contains(part) && !text.contains("secret"),
            "{args:?}: {text}"
        );
    }
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 1 + usize::from(Path::new(new).exists()));
    for (args, part, status) in refused {
        program::refused(&[&["serve", "--dry-run"], args].concat(), status, &[part]);
    }
    let args = [
        "serve",
        "--dry-run",
        "--json",
        "--tier-disk",
        new,
        "--tier-disk-size",
        "1GiB",
        "--tier-ram",
        "64MiB",
    ];
    let output = kvist().args(args).output().unwrap();
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["tier_disk_bytes"], 1u64 << 30);
    assert!(plan["tier_bytes"].as_u64().unwrap() > 64 << 20, "{plan}");
}
