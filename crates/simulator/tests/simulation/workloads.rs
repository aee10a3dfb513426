//! Workloads as lists of requests: which requests share what, and the same seed gives the same list.
use kvist_simulator::request::Request;
use kvist_simulator::statistics::mean;
use kvist_simulator::workload::{Agents, Arrivals, Chats, Contents, Lengths, Prefixes, Workload};

fn workload(contents: Contents) -> Workload {
    Workload {
        n_requests: 400,
        arrivals: Arrivals::Poisson { per_s: 2.0 },
        prompt_tokens: Lengths::Uniform { min: 5, max: 80 },
        output_tokens: Lengths::Exponential { mean: 40.0 },
        contents,
    }
}

fn all() -> Vec<Workload> {
    let prefixes = |own_prompt| Prefixes {
        n_prefixes: 20,
        exponent: 1.0,
        prefix_tokens: 100,
        share: 1.0,
        own_prompt,
        tokens_per_id: 16,
    };
    vec![
        workload(Contents::Unknown),
        workload(Contents::Prefixes(prefixes(true))),
        workload(Contents::Prefixes(prefixes(false))),
        workload(Contents::Chats(Chats {
            turns: Lengths::Uniform { min: 1, max: 6 },
            think_s: 3.0,
            system_tokens: 40,
            tokens_per_id: 16,
        })),
        workload(Contents::Agents(Agents { fan_out: 3, depth: 2, system_tokens: 32, tokens_per_id: 16 })),
    ]
}

#[test]
fn every_list_is_well_formed() {
    for workload in all() {
        let requests = workload.generate(5).unwrap();
        assert_eq!(requests.len(), 400, "{workload:?}");
        for (i, request) in requests.iter().enumerate() {
            assert_eq!(request.id, i as u64);
            assert!(request.prompt_tokens > 0 && request.output_tokens > 0);
            assert!(request.parent.is_none_or(|parent| parent < request.id), "{request:?}");
            assert!(i == 0 || requests[i - 1].arrival_ns <= request.arrival_ns);
            let known = u64::from(request.content.known_tokens());
            match &workload.contents {
                Contents::Unknown => assert_eq!(known, 0),
                Contents::Prefixes(prefixes) if !prefixes.own_prompt => assert_eq!(known, 100),
                _ => assert_eq!(known, request.total_tokens(), "{request:?}"),
            }
        }
    }
}

#[test]
fn same_seed_same_requests() {
    for workload in all() {
        assert_eq!(workload.generate(7).unwrap(), workload.generate(7).unwrap());
        assert_ne!(workload.generate(7).unwrap(), workload.generate(8).unwrap());
    }
}

/// Changing one aspect leaves the others as they are, so that comparisons vary only what they mean to.
#[test]
fn aspects_have_streams_of_their_own() {
    let one = workload(Contents::Unknown);
    let other = Workload { output_tokens: Lengths::Lognormal { mean: 70.0, variation: 2.0 }, ..one.clone() };
    let (one, other) = (one.generate(3).unwrap(), other.generate(3).unwrap());
    let arrivals_and_prompts = |requests: &[Request]| -> Vec<(u64, u32)> {
        requests.iter().map(|r| (r.arrival_ns, r.prompt_tokens)).collect()
    };
    assert_eq!(arrivals_and_prompts(&one), arrivals_and_prompts(&other));
    assert_ne!(one, other);
}

/// Number of ids that two requests have in common, from the beginning.
fn common(a: &Request, b: &Request) -> usize {
    let ids = |r: &Request| r.content.ids(r.content.known_tokens()).unwrap().to_vec();
    ids(a).iter().zip(ids(b)).take_while(|(a, b)| **a == *b).count()
}

#[test]
fn prefixes_are_shared_up_to_their_last_whole_id() {
    let requests = all()[1].generate(1).unwrap();
    let first = |r: &Request| r.content.ids(1).unwrap()[0];
    let mut popularity = std::collections::BTreeMap::<u64, usize>::new();
    for request in &requests {
        *popularity.entry(first(request)).or_default() += 1;
        let shared = common(&requests[0], request);
        let expected = if request.id == 0 {
            usize::MAX
        } else if first(request) == first(&requests[0]) {
            6
        } else {
            0
        };
        assert_eq!(shared.min(expected), shared);
        assert!(request.id == 0 || shared == expected, "{shared} {expected}");
    }
    // Σ 1/k over 20 ranks is 3.598, so the first has 27.8% of all.
    let max = *popularity.values().max().unwrap() as f64 / requests.len() as f64;
    assert!((max - 0.278).abs() < 0.07, "{max}");
    // Without a prompt of its own, the prefix is the whole prompt, including its partial end.
    let whole = all()[2].generate(1).unwrap();
    assert!(whole.iter().all(|r| r.prompt_tokens == 100));
}

/// Four of five requests begin with the prefix, and the others share nothing; all are as long as if every one shared.
#[test]
fn a_share_of_the_requests_has_a_prefix() {
    for own_prompt in [true, false] {
        let of = |share| {
            let prefixes = Prefixes {
                n_prefixes: 1,
                exponent: 0.0,
                prefix_tokens: 96,
                share,
                own_prompt,
                tokens_per_id: 16,
            };
            workload(Contents::Prefixes(prefixes)).generate(3).unwrap()
        };
        let (all, some, none) = (of(1.0), of(0.8), of(0.0));
        let prompts = |requests: &[Request]| requests.iter().map(|r| r.prompt_tokens).collect::<Vec<_>>();
        assert_eq!((prompts(&some), prompts(&none)), (prompts(&all), prompts(&all)));
        let beginners = |requests: &[Request]| requests.iter().filter(|r| common(&all[0], r) >= 6).count();
        assert_eq!((beginners(&all), beginners(&none)), (400, 0));
        // 320 of 400, with a standard deviation of 8.
        assert!((290..=350).contains(&beginners(&some)), "{}", beginners(&some));
        let strangers: Vec<&Request> = some.iter().filter(|r| common(&all[0], r) == 0).collect();
        assert_eq!(strangers.len() + beginners(&some), 400);
        assert!(strangers.windows(2).all(|pair| common(pair[0], pair[1]) == 0));
    }
}

#[test]
fn a_turn_of_a_chat_continues_the_one_before() {
    let requests = all()[3].generate(2).unwrap();
    let mut thinking = Vec::new();
    for request in &requests {
        let Some(parent) = request.parent else {
            assert!((45..=120).contains(&request.prompt_tokens), "40 of the system and 5 to 80: {request:?}");
            assert_eq!(request.think_ns, 0);
            continue;
        };
        let parent = &requests[parent as usize];
        let added = u64::from(request.prompt_tokens) - parent.total_tokens();
        assert!((5..=80).contains(&added), "{request:?}");
        assert_eq!(request.arrival_ns, parent.arrival_ns);
        assert_eq!(common(parent, request) as u64, parent.total_tokens().div_ceil(16));
        thinking.push(request.think_ns as f64 / 1e9);
    }
    assert!((mean(&thinking).unwrap() - 3.0).abs() < 0.8, "{:?}", mean(&thinking));
    // Chats share the whole ids of the system prompt: 2 of 40 tokens.
    let roots: Vec<&Request> = requests.iter().filter(|r| r.parent.is_none()).collect();
    assert_eq!(common(roots[0], roots[1]), 2);
}

#[test]
fn agents_fan_out() {
    // Trees of 1 + 3 + 9.
    let requests = Workload { n_requests: 31 * 13, ..all()[4].clone() }.generate(2).unwrap();
    let children = |id: u64| requests.iter().filter(|r| r.parent == Some(id)).collect::<Vec<_>>();
    for root in requests.iter().filter(|r| r.parent.is_none()) {
        assert_eq!(children(root.id).len(), 3);
        for child in children(root.id) {
            assert_eq!(common(root, child) as u64, root.total_tokens() / 16);
            assert_eq!(children(child.id).len(), 3);
            for grandchild in children(child.id) {
                assert_eq!(common(child, grandchild) as u64, child.total_tokens() / 16);
                assert!(children(grandchild.id).is_empty());
            }
        }
    }
}

#[test]
fn parameters_that_make_no_workload() {
    let bad = |contents| workload(contents).generate(0).unwrap_err().to_string();
    let chats = Chats {
        turns: Lengths::Deterministic { tokens: 2 },
        think_s: -1.0,
        system_tokens: 0,
        tokens_per_id: 16,
    };
    assert_eq!(
        bad(Contents::Chats(chats.clone())),
        "the time to think is -1: expected a finite number above 0"
    );
    assert!(bad(Contents::Chats(Chats { tokens_per_id: 0, ..chats })).contains("tokens per id"));
    let agents = Agents { fan_out: 1000, depth: 3, system_tokens: 0, tokens_per_id: 16 };
    assert!(bad(Contents::Agents(agents)).contains("at most 1048576 requests"));
    let none =
        Workload { prompt_tokens: Lengths::Deterministic { tokens: 0 }, ..workload(Contents::Unknown) };
    assert!(none.generate(0).unwrap_err().to_string().starts_with("prompt tokens is 0"));
}

/// Excessive parameters give an error, not a huge allocation or a clock that does not advance.
#[test]
fn more_than_can_be() {
    let few = Workload {
        n_requests: 10,
        arrivals: Arrivals::Poisson { per_s: 1.0 },
        prompt_tokens: Lengths::Deterministic { tokens: 5 },
        output_tokens: Lengths::Deterministic { tokens: 5 },
        contents: Contents::Unknown,
    };
    let late = Workload { arrivals: Arrivals::Poisson { per_s: 1e-300 }, ..few.clone() };
    for (workload, says) in [
        (Workload { n_requests: usize::MAX, ..few }, "the number of requests is 18446744073709551615"),
        (late, "the time of arrival is past 292 years, after 0 requests"),
    ] {
        let error = workload.generate(1).unwrap_err().to_string();
        assert!(error.starts_with(says), "{error}");
    }
}
