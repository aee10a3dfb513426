//! Pins the drawing code: small pages and pictures are compared byte for byte with the files in `tests/pictures/`,
//! which can be viewed in a browser. `KVIST_RENEW=1 cargo test -p kvist-simulator --test simulation pictures::` rewrites them:
//! review the changes and commit them.
use kvist_simulator::html::{Comparison, Curve, Page, Plot, Point, Quantity, Run, Unit};
use kvist_simulator::report::{
    Activity, Load, Objectives, Phase, Record, Report, RequestOutcome, RequestRow,
};
use kvist_simulator::statistics::Estimate;
use std::path::PathBuf;

const MS: u64 = 1_000_000;

/// Compares `found` with the last reviewed version.
fn pinned(name: &str, found: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/pictures").join(name);
    if std::env::var_os("KVIST_RENEW").is_some() {
        std::fs::create_dir_all(path.parent().expect("it lies in a folder")).expect("it can be made");
        std::fs::write(&path, found).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    if expected == found {
        return;
    }
    let at = expected.bytes().zip(found.bytes()).take_while(|(a, b)| a == b).count();
    let around = |text: &str| {
        let bytes = &text.as_bytes()[at.saturating_sub(60).min(text.len())..(at + 60).min(text.len())];
        String::from_utf8_lossy(bytes).into_owned()
    };
    panic!(
        "{name} is drawn differently from byte {at} on:\n  was {}\n  now {}\nIf that is meant: KVIST_RENEW=1 cargo test -p kvist-simulator --test simulation pictures::",
        around(&expected),
        around(found)
    );
}

/// A request that arrives, is admitted, gets its first token and ends at these milliseconds.
fn row(id: u64, [arrival, admitted, first, finished]: [u64; 4], prompt: u32, output: u32) -> RequestRow {
    RequestRow {
        id,
        arrival_ns: arrival * MS,
        admitted_ns: Some(admitted * MS),
        first_token_ns: Some(first * MS),
        finished_ns: Some(finished * MS),
        prompt_tokens: prompt,
        output_tokens: output,
        outcome: RequestOutcome::Finished,
        ..RequestRow::default()
    }
}

fn load(queued_requests: u64, running_requests: u64, used_blocks: u64, cached_blocks: u64) -> Load {
    Load { queued_requests, running_requests, used_blocks, cached_blocks }
}

fn record(name: &str, requests: Vec<RequestRow>) -> Record {
    let mut record = Record { requests, ..Record::default() };
    record.setting.insert("scheduler".into(), name.into());
    record.cache.block_tokens = 16;
    let moments = [
        (0, load(0, 0, 0, 0)),
        (100, load(1, 1, 4, 0)),
        (250, load(3, 2, 9, 1)),
        (900, load(0, 1, 5, 4)),
        (1_700, load(0, 0, 0, 10)),
    ];
    for (pair, late) in moments.windows(2).zip([0, 40, 0, 7]) {
        record.timeline.note(pair[0].0 * MS, pair[0].1);
        record.timeline.extend((pair[1].0 - pair[0].0) * MS, pair[0].1, late * u128::from(MS));
    }
    record.timeline.note(1_700 * MS, moments[4].1);
    for ms in [10, 10, 11, 25, 90] {
        record.itl_ns.record(ms * MS);
    }
    record
}

/// Four requests: one is active in several time spans, one was preempted and is late, one was refused.
fn first() -> Record {
    let mut rows = vec![
        row(3, [0, 5, 120, 800], 300, 40),
        row(4, [100, 250, 400, 1_500], 700, 12),
        row(5, [240, 260, 260, 1_700], 64, 1),
    ];
    rows[0].hit_tokens = 96;
    rows[1].preemptions = 2;
    rows[1].deadline_ns = Some(1_400 * MS);
    let outcome = RequestOutcome::Refused;
    rows.push(RequestRow {
        id: 6,
        arrival_ns: 300 * MS,
        prompt_tokens: 9_000,
        outcome,
        ..RequestRow::default()
    });
    let mut record = record("fcfs <1>", rows);
    let of = |phase, from: u64, to: u64| Activity { request: 4, phase, from_ns: from * MS, to_ns: to * MS };
    record.activity = vec![
        of(Phase::Prefill, 250, 400),
        of(Phase::Decode, 400, 700),
        of(Phase::Prefill, 1_000, 1_100),
        of(Phase::Decode, 1_100, 1_500),
    ];
    let cache = &mut record.cache;
    (cache.capacity_blocks, cache.hit_blocks, cache.total_blocks) = (Some(12), 6, 68);
    (cache.hit_tokens, cache.total_tokens) = (96, 1_064);
    (cache.hit_requests, cache.total_requests) = (1, 3);
    (cache.stored_blocks, cache.evicted_blocks) = (60, 31);
    cache.miss_reasons = [("never_seen".to_owned(), 2), ("unaligned_tail".to_owned(), 1)].into();
    let steps = &mut record.steps;
    (steps.steps, steps.prefill_tokens, steps.decode_tokens, steps.preemptions) = (70, 1_064, 50, 2);
    steps.busy_ns = 1_200 * MS;
    record
}

/// Thirteen requests: too many for wide bars.
fn second() -> Record {
    let rows = (0..13).map(|i| row(i, [10 * i, 20 + 30 * i, 60 + 35 * i, 400 + 90 * i], 100, 5 + i as u32));
    let mut record = record("sjf", rows.collect());
    record.cache.capacity_blocks = Some(1_000); // far above what is used: not drawn
    record
}

fn page<T>(then: impl FnOnce(&Page<'_>) -> T) -> T {
    let records = [first(), second()];
    let objectives = Objectives { ttft_s: Some(0.2), tpot_s: Some(0.05) };
    let reports = records.each_ref().map(|record| Report::of(record, &objectives));
    let runs = ["one & a half", "thirteen"].into_iter().zip(&records).zip(&reports);
    let point = |x, y, half_width| Point { x, y, half_width };
    let curve = |name: &str, points: Vec<Point>| Curve { name: name.into(), points };
    let plot = Plot {
        title: "Hits against capacity".into(),
        about: "What a <policy> finds.".into(),
        x_label: "capacity in blocks".into(),
        y_label: "tokens found".into(),
        unit: Unit::Percent,
        curves: vec![
            curve(
                "lru",
                vec![
                    point(100.0, 0.1, Some(0.02)),
                    point(1_000.0, 0.3, None),
                    point(20_000.0, 0.52, Some(0.01)),
                ],
            ),
            curve("cost", vec![point(0.0, 0.9, None), point(100.0, 0.12, None), point(20_000.0, 0.5, None)]),
        ],
        level: Some(("without bound".into(), 0.55)),
    };
    let seconds = Plot {
        title: "Wait".into(),
        unit: Unit::Seconds,
        curves: vec![curve("one", vec![point(3.0, 0.000_2, None), point(5.0, 0.004, None)])],
        level: None,
        ..plot.clone()
    };
    let mark = |mean, half_width| Estimate { n: 3, mean, half_width };
    let quantity =
        |title: &str, unit, marks| Quantity { title: title.into(), label: "of all".into(), unit, marks };
    let comparison = Comparison {
        title: "Beside each other".into(),
        about: "Three servers.".into(),
        names: ["fcfs", "<sjf>", "a name that is longer than the others"].map(String::from).into(),
        quantities: vec![
            quantity(
                "Wait",
                Unit::Seconds,
                vec![
                    vec![mark(0.2, Some(0.05)), mark(9.0, Some(4.0))],
                    vec![mark(0.3, None), mark(1.0, None), mark(12.0, Some(14.0))],
                    Vec::new(),
                ],
            ),
            quantity(
                "Share",
                Unit::Percent,
                vec![vec![mark(0.0, Some(0.0))], vec![mark(0.5, None)], vec![mark(1.0, None)]],
            ),
            quantity(
                "Steps",
                Unit::Count,
                vec![vec![mark(3.0, None)], vec![mark(4.5, Some(0.5))], Vec::new()],
            ),
        ],
    };
    then(&Page {
        title: "Two <small> runs",
        about: "By hand.",
        runs: runs.map(|((name, record), report)| Run { name, record, report }).collect(),
        comparison: Some(comparison),
        plots: vec![plot, seconds],
    })
}

/// Mutation testing showed that changes in the drawing code went unnoticed: tests checked its tags and words, but not
/// its lines.
#[test]
fn every_picture_is_as_it_was() {
    let pictures = page(|page| page.pictures());
    let names: Vec<&str> = pictures.iter().map(|picture| picture.name.as_str()).collect();
    let expected = [
        "beside-each-other",
        "hits-against-capacity",
        "wait",
        "latency",
        "memory-and-batch-over-time",
        "requests",
    ];
    assert_eq!(names, expected);
    for picture in &pictures {
        pinned(&format!("{}.svg", picture.name), &picture.svg);
    }
}

/// The style sheet is a separate file, so it is left out.
fn without_sources(page: &str) -> String {
    let css = include_str!("../../src/html/style.css");
    assert!(page.contains(css));
    page.replace(css, "/* style.css */\n")
}

#[test]
fn the_page_is_as_it_was() {
    pinned("page.html", &without_sources(&page(|page| page.render())));
    let alone = page(|page| {
        let runs = page.runs.iter().take(1).map(|run| Run { ..*run }).collect();
        Page { title: page.title, runs, ..Page::default() }.render()
    });
    pinned("one-run.html", &without_sources(&alone));
}

/// With many requests, those around the longest queue are drawn: 60 of 100 that arrive one after the other.
#[test]
fn of_many_requests_those_around_the_longest_queue_are_drawn() {
    let drawn = |peak_ms: u64| {
        let rows = (0..100).map(|i| row(i, [10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 5], 10, 3));
        let mut record = Record { requests: rows.collect(), ..Record::default() };
        for (ms, queued) in [(0, 1), (peak_ms, 9), (peak_ms + 1, 2), (1_000, 9)] {
            record.timeline.note(ms * MS, load(queued, 1, 1, 0));
        }
        let report = Report::of(&record, &Objectives::default());
        let runs = vec![Run { name: "", record: &record, report: &report }];
        let svg = Page { runs, ..Page::default() }.pictures().pop().expect("requests come last").svg;
        let ids = svg.split("<title>request ").skip(1).map(|rest| rest.split(':').next().unwrap_or_default());
        ids.map(|id| id.parse().expect("a number")).collect::<Vec<u64>>()
    };
    assert_eq!(drawn(500), (20..80).collect::<Vec<u64>>(), "30 before the first of the longest queues");
    assert_eq!(drawn(5), (0..60).collect::<Vec<u64>>());
    assert_eq!(drawn(955), (40..100).collect::<Vec<u64>>());
}
