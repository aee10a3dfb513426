//! A recording, checked line by line. Other crates play recordings; this is the only test of their content here.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec};
use kvist_scheduler::*;

#[test]
fn a_recording_tells_blocks_at_the_moments_of_their_step() {
    let group = |capacity_tokens, window| GroupSpec {
        capacity_tokens,
        visibility: Visibility { window, sinks: 0 },
        max_step_tokens: 1,
    };
    let groups = vec![group(64, None), group(u32::MAX, Some(100))];
    let prefix = Some(PrefixSpec::default());
    let cache = Cache::paged(&PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix }).unwrap();
    let mut s = Scheduler::new(Config::default(), cache, None).unwrap();
    s.explain_misses(true);
    let mut lines: Vec<(Part, String)> = Vec::new();
    let mut sink = |part, text: &str| lines.extend(text.lines().map(|line| (part, line.to_owned())));
    let mut recording = Recording::begin(&mut s, &mut sink);
    let prompt = Prompt::Tokens((0..5).collect());
    s.arrive(100, Request { prompt, ..Request::new(3, 100, 5, 2) }).unwrap();
    let mut machine = Script(|_, batch: Batch<'_>, out: &mut Outcome| {
        out.elapsed_ns = 10;
        out.sample_each(batch, |_| Sampled { token: None, finished: false });
    });
    let (mut now, mut blocks) = (100, Vec::new());
    while let Iteration::Ran { elapsed_ns, .. } = s.iterate(now, &mut machine) {
        blocks.clear();
        s.cache_mut().drain_block_events(&mut blocks);
        let ended: Vec<Ended> = s.drain_ended().collect();
        ended.iter().for_each(|ended| recording.ended(ended));
        recording.iteration(now, now + elapsed_ns, &mut s, &blocks, &mut sink);
        now += elapsed_ns;
    }
    recording.end(&mut s);
    assert!(s.events().take().is_empty(), "nothing is written down any more");
    let of = |part| lines.iter().filter(|(p, _)| *p == part).map(|(_, line)| &**line).collect::<Vec<_>>();
    assert_eq!(
        of(Part::Header),
        [
            "{\"format\":\"kvist-recording\",\"version\":1,\"groups\":[{\"block_tokens\":4,\"blocks\":16,\"window\":null},{\"block_tokens\":4,\"blocks\":null,\"window\":100}]}"
        ]
    );
    let told = of(Part::Blocks);
    // At its beginning the first step writes two blocks in each group; at its end it stores the full one.
    assert!(
        told[0].starts_with(
            "{\"step\":0,\"at\":100,\"blocks\":[[0,\"alloc\",0,0,\"append\"],[0,\"alloc\",1,0,\"append\"],"
        ),
        "{told:#?}"
    );
    assert!(
        told[1].starts_with(
            "{\"step\":1,\"at\":110,\"blocks\":[[0,\"store\",0,0,\"store\"],[1,\"store\",0,0,\"store\"]]}"
        ),
        "{told:#?}"
    );
    // The second step ends the request.
    assert!(
        told.last()
            .is_some_and(|line| line.contains("\"at\":120") && line.contains("[0,\"idle\",0,0,\"remove\"]")),
        "{told:#?}"
    );
    assert_eq!(of(Part::Misses), ["{\"at\":120,\"miss\":3,\"reason\":\"never_seen\",\"position\":0}"]);
    assert!(of(Part::Events)[1].contains("\"arrive\""), "{:?}", of(Part::Events));
    // Events at the end of the second step.
    let end = "{\"step\":1,\"at\":120,\"end\":3,\"how\":\"finished\",\"generated\":2}";
    assert_eq!(of(Part::Decisions).last(), Some(&end));
}

/// The start of a live view: which sequences are live, and where their blocks are.
#[test]
fn a_snapshot_names_what_is_live() {
    let group = GroupSpec {
        capacity_tokens: 40,
        visibility: Visibility { window: None, sinks: 0 },
        max_step_tokens: 1,
    };
    let prefix = Some(PrefixSpec::default());
    let spec = PagedSpec { block_tokens: 4, groups: vec![group], rollback_tokens: 0, prefix };
    let config = Config { max_batch: 1, ..Config::default() };
    let mut s = Scheduler::new(config, Cache::paged(&spec).unwrap(), None).unwrap();
    let mut machine = Script(|_, batch: Batch<'_>, out: &mut Outcome| {
        out.elapsed_ns = 10;
        out.sample_each(batch, |_| Sampled { token: None, finished: false });
    });
    for (id, max_new) in [(5, 1), (9, 3), (7, 3)] {
        let prompt = Prompt::Tokens((0..9).map(|i| i + id * 100).collect());
        s.arrive(0, Request { prompt, ..Request::new(id.into(), 0, 9, max_new) }).unwrap();
    }
    s.iterate(0, &mut machine); // the first request ends
    s.iterate(10, &mut machine); // the second continues
    let snapshot = Snapshot::of(&s);
    let requests: Vec<(u64, bool, Option<u32>, u32)> =
        snapshot.requests.iter().map(|it| (it.id.0, it.running, it.seq, it.cached)).collect();
    assert_eq!(requests, [(7, false, None, 0), (9, true, Some(1), 9)]);
    let [sequence] = &snapshot.sequences[..] else { panic!("{snapshot:?}") };
    assert_eq!((sequence.seq, sequence.len, sequence.tables[0].iter().flatten().count()), (1, 9, 3));
    assert_eq!(snapshot.evictable, [[0, 1]], "the full blocks of the first");
    assert_eq!(snapshot.groups, [GroupShape { block_tokens: 4, blocks: Some(10), window: None }]);
    assert_eq!(snapshot.counters, *s.counters());
}
