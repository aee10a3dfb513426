//! What the routers of a fleet ask of a worker: prompts as tokens, and events of the cache over real sockets.
use crate::server::*;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

fn tokens(value: &Value) -> Vec<u32> {
    Vec::deserialize(value).unwrap_or_else(|_| panic!("no tokens: {value}"))
}

/// `render` tells the prompt that the same body runs, as `return_token_ids` tells it afterwards.
#[test]
fn a_rendered_prompt_is_the_prompt_that_runs() {
    let server = Server::start(config());
    let texts = ["The borrow checker", "fn main() {"];
    let messages =
        json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a trait?"}]);
    let ids = json!({"return_token_ids": true, "max_tokens": 3, "temperature": 0});
    let completions = [
        json!({"prompt": texts[0]}),
        json!({"prompt": texts}),
        json!({"prompt": [5, 6, 7]}),
        json!({"prompt": [[5, 6, 7], [8]], "n": 2}),
    ];
    for body in &completions {
        let rendered = server.post("/v1/completions/render", body).good();
        let rendered: Vec<Vec<u32>> =
            rendered.as_array().unwrap().iter().map(|p| tokens(&p["token_ids"])).collect();
        let answered = server.post("/v1/completions", &with(body.clone(), &ids)).good();
        let n = body["n"].as_u64().unwrap_or(1) as usize;
        let choices = answered["choices"].as_array().unwrap();
        assert_eq!(choices.len(), n * rendered.len());
        for (i, choice) in choices.iter().enumerate() {
            assert_eq!(tokens(&choice["prompt_token_ids"]), rendered[i / n], "{body}");
        }
    }
    let chat = json!({"messages": messages});
    let rendered = server.post("/v1/chat/completions/render", &chat).good();
    let answered = server.post("/v1/chat/completions", &with(chat.clone(), &ids)).good();
    assert_eq!(tokens(&rendered["token_ids"]), tokens(&answered["prompt_token_ids"]));
    assert_eq!(answered["usage"]["prompt_tokens"], tokens(&rendered["token_ids"]).len());
    // What the call would refuse is refused, and nothing was computed for it.
    let (status, param, ..) = server.post("/v1/chat/completions/render", &json!({"messages": []})).error();
    assert_eq!((status, &param[..]), (400, "messages"));
    let long = json!({"prompt": vec![5; 2000]});
    assert_eq!(server.post("/v1/completions/render", &long).error().0, 400);
}

/// The tokens of a streamed answer are those of the whole one, each once, also where a token has no text yet.
#[test]
fn streamed_token_ids_are_the_answer() {
    let server = Server::start(config());
    let more = json!({"return_token_ids": true, "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    let chat = json!({"messages": [{"role": "user", "content": "Write a struct."}]});
    for (path, body) in
        [("/v1/completions", json!({"prompt": "let \u{e9} = "})), ("/v1/chat/completions", chat)]
    {
        let body = with(body, &more);
        let document = server.post(path, &body).good();
        let whole = &document["choices"][0];
        let events = server.post(path, &with(body, &json!({"stream": true}))).events();
        let choices: Vec<&Value> = events.iter().filter_map(|event| event["choices"].get(0)).collect();
        let ids = choices.iter().filter_map(|choice| choice.get("token_ids"));
        let streamed: Vec<u32> = ids.flat_map(tokens).collect();
        assert_eq!(streamed, tokens(&whole["token_ids"]), "{path}");
        // As in vLLM: a chat's prompt is beside the choices, a completion's in its choice.
        let (prompt, of_event): (_, fn(&Value) -> &Value) = match path {
            "/v1/completions" => (&whole["prompt_token_ids"], |event| &event["choices"][0]),
            _ => (&document["prompt_token_ids"], |event| event),
        };
        let prompts = events.iter().map(|event| of_event(event).get("prompt_token_ids"));
        let prompts: Vec<Option<&Value>> = prompts.collect();
        assert_eq!(prompts[0], Some(prompt), "{path}");
        assert!(prompts[1..].iter().all(Option::is_none), "{path}: once");
    }
    // An answer without tokens still tells its prompt.
    let none =
        json!({"prompt": [5, 6], "max_tokens": 0, "echo": true, "return_token_ids": true, "stream": true});
    let events = server.post("/v1/completions", &none).events();
    let prompts: Vec<&Value> =
        events.iter().filter_map(|event| event["choices"][0].get("prompt_token_ids")).collect();
    assert_eq!(prompts, [&json!([5, 6])]);
    let plain = server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).good();
    assert!(plain["choices"][0].get("token_ids").is_none());
}

/// Fields that vllm-router and smg add to every request they forward.
#[test]
fn what_routers_add_is_accepted_and_other_values_are_refused() {
    let server = Server::start(config());
    let added = json!({
        "no_stop_trim": false, "separate_reasoning": true, "stream_reasoning": true, "include_reasoning": true,
        "continue_final_message": false, "return_hidden_states": false, "skip_special_tokens": true,
        "ignore_eos": false, "session_params": null, "lora_path": null, "rid": null, "use_beam_search": false,
        "add_special_tokens": true, "spaces_between_special_tokens": true,
    });
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
    for (path, body) in
        [("/v1/completions", json!({"prompt": "a", "max_tokens": 1})), ("/v1/chat/completions", chat)]
    {
        server.post(path, &with(body.clone(), &added)).good();
        for (name, value) in [
            ("no_stop_trim", json!(true)),
            ("continue_final_message", json!(true)),
            ("lora_path", json!("x")),
            ("return_hidden_states", json!(true)),
            ("add_special_tokens", json!(false)),
        ] {
            let refused = server.post(path, &with(body.clone(), &json!({name: value}))).error();
            assert_eq!((refused.0, &refused.1[..]), (400, name), "{path}");
        }
    }
}

/// A message of the socket: its number, and the events.
pub fn read(message: ZmqMessage, topic: &str) -> (u64, Vec<WireEvent>) {
    let [name, number, payload] = <[_; 3]>::try_from(message.into_vec()).expect("three frames");
    assert_eq!(name, topic);
    let number = u64::from_be_bytes(number.as_ref().try_into().unwrap());
    let (_, events, rank): (f64, Vec<WireEvent>, u32) = rmp_serde::from_slice(&payload).unwrap();
    assert_eq!(rank, 0);
    (number, events)
}

/// An event as consumers decode it: all keys, no others.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", deny_unknown_fields)]
pub enum WireEvent {
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: u32,
        lora_id: Option<u32>,
        medium: String,
        lora_name: Option<String>,
    },
    BlockRemoved {
        block_hashes: Vec<u64>,
        medium: String,
    },
    AllBlocksCleared,
}

/// A router: prefixes by hash.
#[derive(Default)]
struct Router(BTreeMap<u64, Vec<u32>>);

impl Router {
    fn apply(&mut self, event: WireEvent) {
        match event {
            WireEvent::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                lora_id,
                medium,
                lora_name,
            } => {
                assert_eq!((lora_id, &medium[..], lora_name, block_size), (None, "GPU", None, 16));
                let mut prefix = parent_block_hash.map_or(Vec::new(), |parent| self.0[&parent].clone());
                assert_eq!(token_ids.len(), 16 * block_hashes.len());
                for (hash, tokens) in block_hashes.iter().zip(token_ids.chunks(16)) {
                    prefix.extend(tokens);
                    self.0.insert(*hash, prefix.clone());
                }
            }
            WireEvent::BlockRemoved { block_hashes, medium } => {
                assert_eq!(medium, "GPU");
                block_hashes.iter().for_each(|hash| drop(self.0.remove(hash).expect("it is known")));
            }
            WireEvent::AllBlocksCleared => self.0.clear(),
        }
    }

    fn credit(&self, prompt: &[u32]) -> usize {
        let most = prompt.len().saturating_sub(1) / 16;
        16 * (1..=most).take_while(|n| self.0.values().any(|prefix| prefix == &prompt[..16 * n])).count()
    }
}

/// 100 tokens, which no other `from` has.
pub fn prompt(from: u32) -> Vec<u32> {
    (0..100).map(|i| 300 + (from * 997 + i * 31) % 3000).collect()
}

pub fn events_config() -> kvist_server::ServerConfig {
    let mut config = config();
    config.kv_events.endpoint = Some("tcp://127.0.0.1:0".parse().unwrap());
    config.kv_events.replay_endpoint = Some("tcp://127.0.0.1:0".parse().unwrap());
    config.kv_events.topic = "kv".into();
    config.cache.tokens = Some(512);
    config
}

/// Everything that the server has published so far, from its replay socket: any number of messages, without loss.
pub async fn replayed(endpoint: &str, from: u64) -> Vec<(u64, Vec<WireEvent>)> {
    let mut dealer = DealerSocket::new();
    dealer.connect(endpoint).await.unwrap();
    let request = vec![Bytes::new(), from.to_be_bytes().to_vec().into()];
    dealer.send(ZmqMessage::try_from(request).unwrap()).await.unwrap();
    let mut messages = Vec::new();
    loop {
        let mut frames = dealer.recv().await.unwrap().into_vec();
        assert_eq!((frames.len(), frames.remove(0).len()), (4, 0));
        if frames[1] == (-1i64).to_be_bytes().as_slice() {
            assert!(frames[0].is_empty() && frames[2].is_empty());
            return messages;
        }
        messages.push(read(ZmqMessage::try_from(frames).unwrap(), "kv"));
    }
}

/// A router that applies the events credits what the cache then finds, through evictions and DELETE, and nothing of
/// salted prompts; a replay tells the same again.
#[test]
fn a_router_knows_what_the_cache_has() {
    let server = Server::start(events_config());
    let sources = server.get("/kv_event_sources").good()["0"].clone();
    assert_eq!((&sources["topic"], &sources["enable_kv_cache_events"]), (&json!("kv"), &json!(true)));
    let info = server.get("/get_server_info").good();
    assert_eq!((&info["model_id"], &info["kv_block_size"]), (&json!(MODEL), &json!(16)));
    let labels = "block_size=\"16\",num_gpu_blocks=\"32\",";
    assert_eq!(server.metric("vllm:cache_config_info", labels), 1.0);
    let (endpoint, replays) =
        (sources["endpoint"].as_str().unwrap(), sources["replay_endpoint"].as_str().unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut subscriber = SubSocket::new();
    runtime.block_on(async {
        subscriber.connect(endpoint).await.unwrap();
        subscriber.subscribe("kv").await.unwrap();
    });
    let ask = |prompt: &[u32], more: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": true});
        let answer = server.post("/v1/completions", &with(body, &more)).good();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() as usize
    };
    // Whether the subscription arrives before the first message is not ours to say: what it missed is replayed.
    let salted = json!({"cache_salt": "secret"});
    ask(&prompt(1), salted.clone());
    let mut hits = 0;
    for round in 0..3 {
        for from in 2..9 {
            let stored = server.metric("kvist_blocks_stored_total", "");
            hits += ask(&prompt(from), json!({}));
            ask(&prompt(from), salted.clone());
            server.until("the prompt is stored", || {
                round > 0 || server.metric("kvist_blocks_stored_total", "") >= stored + 6.0
            });
        }
        ask(&prompt(2), json!({}));
        assert_eq!(ask(&prompt(2), json!({})), 96, "the last prompt is cached");
    }
    assert_eq!(server.send("DELETE", "/v1/cache", &[], b"").status, 200);
    ask(&prompt(20), json!({}));
    assert_eq!(ask(&prompt(20), json!({})), 96);
    let mut numbers: Vec<u64> = Vec::new();
    let mut router = Router::default();
    // The cache stores a block before its event is published.
    while router.credit(&prompt(20)) < 96 {
        let all = runtime.block_on(replayed(replays, 0));
        numbers = all.iter().map(|(number, _)| *number).collect();
        router = Router::default();
        all.into_iter().flat_map(|(_, events)| events).for_each(|event| router.apply(event));
    }
    assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>());
    let credits: Vec<usize> = (1..9).map(|from| router.credit(&prompt(from))).collect();
    assert_eq!((credits, router.credit(&prompt(20))), (vec![0; 8], 96), "{hits} hits");
    let last = runtime.block_on(replayed(replays, numbers.len() as u64 - 1));
    assert_eq!(last[0].0, numbers.len() as u64 - 1, "a replay begins where it is asked to");
    // Until the subscription is there: then a new prompt arrives on it.
    let mut from = 21;
    {
        let mut first = std::pin::pin!(subscriber.recv());
        let mut heard = async || tokio::time::timeout(Duration::from_millis(20), first.as_mut()).await;
        while runtime.block_on(heard()).is_err() {
            ask(&prompt(from), json!({}));
            from += 1;
        }
    }
    ask(&prompt(from), json!({}));
    let mut live = Router(router.0.clone());
    runtime.block_on(async {
        while live.credit(&prompt(from)) < 96 {
            let (number, events) = read(subscriber.recv().await.unwrap(), "kv");
            if number >= numbers.len() as u64 {
                events.into_iter().for_each(|event| live.apply(event));
            }
        }
    });
}

/// A router that starts after the buffer has wrapped knew only what was stored since.
#[test]
fn a_router_that_starts_late_learns_everything() {
    let mut config = events_config();
    config.kv_events.buffer = 3;
    let server = Server::start(config);
    let sources = server.get("/kv_event_sources").good()["0"].clone();
    let replays = sources["replay_endpoint"].as_str().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let ask = |prompt: &[u32]| {
        let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": true});
        let answer = server.post("/v1/completions", &body).good();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() as usize
    };
    // A replay ends early if the log moves on while it is sent. What it told until then is true, but of an earlier time: another prompt
    // may have been cached then.
    let learn = |from: u64| {
        loop {
            let published = server.metric("kvist_kv_event_messages_total", "") as u64;
            let all = runtime.block_on(replayed(replays, from));
            let numbers: Vec<u64> = all.iter().map(|(number, _)| *number).collect();
            assert_eq!(
                numbers,
                (from..from + numbers.len() as u64).collect::<Vec<_>>(),
                "consecutive numbers"
            );
            if from + (numbers.len() as u64) < published {
                continue;
            }
            let mut router = Router::default();
            all.into_iter().flat_map(|(_, events)| events).for_each(|event| router.apply(event));
            return (router, numbers.len());
        }
    };
    let (mut hits, mut last): (usize, Option<Vec<u32>>) = (0, None);
    for i in 0..24 {
        let next = prompt([1, 2, 3, 4, 1, 5, 6, 2][i % 8]);
        // The cache stores a block before its event is published.
        let (mut router, mut n) = learn(0);
        while last.as_ref().is_some_and(|last| router.credit(last) < 96) {
            (router, n) = learn(0);
        }
        assert!(i < 4 || n > 3, "more than the buffer has");
        let credit = router.credit(&next);
        let reused = ask(&next);
        assert_eq!(credit, reused, "request {i}");
        hits += reused;
        last = Some(next);
    }
    assert!(hits > 0);
    // One that has missed some of the newest messages is told these alone. The last prompt's are published after its answer.
    let (mut router, mut n) = learn(0);
    while last.as_ref().is_some_and(|last| router.credit(last) < 96) {
        (router, n) = learn(0);
    }
    assert_eq!(runtime.block_on(replayed(replays, n as u64 - 1)).len(), 1);
}

/// What llm-d's picker of endpoints reads: each gauge once, as a number, and integers in the labels. It tells workers apart by the topic, and
/// takes the tier from the medium, in lower case.
#[test]
fn an_endpoint_picker_finds_what_it_reads() {
    let mut config = events_config();
    config.kv_events.topic = "kv@10.0.0.7:8080@tiny-rust-7m".into();
    let server = Server::start(config);
    server.post("/v1/completions", &json!({"prompt": prompt(1), "max_tokens": 1})).good();
    let text = server.get("/metrics").text;
    let samples = |name: &str| -> Vec<&str> {
        let of = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{'));
        text.lines().filter(of).collect()
    };
    for name in ["num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"] {
        let name = format!("vllm:{name}");
        assert!(text.contains(&format!("# TYPE {name} gauge")), "{name}");
        let [sample] = samples(&name)[..] else { panic!("{name}: {:?}", samples(&name)) };
        let value: f64 = sample.rsplit_once(' ').unwrap().1.parse().unwrap();
        assert!((0.0..=1.0).contains(&value), "{sample}");
    }
    let info = samples("vllm:cache_config_info")[0];
    for (label, expected) in [("block_size", 16), ("num_gpu_blocks", 32)] {
        let value = info.split(&format!("{label}=\"")).nth(1).and_then(|rest| rest.split('"').next());
        assert_eq!(value.map(str::parse), Some(Ok(expected)), "{info}");
    }
    // As a vLLM without LoRA: the picker takes it for a worker without adapters.
    assert!(samples("vllm:lora_requests_info").is_empty());

    let replays = server.get("/kv_event_sources").good()["0"]["replay_endpoint"].as_str().unwrap().to_owned();
    let messages = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let mut dealer = DealerSocket::new();
        dealer.connect(&replays).await.unwrap();
        let request = vec![Bytes::new(), 0u64.to_be_bytes().to_vec().into()];
        dealer.send(ZmqMessage::try_from(request).unwrap()).await.unwrap();
        let mut frames = dealer.recv().await.unwrap().into_vec();
        frames.remove(0);
        frames
    });
    let topic = String::from_utf8(messages[0].to_vec()).unwrap();
    assert_eq!(topic.split('@').collect::<Vec<_>>(), ["kv", "10.0.0.7:8080", "tiny-rust-7m"]);
}

/// Without an endpoint there are no sources, and with several names it must be said whose prompts are published.
#[test]
fn events_are_off_unless_asked_for() {
    let server = Server::start(config());
    assert_eq!(server.get("/kv_event_sources").error().0, 404);
    let mut config = events_config();
    config.keys = vec![key("ann", "ann-secret", true), key("bob", "bob-secret", false)];
    let error = config.check().unwrap_err().to_string();
    assert!(error.contains("kv_events.name") && error.contains("ann, bob"), "{error}");
    config.kv_events.name = Some("bob".into());
    config.check().unwrap();
    // Tiers are published if there are any of this server's own.
    config.kv_events.tiers = true;
    let error = config.check().unwrap_err().to_string();
    assert!(error.contains("kv_events.tiers") && error.contains("--tier-ram"), "{error}");
    config.tiers.ram_bytes = 1 << 20;
    config.check().unwrap();
    config.kv_events.endpoint = None;
    (config.kv_events.replay_endpoint, config.kv_events.name) = (None, None);
    assert!(config.check().unwrap_err().to_string().contains("an `endpoint` too"));
}

/// What routers know of tiers and cache by replayed events: the prefixes in each medium.
fn media(messages: Vec<(u64, Vec<WireEvent>)>) -> BTreeMap<String, BTreeSet<Vec<u32>>> {
    let mut prefixes: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    let mut media: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for event in messages.into_iter().flat_map(|(_, events)| events) {
        match event {
            WireEvent::BlockStored { block_hashes, parent_block_hash, token_ids, medium, .. } => {
                let mut prefix = parent_block_hash.map_or(Vec::new(), |parent| prefixes[&parent].clone());
                let here = media.entry(medium).or_default();
                for (hash, tokens) in block_hashes.iter().zip(token_ids.chunks(16)) {
                    prefix.extend(tokens);
                    prefixes.insert(*hash, prefix.clone());
                    assert!(here.insert(*hash), "stored once");
                }
            }
            WireEvent::BlockRemoved { block_hashes, medium } => {
                let here = media.entry(medium).or_default();
                block_hashes.iter().for_each(|hash| assert!(here.remove(hash), "it is known"));
            }
            WireEvent::AllBlocksCleared => media.values_mut().for_each(BTreeSet::clear),
        }
    }
    let of_hashes = |hashes: BTreeSet<u64>| hashes.iter().map(|hash| prefixes[hash].clone()).collect();
    media.into_iter().map(|(medium, hashes)| (medium, of_hashes(hashes))).collect()
}

/// With `tiers`, routers know which blocks the tier in RAM has, from its own writes and evictions, by media of their own; a consumer that asks
/// late learns the same. Nothing of salted prompts, and nothing after a deletion.
#[test]
fn routers_know_what_the_tier_in_ram_has() {
    let mut config = events_config();
    config.tiers.ram_bytes = 64 << 20;
    config.tiers.load = kvist_server::config::LoadRule::Always;
    config.tiers.grace_ms = 600_000; // this machine may be slow
    config.kv_events.tiers = true;
    config.kv_events.buffer = 3;
    let server = Server::start(config);
    let sources = server.get("/kv_event_sources").good()["0"].clone();
    let replays = sources["replay_endpoint"].as_str().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let ask = |prompt: &[u32], more: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": true});
        let answer = server.post("/v1/completions", &with(body, &more)).good();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() as usize
    };
    let copied = || {
        server.until("what is stored is copied", || {
            server.engine.stats().tiers.is_none_or(|tiers| tiers.store_bytes + tiers.load_bytes == 0)
        });
    };
    let whole = |from: u32| (1..=6).map(move |n| prompt(from)[..16 * n].to_vec());
    let told = |medium: &str, expected: &BTreeSet<Vec<u32>>| {
        let known = || media(runtime.block_on(replayed(replays, 0)));
        server.until("routers know it", || known().remove(medium).unwrap_or_default() == *expected);
        known()
    };
    for from in 0..8 {
        ask(&prompt(from), json!({}));
        ask(&prompt(from + 100), json!({"cache_salt": "secret"}));
    }
    copied();
    let all: BTreeSet<Vec<u32>> = (0..8).flat_map(whole).collect();
    let known = told("CPU", &all);
    assert!(known["GPU"].len() < all.len() && known["GPU"].is_subset(&all), "the cache has some of them");
    assert_eq!(known.len(), 2);
    for from in 0..8 {
        assert_eq!(ask(&prompt(from), json!({})), 96, "from the tier");
    }
    copied();
    told("CPU", &all);
    assert_eq!(server.send("DELETE", "/v1/cache", &[], b"").status, 200);
    told("CPU", &BTreeSet::new());
    ask(&prompt(50), json!({}));
    copied();
    told("CPU", &whole(50).collect());
}
