//! The fuzzer's bytes as a scheduler's event log: a log may be refused, but nothing may panic. Replaying an accepted
//! log gives the same decision log every time.
mod changed;

use changed::changed;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Vocabulary};
use kvist_scheduler::{Admission, Config, Preempted, PrefixOrder, replay};
use kvist_simulator::cost::ConstantRates;
use kvist_simulator::run::{Options, Part, run};
use kvist_simulator::workload::{Arrivals, Chats, Contents, Lengths, Workload};
use std::sync::LazyLock;

/// Iterations of an ordinary test run; a fuzzing engine sets its own number.
const ITERATIONS: usize = 1_000;
/// Modified copies of each real log.
const CHANGED: u64 = 600;

const BLOCK_TOKENS: u32 = 16;

/// A small cache, so that a valid log contains preemptions and evictions.
fn cache() -> Cache {
    let spec = PagedSpec {
        block_tokens: BLOCK_TOKENS,
        groups: vec![GroupSpec { capacity_tokens: 640, visibility: Visibility::FULL, max_step_tokens: 1 }],
        rollback_tokens: 0,
        prefix: Some(PrefixSpec {
            vocabulary: Vocabulary::Ids { tokens_per_id: BLOCK_TOKENS },
            ..PrefixSpec::default()
        }),
    };
    Cache::paged(&spec).expect("a paged cache")
}

/// The event logs of several schedulers under a small load.
static LOGS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let config = |policy: &str| Config {
        policy: policy.into(),
        max_batch: 4,
        max_batch_tokens: 64,
        admission: Admission::Optimistic { headroom_tokens: 16 },
        ..Config::default()
    };
    let configs = [
        config("fcfs"),
        Config { preempted: Preempted::Kept, ..config("srpt") },
        Config { prefix_order: PrefixOrder::Window(3), ..config("priority") },
    ];
    configs.into_iter().enumerate().map(|(seed, config)| log(config, seed as u64)).collect()
});

fn log(scheduler: Config, seed: u64) -> String {
    let workload = Workload {
        n_requests: 16,
        arrivals: Arrivals::Poisson { per_s: 20.0 },
        prompt_tokens: Lengths::Uniform { min: 10, max: 90 },
        output_tokens: Lengths::Uniform { min: 1, max: 40 },
        contents: Contents::Chats(Chats {
            turns: Lengths::Uniform { min: 1, max: 3 },
            think_s: 0.5,
            system_tokens: 32,
            tokens_per_id: BLOCK_TOKENS,
        }),
    };
    let requests = workload.generate(seed).expect("a workload");
    let cost = ConstantRates::new(10.0, 0.5).expect("rates");
    let mut events = String::new();
    let mut hear = |part: Part, lines: &str| {
        if part == Part::Events {
            events += lines;
        }
    };
    let options = Options { scheduler, max_new: Some(40), ..Options::default() };
    run(&requests, cache(), &cost, &options, Some(&mut hear), &mut |_| ()).expect("a run");
    events
}

/// Numbers at the limits of the fields' types, and some that are not numbers.
const NUMBERS: [&str; 9] = [
    "0",
    "1",
    "4294967295",
    "4294967296",
    "18446744073709551615",
    "9223372036854775808",
    "-1",
    "1e99",
    "null",
];

/// `log` with lines removed, repeated or swapped, or with a number replaced. Most of it still parses.
fn changed_lines(log: &str, seed: u64) -> String {
    let mut random = kvist_testing::SplitMix64(seed);
    let mut below = |n: usize| random.index(n);
    let mut lines: Vec<String> = log.lines().map(str::to_owned).collect();
    for _ in 0..1 + below(3) {
        let (a, b) = (below(lines.len()), below(lines.len()));
        match below(8) {
            0 => _ = lines.remove(a),
            1 => lines.swap(a, b),
            2 => lines.insert(a, lines[b].clone()),
            _ => {
                let line = &lines[a];
                let digit = |i: usize| line.as_bytes()[i].is_ascii_digit();
                let starts = (1..line.len()).filter(|&i| digit(i) && !digit(i - 1));
                let starts: Vec<usize> = starts.collect();
                let Some(&start) = starts.get(below(starts.len())) else { continue };
                let end = (start..line.len()).find(|&i| !digit(i)).unwrap_or(line.len());
                lines[a] = [&line[..start], NUMBERS[below(NUMBERS.len())], &line[end..]].concat();
            }
        }
        if lines.is_empty() {
            break;
        }
    }
    // Renumber the moved lines; otherwise the first check would refuse every such log.
    if below(2) == 0 {
        for (n, line) in lines.iter_mut().skip(1).enumerate() {
            if let Some(rest) =
                line.strip_prefix("{\"n\":").and_then(|rest| rest.find(',').map(|at| &rest[at..]))
            {
                *line = format!("{{\"n\":{n}{rest}");
            }
        }
    }
    lines.join("\n")
}

/// Returns whether the log was accepted.
fn read(bytes: &[u8]) -> bool {
    match replay(bytes, cache(), None) {
        Ok(decisions) => {
            assert!(replay(bytes, cache(), None).is_ok_and(|again| again == decisions));
            true
        }
        Err(why) => {
            assert!(!why.to_string().is_empty());
            false
        }
    }
}

#[test]
fn event_logs() {
    for log in &*LOGS {
        assert!(log.contains("\"arrive\"") && read(log.as_bytes()), "a real log is accepted");
    }
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        // Half of the inputs follow a valid first line.
        let header = LOGS[0].lines().next().unwrap_or_default();
        match bytes.split_first() {
            Some((choice, rest)) if choice % 2 == 0 => {
                read(&[header.as_bytes(), b"\n", rest].concat());
            }
            _ => _ = read(bytes),
        }
    });
    let mut accepted = 0;
    for log in &*LOGS {
        for seed in 0..CHANGED {
            accepted += u32::from(read(changed_lines(log, seed).as_bytes()));
            accepted += u32::from(read(&changed(log.as_bytes(), seed)));
        }
    }
    // Otherwise only the first checks would have been tested.
    assert!(accepted > 50, "{accepted} changed logs were accepted");
}

/// Rewrites the committed corpus: `cargo test -p kvist-fuzz -- --ignored write_event_logs_corpus`.
#[test]
#[ignore = "writes files into the source tree"]
fn write_event_logs_corpus() {
    let dir = format!("{}/tests/__fuzz__/event_logs/corpus", env!("CARGO_MANIFEST_DIR"));
    std::fs::create_dir_all(&dir).expect("the source tree can be written");
    for (i, log) in LOGS.iter().enumerate() {
        for (name, text) in [("whole", log.clone()), ("changed", changed_lines(log, i as u64))] {
            // The first byte is odd, so the text is used unchanged.
            assert!(text.is_empty() || text.as_bytes()[0] % 2 == 1, "`{{` is odd");
            std::fs::write(format!("{dir}/{name}-{i}"), text).expect("the source tree can be written");
        }
    }
}
