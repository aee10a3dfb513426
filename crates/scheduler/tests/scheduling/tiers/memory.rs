//! Stories of requests that do not fit into the cache together.
use super::*;

/// Two requests outgrow the cache. What the preempted one had computed is loaded when the other one has ended.
#[test]
fn what_a_preempted_request_had_computed_is_loaded() {
    let mut tiers = tiers(Write::Through);
    tiers.recompute.per_token_ns = 1e6;
    let admission = Admission::Optimistic { headroom_tokens: 0 };
    let config = Config { tiers: Some(tiers), admission, ..Config::default() };
    let mut s = Scheduler::new(config, paged(48, 1), None).unwrap();
    for id in 0..2 {
        let mut request = Request::new(id, 0, 14, 30);
        request.prompt = Prompt::Tokens((0..14).map(|i| i + 100 * id as u32).collect());
        s.arrive(0, request).unwrap();
        s.found(0, RequestId(id), Vec::new());
    }
    s.drain_orders();
    let mut sampling = Script(|_, batch: Batch<'_>, out: &mut Outcome| {
        out.elapsed_ns = 1;
        out.sample_each(batch, |_| Sampled { token: Some(7), finished: false });
    });
    let (mut find, mut load) = (None, None);
    for now in 1..200 {
        s.iterate(now, &mut sampling);
        for order in s.drain_orders() {
            match order {
                Order::Store(store) => assert!(s.stored(now, store.id, true)),
                Order::Find(order) => {
                    s.found(now, order.request, vec![Run::new(Some(0), order.n_tokens)]);
                    find = Some(order);
                }
                Order::Load(order) => load = Some(order),
                _ => {}
            }
        }
        if load.is_some() {
            break;
        }
    }
    assert_eq!((s.counters().preemptions, s.drain_ended().count()), (1, 1), "the first request has ended");
    let (find, order) = (find.unwrap(), load.unwrap());
    // It had generated some tokens, which are not in the cache any more, but in the tier.
    assert_eq!(find.request, RequestId(1));
    assert!(find.n_tokens >= 20 && order.positions.start < find.n_tokens, "{find:?}");
    assert_eq!(order.positions.end, find.n_tokens);
    let before = computed(&s);
    s.loaded(300, order.id, true, 100);
    while s.iterate(300, &mut sampling) != Iteration::NothingToDo {}
    let ended = s.drain_ended().next().unwrap();
    assert_eq!((ended.generated, ended.loaded), (30, [0; MAX_TIERS]), "loaded: its first loads");
    // Of all 43 tokens that it needs.
    assert_eq!(computed(&s) - before, u64::from(43 - find.n_tokens));
    assert_eq!(s.tier_counters().unwrap().regained_tokens, order.positions.len() as u64);
}

/// A request of `n` tokens, its own, of which all but the last 4 are in the first tier.
fn arrive(s: &mut Scheduler, id: u64, n: u32, deadline_ns: Option<u64>) {
    let mut request = Request::new(id, 0, n, 4);
    request.prompt = Prompt::Tokens((0..n).map(|i| i + 1000 * id as u32).collect());
    request.deadline_ns = deadline_ns;
    s.arrive(0, request).unwrap();
    s.found(0, RequestId(id), vec![Run::new(Some(0), n - 4)]);
}

fn loads(s: &mut Scheduler) -> Vec<LoadOrder> {
    let load = |order| if let Order::Load(load) = order { Some(load) } else { None };
    s.drain_orders().into_iter().filter_map(load).collect()
}

/// Two requests that do not fit into the cache together are loaded one after the other. If both began, the first would need the
/// cells of the second for the rest of its prompt, and what was loaded would be lost.
#[test]
fn a_load_begins_when_the_whole_prompt_fits_beside_others() {
    let admission = Admission::Optimistic { headroom_tokens: 0 };
    let mut s = Scheduler::new(Config { admission, ..config() }, paged(80, 1), None).unwrap();
    (0..2).for_each(|id| arrive(&mut s, id, 40, None));
    let mut begun = Vec::new();
    for now in 0..20 {
        s.iterate(now, &mut machine(1));
        for order in loads(&mut s) {
            begun.push((order.request, s.drain_ended().count()));
            s.loaded(now, order.id, true, 1);
        }
    }
    assert_eq!(begun, [(RequestId(0), 0), (RequestId(1), 1)], "and how many had ended since");
    assert_eq!((s.counters().lost_tokens, s.drain_ended().count()), (0, 1));
    assert_eq!((computed(&s), s.tier_counters().unwrap().loaded_tokens[0]), (2 * (4 + 3), 2 * 36));
}

/// A request that takes the memory of one that ranks lower is loaded, not computed.
#[test]
fn a_request_that_preempts_is_loaded() {
    let admission = Admission::Optimistic { headroom_tokens: 0 };
    let config = Config { admission, policy: "edf".into(), ..config() };
    let mut s = Scheduler::new(config, paged(48, 1), None).unwrap();
    let mut request = Request::new(7, 0, 30, 10);
    request.prompt = Prompt::Tokens((0..30).collect());
    s.arrive(0, request).unwrap();
    s.found(0, RequestId(7), Vec::new());
    s.iterate(10, &mut machine(1));
    let Some(Order::Store(store)) = s.drain_orders().pop() else { panic!("nothing is stored") };
    s.stored(11, store.id, true);
    arrive(&mut s, 1, 40, Some(100));
    s.iterate(20, &mut machine(1));
    assert_eq!(s.counters().preemptions, 1);
    let orders = loads(&mut s);
    assert_eq!((orders.len(), orders[0].request, orders[0].positions.clone()), (1, RequestId(1), 0..36));
}

/// A request that waits for memory hears of what was stored after it had arrived.
#[test]
fn a_waiting_request_is_looked_up_again() {
    let admission = Admission::Optimistic { headroom_tokens: 0 };
    let mut s = Scheduler::new(Config { admission, ..config() }, paged(48, 1), None).unwrap();
    for id in 0..2 {
        let mut request = Request::new(id, 0, 30, 16);
        request.prompt = Prompt::Tokens((0..30).map(|i| i + 1000 * id as u32).collect());
        s.arrive(0, request).unwrap();
        s.found(0, RequestId(id), Vec::new());
    }
    s.drain_orders();
    let finds = |s: &mut Scheduler| {
        let mut found = Vec::new();
        for order in s.drain_orders() {
            match order {
                Order::Find(find) => found.push(find.request),
                Order::Store(store) => assert!(s.stored(0, store.id, true)),
                _ => {}
            }
        }
        found
    };
    s.iterate(11_999, &mut machine(1));
    assert_eq!(finds(&mut s), []);
    s.iterate(12_000, &mut machine(1));
    assert_eq!(finds(&mut s), [RequestId(1)], "the other one runs");
    s.iterate(12_001, &mut machine(1));
    assert_eq!(finds(&mut s), []);
    s.found(12_002, RequestId(1), vec![Run::new(Some(0), 20)]);
    s.found(12_003, RequestId(1), vec![Run::new(Some(0), 16)]); // less: an older answer
    s.cancel(12_004, RequestId(0));
    s.iterate(12_005, &mut machine(1));
    assert_eq!(loads(&mut s)[0].positions, 0..20);
}

/// A request hears that a tier has what the cache has, too, and waits. The cache evicts it meanwhile. It was computed then: nearly all
/// that preempted requests had computed, because others need their room only after they have left it.
#[test]
fn what_the_cache_evicts_while_a_request_waits_is_loaded() {
    for bytes_per_s in [1_000_000_000, 1] {
        let mut tiers = tiers(Write::Through);
        tiers.list[0].bytes_per_s = bytes_per_s;
        let config = Config { tiers: Some(tiers), max_batch: 1, ..config() };
        let mut s = Scheduler::new(config, paged(48, 1), None).unwrap();
        let arrive = |s: &mut Scheduler, id, prompt: std::ops::Range<u32>, max_new, runs| {
            let mut request = Request::new(id, 0, prompt.len() as u32, max_new);
            request.prompt = Prompt::Tokens(prompt.collect());
            s.arrive(0, request).unwrap();
            s.found(0, RequestId(id), runs);
        };
        let mut sampling = Script(|_, batch: Batch<'_>, out: &mut Outcome| {
            out.elapsed_ns = 1;
            out.sample_each(batch, |_| Sampled { token: Some(7), finished: false });
        });
        let mut run = |s: &mut Scheduler, steps: u64| {
            let mut loads = Vec::new();
            for now in 0..steps {
                s.iterate(now, &mut sampling);
                for order in s.drain_orders() {
                    match order {
                        Order::Store(store) => assert!(s.stored(now, store.id, true)),
                        Order::Load(load) => {
                            s.loaded(now, load.id, true, 1);
                            loads.push((load.request, load.positions));
                        }
                        _ => {}
                    }
                }
            }
            loads
        };
        arrive(&mut s, 0, 0..17, 1, Vec::new());
        assert_eq!(run(&mut s, 1), []);
        arrive(&mut s, 1, 100..120, 26, Vec::new());
        arrive(&mut s, 2, 0..21, 4, vec![Run::new(Some(0), 16)]);
        assert_eq!(run(&mut s, 1), [], "the other one runs, and the cache has 16 tokens");
        let loads = run(&mut s, 60);
        let ended: Vec<Ended> = s.drain_ended().collect();
        assert_eq!(ended.iter().map(|ended| ended.generated).collect::<Vec<_>>(), [1, 26, 4]);
        let (tiers, not_loaded) = (s.tier_counters().unwrap(), ended[2].not_loaded);
        match bytes_per_s {
            1 => assert_eq!((loads, not_loaded), (Vec::new(), Some(NotLoaded::Slower))),
            _ => {
                assert_eq!((loads, not_loaded), (vec![(RequestId(2), 0..16)], None));
                assert_eq!((ended[2].loaded[0], tiers.declined_tokens), (16, 0));
            }
        }
    }
}
