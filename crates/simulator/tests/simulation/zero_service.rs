//! The zero-service rule: figures of a published trace, and a reference model without data structures.
use kvist_cache::Prompt;
use kvist_cache::evict::{POLICIES, Parameters};
use kvist_simulator::request::Request;
use kvist_simulator::trace::{ReadOptions, Trace};
use kvist_simulator::zero_service::{BlockStream, NoBlocks, TouchOrder, ZeroService, replay};
use kvist_testing::SplitMix64;
use std::path::Path;

const ORDERS: [TouchOrder; 2] = [TouchOrder::Reverse, TouchOrder::Forward];

fn conversation() -> Vec<Request> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conversation_trace.jsonl.zst");
    Trace::read(&path, &ReadOptions::default()).unwrap().requests
}

fn run(stream: &BlockStream, policy: &str, capacity: Option<u32>, order: TouchOrder) -> ZeroService {
    replay(stream, policy, &Parameters::default(), capacity, order).unwrap()
}

#[test]
fn figures_of_the_conversation_trace() {
    let stream = BlockStream::of(&conversation(), None).unwrap();
    for (policy, capacity, order, hits) in [
        ("lru", None, TouchOrder::Reverse, 105_710),
        ("lfu", None, TouchOrder::Forward, 105_710),
        ("lru", Some(10_000), TouchOrder::Reverse, 61_046),
        ("lru", Some(10_000), TouchOrder::Forward, 60_921),
        ("lru", Some(0), TouchOrder::Reverse, 0),
        ("opt", Some(0), TouchOrder::Forward, 0),
    ] {
        let cache = run(&stream, policy, capacity, order).cache;
        assert_eq!(
            (cache.hit_blocks, cache.total_blocks),
            (hits, 288_500),
            "{policy} at {capacity:?}, {order:?}"
        );
    }
}

/// Token hit ratio = Σ min(512·k, input) ÷ Σ input, by hand.
#[test]
fn the_last_block_counts_as_many_tokens_as_it_has() {
    let request = |id, prompt_tokens, ids: &[u64]| Request {
        content: Prompt::Ids { ids: ids.into(), tokens_per_id: 512, n_tokens: prompt_tokens },
        ..Request::new(id, 0, prompt_tokens, 1)
    };
    let stream = BlockStream::of(&[request(0, 600, &[1, 2]), request(1, 600, &[1, 2])], None).unwrap();
    let cache = run(&stream, "lru", None, TouchOrder::Reverse).cache;
    assert_eq!((cache.hit_blocks, cache.hit_tokens, cache.total_tokens), (2, 600, 1200));
    assert_eq!(cache.token_hit_ratio, 0.5);
    let json: serde_json::Value =
        serde_json::to_value(run(&stream, "lru", None, TouchOrder::Reverse)).unwrap();
    assert_eq!(json["cache"]["hit_blocks"], 2);
    assert_eq!(json["cache"]["total_blocks"], 4);
    assert_eq!(json["cache"]["token_hit_ratio"], 0.5);
}

/// Documents of 40 blocks that nothing asks for twice: no policy finds a block, however large the cache. Read in a circle by LRU
/// they are not found either, until all of them fit; `opt` finds what a cache can keep.
#[test]
fn long_documents_that_differ_are_never_found() {
    let document = |at: u64, id: u64| Request {
        content: Prompt::Ids { ids: (id * 40..id * 40 + 40).collect(), tokens_per_id: 16, n_tokens: 640 },
        ..Request::new(at, at * 1000, 640, 1)
    };
    let of = |n_documents: u64, policy: &str, capacity: u32, order: TouchOrder| {
        let requests: Vec<Request> = (0..50).map(|at| document(at, at % n_documents)).collect();
        run(&BlockStream::of(&requests, None).unwrap(), policy, Some(capacity), order).cache.hit_blocks
    };
    for order in ORDERS {
        for policy in POLICIES {
            for capacity in [1, 39, 40, 400, 4000] {
                assert_eq!(of(50, policy.name, capacity, order), 0, "{} at {capacity}", policy.name);
            }
        }
        // Ten documents of 40 blocks: one block too few, and the whole of them.
        let found = of(10, "lru", 400, order);
        assert_eq!(found, 40 * 40);
    }
    assert_eq!(of(10, "lru", 360, TouchOrder::Forward), 0);
    assert!(of(10, "opt", 360, TouchOrder::Forward) > 1000);
}

/// With reverse LRU, the resident blocks of a chain are always a prefix of it, so there is no hit after a miss. No
/// policy beats `opt`, by either way of counting.
#[test]
fn at_every_capacity() {
    let stream = BlockStream::of(&conversation(), None).unwrap();
    let capacities =
        [1, 2, 3, 7, 13, 14, 30, 100, 250, 300, 1000, 3000, 10_000, 30_000, 100_000, 182_789, 182_790];
    let mut bad = Vec::new();
    for capacity in capacities {
        for order in ORDERS {
            let opt = run(&stream, "opt", Some(capacity), order).cache;
            for policy in POLICIES {
                let cache = run(&stream, policy.name, Some(capacity), order).cache;
                if cache.hit_blocks > opt.hit_blocks
                    || cache.any_position_hit_blocks > opt.any_position_hit_blocks
                {
                    bad.push(format!(
                        "{} beats opt at {capacity}, {order:?}: {cache:?} {opt:?}",
                        policy.name
                    ));
                }
                let prefix_only = cache.hit_blocks == cache.any_position_hit_blocks;
                if policy.name == "lru" && order == TouchOrder::Reverse && !prefix_only {
                    bad.push(format!("a hit behind a miss at {capacity}: {cache:?}"));
                }
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Branching chains: a request walks a random tree whose nodes are ids, so an id stands for all ids before it.
fn random_requests(seed: u64, n: u64) -> Vec<Request> {
    let mut random = SplitMix64(seed);
    (0..n)
        .map(|id| {
            let depth = 1 + random.next() % 6;
            let mut node = 1;
            let ids: Vec<u64> = (0..depth)
                .map(|_| {
                    node = node * 3 + random.next() % 3;
                    node
                })
                .collect();
            let n_tokens = (depth * 4 - random.next() % 4) as u32;
            Request {
                content: Prompt::Ids { ids: ids.into(), tokens_per_id: 4, n_tokens },
                ..Request::new(id, id * 1000, n_tokens, 1)
            }
        })
        .collect()
}

/// (last use, uses, stored at) of a block.
struct ReferenceBlock {
    id: u64,
    used: u64,
    uses: u64,
    stored: u64,
}

/// A reference model of the rule, with a list and a linear scan, for policies that fit in one line.
fn reference(requests: &[Request], policy: &str, capacity: usize, order: TouchOrder) -> (u64, u64) {
    let (mut cache, mut tick, mut prefix_hits, mut any_hits) = (Vec::<ReferenceBlock>::new(), 0, 0, 0);
    for request in requests {
        let mut ids = request.content.ids(request.prompt_tokens).unwrap().to_vec();
        let is_in = |cache: &[ReferenceBlock], id: u64| cache.iter().any(|block| block.id == id);
        prefix_hits += ids.iter().take_while(|id| is_in(&cache, **id)).count() as u64;
        any_hits += ids.iter().filter(|id| is_in(&cache, **id)).count() as u64;
        if order == TouchOrder::Reverse {
            ids.reverse();
        }
        for id in ids {
            tick += 1;
            if let Some(block) = cache.iter_mut().find(|block| block.id == id) {
                block.used = tick;
                block.uses += 1;
                continue;
            }
            if capacity == 0 {
                continue;
            }
            if cache.len() == capacity {
                let first = (0..cache.len()).min_by_key(|at| {
                    let block = &cache[*at];
                    match policy {
                        "lru" => (0, block.used),
                        "fifo" => (0, block.stored),
                        "lfu" => (block.uses, block.used),
                        _ => unreachable!("{policy}"),
                    }
                });
                cache.remove(first.unwrap());
            }
            cache.push(ReferenceBlock { id, used: tick, uses: 1, stored: tick });
        }
    }
    (prefix_hits, any_hits)
}

#[test]
fn the_reference_agrees() {
    for seed in 1..60 {
        let requests = random_requests(seed, 120);
        let stream = BlockStream::of(&requests, None).unwrap();
        for capacity in [0, 1, 2, 3, 5, 8, 20, 60, 1000] {
            for order in ORDERS {
                for policy in ["lru", "fifo", "lfu"] {
                    let cache = run(&stream, policy, Some(capacity), order).cache;
                    let expected = reference(&requests, policy, capacity as usize, order);
                    assert_eq!(
                        (cache.hit_blocks, cache.any_position_hit_blocks),
                        expected,
                        "seed {seed}, {policy} at {capacity}, {order:?}"
                    );
                }
            }
        }
    }
}

/// Finer blocks share what their ids share, coarser blocks are identified by their last id, and token blocks are
/// compared by content.
#[test]
fn blocks_of_other_sizes() {
    let requests = random_requests(7, 300);
    let unbounded = |requests: &[Request], block_tokens| {
        let stream = BlockStream::of(requests, block_tokens).unwrap();
        (
            stream.total_blocks(),
            stream.distinct_blocks(),
            run(&stream, "lru", None, TouchOrder::Reverse).cache,
        )
    };
    let (total, distinct, whole) = unbounded(&requests, None);
    assert_eq!(whole.hit_blocks, total - u64::from(distinct), "without bound, each block misses once");
    // The same trees as token ids: a node's number, repeated, stands for the id.
    let as_tokens: Vec<Request> = requests
        .iter()
        .map(|request| {
            let ids = request.content.ids(request.prompt_tokens).unwrap();
            let tokens: Vec<u32> = ids.iter().flat_map(|id| (0..4).map(|i| *id as u32 * 4 + i)).collect();
            let tokens = tokens[..request.prompt_tokens as usize].into();
            Request { content: Prompt::SharedTokens(tokens), ..request.clone() }
        })
        .collect();
    for block_tokens in [1, 2] {
        let (total, _, cache) = unbounded(&requests, Some(block_tokens));
        let expected: u64 = requests.iter().map(|r| u64::from(r.prompt_tokens.div_ceil(block_tokens))).sum();
        assert_eq!(total, expected);
        // An id of a partial block and one of a whole block share their first tokens.
        if block_tokens == 1 {
            assert_eq!(cache, unbounded(&as_tokens, Some(1)).2);
        }
    }
    for (block_tokens, error) in [
        (0, NoBlocks::Zero),
        (3, NoBlocks::BlockSize { request: 0, tokens_per_id: 4, block_tokens: 3 }),
        (6, NoBlocks::BlockSize { request: 0, tokens_per_id: 4, block_tokens: 6 }),
    ] {
        assert_eq!(BlockStream::of(&requests, Some(block_tokens)), Err(error));
    }
    let (_, distinct, coarse) = unbounded(&requests, Some(8));
    assert_eq!(coarse.hit_blocks, coarse.total_blocks - u64::from(distinct));
    let counted = [Request::new(9, 0, 5, 1)];
    assert_eq!(BlockStream::of(&counted, None), Err(NoBlocks::Unknown { request: 9 }));
}

#[test]
fn salts_share_nothing() {
    let mut requests = random_requests(3, 2);
    requests[1] = Request { id: 1, salt: Some("other".into()), ..requests[0].clone() };
    let stream = BlockStream::of(&requests, None).unwrap();
    assert_eq!(run(&stream, "lru", None, TouchOrder::Reverse).cache.hit_blocks, 0);
    requests[1].salt = Some("".into()); // the empty salt equals no salt
    let stream = BlockStream::of(&requests, None).unwrap();
    assert!(run(&stream, "lru", None, TouchOrder::Reverse).cache.hit_blocks > 0);
}

/// Chats were replayed one after the other, as they stand in a drawn list, so that each turn found all of the last one.
#[test]
fn turns_of_chats_come_between_each_other() {
    let of = |id, at_ns, parent, ids: &[u64]| Request {
        content: Prompt::Ids { ids: ids.into(), tokens_per_id: 4, n_tokens: 4 * ids.len() as u32 },
        parent,
        think_ns: 10,
        ..Request::new(id, at_ns, 4 * ids.len() as u32, 1)
    };
    let mut requests = vec![
        of(0, 0, None, &[1]),
        of(1, 0, Some(0), &[1, 2]),
        of(2, 5, None, &[3]),
        of(3, 5, Some(2), &[3, 4]),
    ];
    let hits = |requests: &[Request], capacity| {
        let stream = BlockStream::of(requests, None).unwrap();
        run(&stream, "lru", Some(capacity), TouchOrder::Reverse).cache.hit_blocks
    };
    assert_eq!([1, 2, 3].map(|capacity| hits(&requests, capacity)), [0, 1, 2]);
    // Without parents the list is replayed as it is.
    requests.iter_mut().for_each(|request| request.parent = None);
    assert_eq!(hits(&requests, 1), 2);
}

/// An id of fewer tokens had fewer numbers, and one of more read those of the next id, or past the last one.
#[test]
fn a_trace_has_one_number_of_tokens_per_id() {
    let of = |id, tokens_per_id, prompt_tokens| Request {
        content: Prompt::Ids { ids: [7].into(), tokens_per_id, n_tokens: prompt_tokens },
        ..Request::new(id, 0, prompt_tokens, 1)
    };
    let mixed = BlockStream::of(&[of(0, 4, 4), of(1, 8, 8)], Some(4));
    assert_eq!(mixed, Err(NoBlocks::Mixed { request: 1, tokens_per_id: 8, before: 4 }));
    // Memory is for the blocks of the prompts, not for the 4 billion that the file says the id has.
    let stream =
        BlockStream::of(&[of(0, u32::MAX, 3), of(1, u32::MAX, 5), of(2, u32::MAX, 2)], Some(1)).unwrap();
    assert_eq!((stream.total_blocks(), stream.distinct_blocks()), (10, 5));
}

/// CPU time of this thread, so that other load does not count; wall time if the system does not report it.
fn cpu_seconds() -> f64 {
    static BEGUN: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let ns = schedstat.and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok());
    ns.map_or_else(|| BEGUN.elapsed().as_secs_f64(), |ns| ns / 1e9)
}

/// `cargo test --release -p kvist-simulator --test simulation -- --ignored --nocapture zero_service::`
#[test]
#[ignore = "measures"]
fn speed() {
    let requests = conversation();
    for block_tokens in [512, 16] {
        let begun = cpu_seconds();
        let stream = BlockStream::of(&requests, Some(block_tokens)).unwrap();
        println!("{block_tokens}-token blocks: numbered in {:.3} s", cpu_seconds() - begun);
        for policy in POLICIES {
            for capacity in [None, Some(10_000)] {
                let begun = cpu_seconds();
                let cache = run(&stream, policy.name, capacity, TouchOrder::Reverse).cache;
                let rate = cache.total_blocks as f64 / (cpu_seconds() - begun) / 1e6;
                println!("{:10} {capacity:?}: {rate:.1} M touches/s", policy.name);
            }
        }
    }
}
