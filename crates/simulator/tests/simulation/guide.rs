//! Checks that the parsers accept the examples in docs/traces.md.
use kvist_simulator::cost::{BatchShape, MeasuredTable, StepCost};
use kvist_simulator::speculation::DraftSpec;
use kvist_simulator::trace::{Format, ReadOptions, Trace};
use kvist_simulator::workload::{Arrivals, Contents, Lengths};

/// The first code block of the guide in this language.
fn example(language: &str) -> &'static str {
    let guide = include_str!("../../../../docs/traces.md");
    let fence = format!("```{language}\n");
    let begin = guide.find(&fence).expect("the guide has an example") + fence.len();
    &guide[begin..begin + guide[begin..].find("```").expect("the example ends")]
}

#[test]
fn our_own_format() {
    let trace = Trace::read_from("guide", example("jsonl").as_bytes(), &ReadOptions::default()).unwrap();
    assert_eq!((trace.format, trace.requests.len()), (Format::Native, 3));
    assert_eq!((trace.requests[1].parent, trace.requests[1].content.known_tokens()), (Some(0), 80));
    assert_eq!((trace.requests[2].salt(), trace.requests[2].priority), ("tenant a", 2));
}

#[test]
fn measured_table() {
    let table = MeasuredTable::parse("guide", example("json")).unwrap();
    let mut both = BatchShape::default();
    both.add_prefill(0, 1);
    both.add_decode(0);
    assert!(table.covers(&both));
    assert!((4_600_000..4_800_000).contains(&table.step_ns(&both)), "{}", table.step_ns(&both));
}

#[test]
fn workloads() {
    let guide = include_str!("../../../../docs/traces.md");
    let section = guide.split("The syntax is `kind:name=value,…`:").nth(1).unwrap();
    let row = |name: &str| {
        let line = section.lines().find(|line| line.starts_with(&format!("| {name} |"))).unwrap();
        line.split('`').skip(1).step_by(2).collect::<Vec<_>>()
    };
    assert!(row("arrivals").iter().all(|text| text.parse::<Arrivals>().is_ok()));
    assert!(row("lengths").iter().all(|text| text.parse::<Lengths>().is_ok()));
    assert!(row("contents").iter().all(|text| text.parse::<Contents>().is_ok()));
    assert_eq!([row("arrivals").len(), row("lengths").len(), row("contents").len()], [5, 6, 4]);
}

#[test]
fn drafts() {
    let guide = include_str!("../../../../docs/simulator.md");
    let texts = guide.lines().filter_map(|line| line.strip_prefix("kvist simulate --speculate "));
    let texts: Vec<DraftSpec> = texts.map(|text| text.parse().unwrap()).collect();
    assert!(texts.len() == 2 && texts.iter().all(|drafts| drafts.acceptance.is_some()), "{texts:?}");
}
