//! A report of a small record, computed by hand.
use kvist_simulator::report::{
    Load, Objectives, Record, Report, RequestOutcome, RequestRow, over_seeds, write_csv,
};

fn row(id: u64, arrival_ms: u64, first_ms: u64, finished_ms: u64, output_tokens: u32) -> RequestRow {
    RequestRow {
        id,
        arrival_ns: arrival_ms * 1_000_000,
        admitted_ns: Some(arrival_ms * 1_000_000),
        first_token_ns: Some(first_ms * 1_000_000),
        finished_ns: Some(finished_ms * 1_000_000),
        prompt_tokens: 10,
        output_tokens,
        outcome: RequestOutcome::Finished,
        ..RequestRow::default()
    }
}

fn record() -> Record {
    let mut record = Record {
        requests: vec![
            row(0, 0, 100, 1100, 11), // TTFT 100 ms, TPOT 100 ms
            RequestRow { deadline_ns: Some(1), ..row(1, 500, 1500, 2000, 6) }, // 1,000 and 100, late
            row(2, 1000, 1200, 1200, 1), // 200, no TPOT
            RequestRow {
                id: 3,
                arrival_ns: 1_000_000_000,
                outcome: RequestOutcome::Refused,
                ..Default::default()
            },
            RequestRow { id: 4, arrival_ns: 0, outcome: RequestOutcome::Cancelled, ..Default::default() },
        ],
        ..Record::default()
    };
    record.itl_ns.record_n(100_000_000, 15);
    record.timeline.note(0, Load { running_requests: 1, ..Load::default() });
    record.timeline.note(1_000_000_000, Load { running_requests: 2, queued_requests: 1, ..Load::default() });
    record.timeline.note(2_000_000_000, Load::default());
    record.cache.hit_tokens = 5;
    record.cache.total_tokens = 20;
    record.steps.busy_ns = 1_500_000_000;
    record
}

#[test]
fn by_hand() {
    let objectives = Objectives { ttft_s: Some(0.5), tpot_s: Some(0.15) };
    let report = Report::of(&record(), &objectives);
    let counts = report.requests;
    assert_eq!(
        (counts.total, counts.finished, counts.refused, counts.cancelled, counts.unfinished, counts.late),
        (5, 3, 1, 1, 0, 1)
    );
    let ttft = report.latency.ttft_s.unwrap();
    assert!((ttft.mean - 1.3 / 3.0).abs() < 1e-12);
    assert_eq!((ttft.n, ttft.p50, ttft.max), (3, 0.2, 1.0));
    let tpot = report.latency.tpot_s.unwrap();
    assert_eq!((tpot.n, tpot.mean), (2, 0.1));
    assert_eq!(report.latency.itl_s.unwrap().mean, 0.1);
    assert_eq!(report.latency.end_to_end_s.unwrap().max, 1.5);
    assert_eq!(report.throughput.duration_s, 2.0);
    assert_eq!(report.throughput.output_tokens_per_s, 9.0);
    assert_eq!(report.throughput.goodput_requests_per_s, 1.0);
    assert_eq!((report.objectives.met, report.objectives.attainment), (2, Some(0.5)));
    assert_eq!(report.cache.token_hit_ratio, 0.25);
    assert_eq!(report.load.mean_running_requests, 1.5);
    assert_eq!(report.load.mean_queued_requests, 0.5);
    assert_eq!(report.load.busy_ratio, 0.75);
    // Without objectives, every finished request counts.
    assert_eq!(Report::of(&record(), &Objectives::default()).objectives.met, 3);
}

/// With no data, no figure is invented, and none is NaN.
#[test]
fn of_nothing() {
    let report = Report::of(&Record::default(), &Objectives::default());
    assert_eq!(report.latency.ttft_s, None);
    assert_eq!(report.objectives.attainment, None);
    assert!(report.figures().iter().all(|(_, value)| value.is_finite()), "{:?}", report.figures());
}

#[test]
fn same_record_same_bytes() {
    let json = |record: &Record| serde_json::to_string(&Report::of(record, &Objectives::default())).unwrap();
    assert_eq!(json(&record()), json(&record()));
    let value: serde_json::Value = serde_json::from_str(&json(&record())).unwrap();
    assert_eq!(value["version"], 1);
    assert_eq!(value["cache"]["hit_tokens"], 5);
    assert_eq!(value["cache"]["token_hit_ratio"], 0.25);
}

#[test]
fn seeds_have_intervals() {
    let mut other = record();
    other.requests[0].first_token_ns = Some(400_000_000);
    let reports = [record(), other].map(|record| Report::of(&record, &Objectives::default()));
    let figures = over_seeds(reports.iter().flat_map(Report::figures));
    let ttft = figures["ttft_mean_s"];
    assert!((ttft.mean - 1.45 / 3.0).abs() < 1e-12, "{ttft:?}");
    assert!(ttft.half_width.unwrap() > 0.5, "two seeds say little: {ttft:?}");
    assert_eq!(figures["busy_ratio"].half_width, Some(0.0));
}

#[test]
fn csv_of_requests() {
    let mut out = Vec::new();
    write_csv(&mut out, &record().requests[2..4]).unwrap();
    assert_eq!(
        String::from_utf8(out).unwrap(),
        "id,arrival_ns,admitted_ns,first_token_ns,finished_ns,prompt_tokens,output_tokens,hit_tokens,preemptions,deadline_ns,outcome\n\
         2,1000000000,1000000000,1200000000,1200000000,10,1,0,0,,finished\n\
         3,1000000000,,,,0,0,0,0,,refused\n"
    );
}
