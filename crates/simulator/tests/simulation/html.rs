//! The page: complete, self-contained, the same bytes for the same runs. `KVIST_PAGE=FILE` writes it to a file for
//! viewing.
use kvist_cache::evict::{POLICIES, Parameters};
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec};
use kvist_scheduler::Config;
use kvist_simulator::cost::{Hardware, ModelShape, Roofline};
use kvist_simulator::html::{Comparison, Curve, Page, Plot, Point, Quantity, Run, Unit};
use kvist_simulator::report::{Objectives, Record, Report};
use kvist_simulator::request::Request;
use kvist_simulator::run::{Options, run};
use kvist_simulator::statistics::Estimate;
use kvist_simulator::trace::{ReadOptions, Trace};
use kvist_simulator::workload::{Arrivals, Contents, Lengths, Workload};
use kvist_simulator::zero_service::{BlockStream, TouchOrder, replay};
use std::path::Path;

/// A run with at most `max_batch` requests in the batch, called `name`, in a cache of 600 blocks.
fn serve(requests: &[Request], max_batch: u32, name: &str) -> Record {
    let cost =
        Roofline::ideal(Hardware::preset("l40s").unwrap(), ModelShape::preset("llama-3.1-8b").unwrap());
    let group = GroupSpec { capacity_tokens: 600 * 16, visibility: Visibility::FULL, max_step_tokens: 1 };
    let prefix = Some(PrefixSpec::default());
    let cache = PagedSpec { block_tokens: 16, groups: vec![group], rollback_tokens: 0, prefix };
    let scheduler = Config { max_batch, ..Config::default() };
    let options = Options { scheduler, explain: true, watch: true, ..Options::default() };
    let done = run(requests, Cache::paged(&cache).unwrap(), &cost, &options, None, &mut |_| ()).unwrap();
    let mut record = done.record;
    record.setting.insert("scheduler".into(), name.into());
    record
}

fn records() -> Vec<(&'static str, Record)> {
    let requests = Workload {
        n_requests: 300,
        arrivals: Arrivals::Gamma { per_s: 3.0, variation: 2.5 },
        prompt_tokens: Lengths::Lognormal { mean: 500.0, variation: 1.0 },
        output_tokens: Lengths::Lognormal { mean: 100.0, variation: 0.8 },
        contents: Contents::Unknown,
    }
    .generate(1)
    .unwrap();
    vec![
        ("batch of 32", serve(&requests, 32, "fcfs <32>")),
        ("batch of 4 & no more", serve(&requests, 4, "fcfs \"4\"")),
    ]
}

fn curves() -> (Vec<Curve>, f64) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conversation_trace.jsonl.zst");
    let options = ReadOptions { limit: Some(3000), ..Default::default() };
    let stream = BlockStream::of(&Trace::read(&path, &options).unwrap().requests, None).unwrap();
    let ratio = |policy: &str, capacity| {
        let parameters = Parameters::default();
        replay(&stream, policy, &parameters, capacity, TouchOrder::Reverse).unwrap().cache.token_hit_ratio
    };
    let capacities = [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000];
    let curve = |policy: &str| Curve {
        name: policy.into(),
        points: capacities
            .map(|c| Point {
                x: f64::from(c),
                y: ratio(policy, Some(c)),
                half_width: (policy == "lru").then_some(0.01),
            })
            .to_vec(),
    };
    (POLICIES.iter().map(|policy| curve(policy.name)).collect(), ratio("lru", None))
}

/// Figures of three servers, one of which has no measurements.
fn comparison() -> Comparison {
    let mark = |mean, half_width| Estimate { n: 3, mean, half_width };
    let quantity =
        |title: &str, unit, marks| Quantity { title: title.into(), label: "of all".into(), unit, marks };
    let waits = vec![
        vec![mark(0.2, Some(0.05)), mark(9.0, Some(4.0))],
        vec![mark(0.3, None), mark(12.0, Some(14.0))],
        Vec::new(),
    ];
    let shares = vec![vec![mark(0.0, Some(0.0))], vec![mark(0.5, None)], vec![mark(1.0, None)]];
    Comparison {
        title: "Side by side".into(),
        about: "Three <servers>.".into(),
        names: vec!["<fcfs>".into(), "sjf".into(), "a name that is longer than others".into()],
        quantities: vec![
            quantity("Wait", Unit::Seconds, waits),
            quantity("Share", Unit::Percent, shares),
            quantity("Of nothing", Unit::Count, vec![Vec::new(); 3]),
        ],
    }
}

fn with_page<T>(n_runs: usize, then: impl FnOnce(&Page<'_>) -> T) -> T {
    let records = records();
    let objectives = Objectives { ttft_s: Some(1.0), tpot_s: Some(0.05) };
    let reports: Vec<Report> = records.iter().map(|(_, record)| Report::of(record, &objectives)).collect();
    let runs = records.iter().zip(&reports).take(n_runs);
    let (curves, without_bound) = curves();
    let hit_ratio = Plot {
        title: "Hit ratio against capacity".into(),
        about: "What each <policy> finds.".into(),
        x_label: "capacity in blocks".into(),
        y_label: "tokens found in the cache".into(),
        unit: Unit::Percent,
        curves,
        level: Some(("without bound".into(), without_bound)),
    };
    let zero = Curve { name: "nothing".into(), points: vec![Point { x: 0.0, y: 1.0, half_width: None }] };
    let nothing = Plot { title: "Of nothing".into(), curves: vec![zero], level: None, ..hit_ratio.clone() };
    then(&Page {
        title: "Two batches <of> one load",
        about: "300 requests in bursts, on one L40S.",
        runs: runs.map(|((name, record), report)| Run { name, record, report }).collect(),
        comparison: Some(comparison()),
        plots: vec![hit_ratio, nothing],
    })
}

fn page(n_runs: usize) -> String {
    with_page(n_runs, |page| page.render())
}

/// Checks that every opened tag is closed, in order; void tags such as `<br>` are not closed.
fn check_tags(page: &str) {
    const VOID: [&str; 3] = ["meta", "input", "!doctype"];
    let (mut open, mut rest, mut in_script) = (Vec::<&str>::new(), page, false);
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        let end = rest.find(['>', ' ']).unwrap();
        let name = &rest[..end];
        if in_script && name != "/script" {
            continue;
        }
        let tag_end = rest.find('>').unwrap();
        if let Some(name) = name.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "at {}", &rest[..rest.len().min(80)]);
            in_script = false;
        } else if !VOID.contains(&name) && !rest[..tag_end].ends_with('/') {
            open.push(name);
            in_script = name == "script";
        }
        rest = &rest[tag_end..];
    }
    assert!(open.is_empty(), "left open: {open:?}");
}

#[test]
fn complete_and_self_contained() {
    for n_runs in [0, 1, 2] {
        let page = page(n_runs);
        check_tags(&page);
        for foreign in [
            "http",
            "<script",
            "src=",
            "@import",
            "url(",
            "NaN",
            "inf\"",
            "<of>",
            "<32>",
            "<policy>",
            "<servers>",
            "<fcfs>",
            "Of nothing",
        ] {
            assert!(!page.contains(foreign), "{n_runs} runs: {foreign}");
        }
        let sections = ["Hit ratio against capacity", "Latency", "Memory and batch", "Requests", "Block map"];
        for section in sections.iter().take(if n_runs == 0 { 1 } else { 5 }) {
            assert!(page.contains(section), "{n_runs} runs: {section}");
        }
        if let Some(path) = std::env::var_os("KVIST_PAGE") {
            std::fs::write(Path::new(&path).with_extension(format!("{n_runs}.html")), &page).unwrap();
        }
    }
}

#[test]
fn same_runs_same_bytes() {
    assert_eq!(page(2), page(2));
}

/// Empty input must not fail.
#[test]
fn of_nothing() {
    check_tags(&Page::default().render());
    let record = Record::default();
    let report = Report::of(&record, &Objectives::default());
    let runs = vec![Run { name: "", record: &record, report: &report }];
    let page = Page { runs, ..Page::default() }.render();
    check_tags(&page);
    assert!(!page.contains("NaN"));
}

/// Separate files: every plot of the page, no external resources, and no colours left as CSS variables.
#[test]
fn pictures() {
    let pictures = with_page(2, |page| page.pictures());
    let names: Vec<&str> = pictures.iter().map(|picture| picture.name.as_str()).collect();
    assert_eq!(
        names,
        ["side-by-side", "hit-ratio-against-capacity", "latency", "memory-and-batch-over-time", "requests"]
    );
    let page = page(2);
    for picture in &pictures {
        let svg = &picture.svg;
        check_tags(svg);
        let begin = "<svg xmlns=\"http://www.w3.org/2000/svg\"";
        assert!(svg.starts_with(begin), "{}", picture.name);
        for foreign in ["http", "src=", "@import", "url(", "var(", "NaN", ": ;"] {
            assert!(!svg[begin.len()..].contains(foreign), "{}: {foreign}", picture.name);
        }
        // Each picture has the same content as the page.
        let panels = svg.split("<g transform=").skip(1).map(|panel| &panel[panel.find('>').unwrap() + 1..]);
        for panel in panels {
            let body = panel.rsplit_once("</g>").unwrap().0;
            assert!(page.contains(body), "{}", picture.name);
        }
        if let Some(path) = std::env::var_os("KVIST_PAGE") {
            std::fs::write(Path::new(&path).with_extension(format!("{}.svg", picture.name)), svg).unwrap();
        }
    }
    assert_eq!(with_page(0, |page| page.pictures()).len(), 2);
    assert!(Page::default().pictures().is_empty());
}
