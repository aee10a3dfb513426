//! `kvist.cache` keeps prompts in the cache, and `DELETE /v1/cache` drops them.
use crate::server::*;
use kvist_server::config::LoadRule;
use serde_json::{Value, json};

fn small(tokens: u32) -> Server {
    let mut config = config();
    config.cache.tokens = Some(tokens);
    Server::start(config)
}

/// 128 tokens, which no other `from` has.
fn prompt(from: u32) -> Vec<u32> {
    (0..128).map(|i| 300 + (from * 997 + i * 31) % 3000).collect()
}

fn ask(server: &Server, prompt: &[u32], more: Value) -> u64 {
    let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": true});
    let answer = server.post("/v1/completions", &with(body, &more)).good();
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn why_not_cached(server: &Server, prompt: &[u32]) -> String {
    let body = json!({"prompt": prompt, "max_tokens": 1, "kvist": {"explain": true}});
    let answer = server.post("/v1/completions", &body).good();
    answer["kvist"]["prompts"][0]["miss"]["reason"].as_str().unwrap().to_owned()
}

fn cache(fields: Value) -> Value {
    json!({"kvist": {"cache": fields}})
}

/// After each step the engine publishes this, not before it answers.
fn retained(server: &Server) -> f64 {
    server.metric("kvist_retained_tokens", "")
}

/// More prompts than the cache has room for.
fn fill(server: &Server) {
    (10..20).for_each(|from| {
        ask(server, &prompt(from), json!({}));
    });
}

#[test]
fn a_retained_prompt_outlives_others() {
    let server = small(512);
    ask(&server, &prompt(0), cache(json!({"ttl_s": 3600})));
    ask(&server, &prompt(1), json!({}));
    fill(&server);
    assert_eq!(retained(&server), 128.0);
    assert_eq!(ask(&server, &prompt(1), json!({})), 0);
    assert_eq!(ask(&server, &prompt(0), json!({})), 112);
}

#[test]
fn the_more_urgent_to_keep_displaces_the_less() {
    let server = small(512);
    ask(&server, &prompt(0), cache(json!({"priority": 2})));
    ask(&server, &prompt(1), cache(json!({"priority": 1})));
    // Half of the cache is retained now.
    ask(&server, &prompt(2), cache(json!({})));
    ask(&server, &prompt(3), cache(json!({"pin": true})));
    fill(&server);
    assert_eq!(retained(&server), 256.0);
    for (from, cached) in [(1, 0), (2, 0), (3, 112), (0, 112)] {
        assert_eq!(ask(&server, &prompt(from), json!({})), cached, "prompt {from}");
    }
}

#[test]
fn what_a_session_read_is_retained() {
    let server = small(512);
    let text =
        "The capacity of a vector is the amount of space allocated for any future elements. ".repeat(4);
    let id = server.post("/v1/sessions", &json!({"text": text})).good()["id"].clone();
    let body = with(json!({"max_tokens": 1, "temperature": 0}), &cache(json!({"pin": true})));
    let path = format!("/v1/sessions/{}/generate", id.as_str().unwrap());
    let n_tokens = server.post(&path, &body).good()["usage"]["prompt_tokens"].as_f64().unwrap();
    let expected = (n_tokens / 16.0).floor() * 16.0;
    server.until("the prompt is retained", || retained(&server) == expected);
}

#[test]
fn delete_drops_what_one_salt_has() {
    let server = small(4096);
    let forget = |query: &str| {
        let answer = server.send("DELETE", &format!("/v1/cache{query}"), &[], b"").good();
        assert_eq!(answer["object"], "cache.deleted");
        answer["deleted_blocks"].as_u64().unwrap()
    };
    let salt = json!({"cache_salt": "a b"});
    ask(&server, &prompt(0), json!({}));
    ask(&server, &prompt(0), with(cache(json!({"pin": true})), &salt));
    assert_eq!(ask(&server, &prompt(0), salt.clone()), 112);
    assert_eq!(forget("?cache_salt=a%20b"), 8);
    assert_eq!(ask(&server, &prompt(0), salt), 0);
    assert_eq!(retained(&server), 0.0);
    assert_eq!(ask(&server, &prompt(0), json!({})), 112);
    assert_eq!((forget(""), forget(""), forget("?cache_salt=never")), (8, 0, 0));
    // Nothing tells that it was there.
    assert_eq!(why_not_cached(&server, &prompt(0)), "never_seen");
    assert_eq!(forget(""), 8);
    assert_eq!(ask(&server, &prompt(0), json!({})), 0);

    let (status, param, _, message) = server.send("DELETE", "/v1/cache?salt=x", &[], b"").error();
    assert_eq!((status, param.as_str()), (400, "cache_salt"));
    assert!(message.contains("salt") && message.contains("the only parameter"), "{message}");
}

/// A request that needs nearly all of the cache pushes a prompt out of it, and through the tier, which has room for 16 blocks, as many
/// others. A retained one is still there, until its time is over.
#[test]
fn a_retained_prompt_outlives_others_in_the_tier_below() {
    let asked = |fields: Value| {
        let mut config = config();
        config.cache.tokens = Some(512);
        config.tiers.ram_bytes = 2_200_000;
        config.tiers.load = LoadRule::Always;
        config.tiers.grace_ms = 600_000; // this machine may be slow
        let server = Server::start(config);
        // Until nothing is on its way to the tier.
        let settle = || {
            server.until("copies have ended", || {
                server.engine.blocking_inspect(|_| ());
                server.engine.stats().tiers.is_some_and(|tiers| tiers.store_bytes + tiers.load_bytes == 0)
            })
        };
        ask(&server, &prompt(0), fields);
        settle();
        let long: Vec<u32> = (0..500).map(|i| 300 + (i * 37) % 3000).collect();
        ask(&server, &long, json!({}));
        settle();
        assert_eq!(retained(&server), 0.0);
        let stores = server.engine.stats().tiers.unwrap().stores;
        assert_eq!(stores[0].usage.entries, Some(16), "the tier is full");
        ask(&server, &prompt(0), json!({}))
    };
    assert_eq!(asked(json!({})), 0);
    assert_eq!(asked(cache(json!({"priority": 1}))), 112);
    assert_eq!(asked(cache(json!({"pin": true}))), 112);
}

/// Each deletion leaves a note in every tier, also of salts that nothing was ever cached under: a client could fill a store with them.
#[test]
fn a_name_leaves_a_bounded_number_of_notes_in_tiers() {
    let with_tiers = |ram_bytes| {
        let mut config = config();
        config.tiers.ram_bytes = ram_bytes;
        config.limits.max_deletions = 2;
        config.keys = ["ann", "bob"].map(|name| key(name, &format!("{name}-secret"), false)).into();
        config.keys.push(key("ann", "root-secret", true));
        Server::start(config)
    };
    let server = with_tiers(16 << 20);
    let delete = |server: &Server, key: &str, salt: usize| {
        let key = format!("Bearer {key}-secret");
        let path = format!("/v1/cache?cache_salt={salt}");
        server.send("DELETE", &path, &[("authorization", &*key)], b"")
    };
    (0..2).for_each(|salt| drop(delete(&server, "ann", salt).good()));
    let refused = delete(&server, "ann", 2);
    let (status, _, code, message) = refused.error();
    assert_eq!((status, &*code), (429, "too_many_deletions"));
    assert!(
        message.contains("used up its 2 deletions of this hour") && message.contains("limits.max_deletions"),
        "{message}"
    );
    assert!(refused.header("retry-after").unwrap().parse::<u32>().unwrap() <= 1800);
    // Others have their own, an admin key has no bound, and without tiers nothing is noted.
    delete(&server, "bob", 2).good();
    (2..9).for_each(|salt| drop(delete(&server, "root", salt).good()));
    let server = with_tiers(0);
    (0..9).for_each(|salt| drop(delete(&server, "ann", salt).good()));
}

#[test]
fn keys_bound_what_is_retained_and_dropped() {
    let mut config = config();
    config.keys = vec![key("ann", "ann-secret", false), key("bob", "bob-secret", true)];
    let server = Server::start(config);
    let send = |method: &str, path: &str, key: &str, body: &Value| {
        let key = format!("Bearer {key}-secret");
        let headers = [("content-type", "application/json"), ("authorization", &*key)];
        server.send(method, path, &headers, body.to_string().as_bytes())
    };
    let body = with(json!({"prompt": prompt(0), "max_tokens": 1}), &cache(json!({"pin": true})));
    let (status, param, code, _) = send("POST", "/v1/completions", "ann", &body).error();
    assert_eq!((status, &*param, &*code), (403, "kvist.cache", "admin_only"));
    send("POST", "/v1/completions", "bob", &body).good();
    // Nor may a request put itself before those of others.
    let body = json!({"prompt": prompt(0), "max_tokens": 1, "kvist": {"target_ms": 1000}});
    let (status, param, code, _) = send("POST", "/v1/completions", "ann", &body).error();
    assert_eq!((status, &*param, &*code), (403, "kvist.target_ms", "admin_only"));
    send("POST", "/v1/completions", "bob", &body).good();

    let deleted = |key| send("DELETE", "/v1/cache", key, &json!({})).good()["deleted_blocks"].as_u64();
    assert_eq!(deleted("ann"), Some(0), "bob's prompt is not hers");
    assert_eq!(deleted("bob"), Some(8));
    assert_eq!(server.send("DELETE", "/v1/cache", &[], b"").error().0, 401);

    for (fields, param) in [
        (json!({"ttl": 3}), "kvist.cache.ttl"),
        (json!({"ttl_s": 0}), "kvist.cache.ttl_s"),
        (json!({"priority": 256}), "kvist.cache.priority"),
        (json!({"pin": "yes"}), "kvist.cache.pin"),
    ] {
        let body = with(json!({"prompt": prompt(0)}), &cache(fields));
        let (status, found, ..) = send("POST", "/v1/completions", "bob", &body).error();
        assert_eq!((status, &*found), (400, param));
    }
}

/// A server that keeps some tokens of a text shares nothing, so there is nothing to retain.
#[test]
fn nothing_is_retained_beside_keep() {
    let mut config = config();
    config.cache.keep = Some("sinks=4,recent=64".parse().unwrap());
    let server = Server::start(config);
    let body = json!({"prompt": prompt(0), "max_tokens": 1});
    server.post("/v1/completions", &body).good();
    let refused = server.post("/v1/completions", &with(body, &cache(json!({"pin": true, "ttl_s": 60}))));
    let (status, param, _, message) = refused.error();
    assert_eq!((status, &*param), (400, "kvist.cache"));
    assert!(message.contains("cache.keep"), "{message}");
}
