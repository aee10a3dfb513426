//! `kvist simulate` through the binary: figures, exact output and resumed sweeps.
use crate::program::*;
use std::path::Path;

/// 150 chat requests on so few blocks that some are evicted.
const DRAWN: &str =
    "simulate -q --requests 150 --capacity-blocks 700 --arrivals poisson:per_s=3 --slo-ttft=100ms";
fn drawn<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&words(DRAWN), more].concat()
}

/// Regression: it reported 605 of 600 requests, because the last chat was generated completely.
#[test]
fn as_many_requests_are_drawn_as_asked() {
    for contents in ["unknown", "chats:least_turns=1,most_turns=8,think_s=20", "agents:fan_out=3,depth=2"] {
        let contents = match contents {
            "unknown" => contents.to_string(),
            shared => format!("{shared},system_tokens=64"),
        };
        let args = ["simulate", "-q", "--requests", "61", "--contents", &contents, "--json"];
        let report = json(&args);
        assert_eq!((&report["requests"]["total"], &report["requests"]["finished"]), (&61.into(), &61.into()));
    }
}

/// Regression: the error for an unknown name listed `opt`, which was then refused as well.
#[test]
fn policies_are_offered_where_they_are_taken() {
    let offered = |more: &[&str]| {
        let args = ["simulate", "-q", "--requests", "5", "--policy", "lur"];
        refused(&[&args[..], more].concat(), 2, &[])
    };
    let said = offered(&[]);
    assert!(said.contains("lru, fifo, lfu, lfu_decay, cost") && !said.contains("opt"), "{said}");
    let said = offered(&["--zero-service"]);
    assert!(said.contains("lru, fifo, lfu, lfu_decay, cost, opt"), "{said}");
}

/// The rule of zero service, to the block, on a published trace.
#[test]
fn zero_service_figures() {
    let trace = data("conversation_trace.jsonl.zst");
    let mut bad = Vec::new();
    for (policy, capacity, order, hits) in [
        ("lru", "inf", "reverse", 105_710),
        ("lru", "10000", "reverse", 61_046),
        ("lru", "10000", "forward", 60_921),
        ("lru", "0", "reverse", 0),
        ("opt", "0", "forward", 0),
        ("opt", "inf", "forward", 105_710),
    ] {
        let command = ["simulate", "-q", "--trace", &trace, "--zero-service", "--json", "--policy", policy];
        let result = json(&[&command[..], &["--capacity-blocks", capacity, "--touch-order", order]].concat());
        let found = (&result["cache"]["hit_blocks"], &result["cache"]["total_blocks"]);
        if found != (&hits.into(), &288_500.into()) {
            bad.push(format!("{policy} {capacity} {order}: {found:?}, expected {hits} of 288500"));
        }
        assert!(result["cache"]["token_hit_ratio"].is_f64() || result["cache"]["token_hit_ratio"] == 0.0);
        assert_eq!((&result["policy"], &result["block_tokens"]), (&policy.into(), &512.into()));
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Zero service uses the order of the file, a run that of arrival.
#[test]
fn zero_service_takes_requests_in_the_order_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("backwards.jsonl");
    let row = |at: u32, id: u32| {
        format!("{{\"timestamp\":{at},\"input_length\":512,\"output_length\":1,\"hash_ids\":[{id}]}}\n")
    };
    // In order of arrival it is 1 2 2 1, in the order of the file 1 1 2 2.
    std::fs::write(&trace, [row(1, 1), row(4, 1), row(3, 2), row(2, 2)].concat()).unwrap();
    let trace = trace.display().to_string();
    let command = ["simulate", "--trace", &trace, "--zero-service", "--capacity-blocks", "1", "--json"];
    assert_eq!(json(&command)["cache"]["hit_blocks"], 2);
}

#[test]
fn same_input_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let (mut all, mut stdouts) = (Vec::new(), Vec::new());
    for run in ["a", "b"] {
        let path = |kind: &str| file(&format!("{run}.{kind}")).display().to_string();
        let (csv, html, record, svg) = (path("csv"), path("html"), path("record"), path("svg"));
        let outputs = ["--json", "--csv", &csv, "--html", &html, "--record", &record, "--svg", &svg];
        stdouts.push(succeed(&drawn(&outputs)).0);
        let latency = file(&format!("{run}.svg")).join("latency.svg").display().to_string();
        all.push([csv, html, record, latency].map(|path| std::fs::read_to_string(path).unwrap()));
    }
    assert!(stdouts[0] == stdouts[1]);
    for (a, b) in all[0].iter().zip(&all[1]) {
        assert!(a == b && a.len() > 1000, "{} and {} bytes", a.len(), b.len());
    }
    let other = succeed(&drawn(&["--json", "--seed", "2"])).0;
    assert!(other != stdouts[0], "another seed is another load");

    // A row per request, and a recording whose lines are valid JSON of the documented form.
    assert_eq!(all[0][0].lines().count(), 151);
    assert!(all[0][0].starts_with("id,arrival_ns,admitted_ns,first_token_ns,finished_ns,prompt_tokens,"));
    let lines: Vec<serde_json::Value> =
        all[0][2].lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let formats: Vec<_> = lines.iter().filter_map(|line| line["format"].as_str()).collect();
    assert_eq!(formats, ["kvist-recording", "kvist-events", "kvist-decisions"]);
    assert!(lines.iter().all(|line| line["format"].is_null() || line["version"] == 1));
    let with = |key: &str| lines.iter().filter(|line| !line[key].is_null()).count();
    assert_eq!((with("arrive"), with("end")), (150, 150));
    assert!(with("admit") >= 150, "once, and again after a preemption");
    assert!(with("blocks") > 100 && with("make_room") > 0 && with("sampled") > 100);
}

#[test]
fn json_has_what_it_promises() {
    let report = json(&drawn(&["--json"]));
    let paths = "version setting/scheduler setting/lengths setting/cost setting/load setting/seed \
                  requests/total requests/finished requests/refused requests/late cache/block_tokens \
                  cache/capacity_blocks cache/hit_blocks cache/total_blocks cache/token_hit_ratio \
                  cache/block_hit_ratio cache/request_hit_ratio cache/evicted_blocks \
                  cache/miss_reasons/never_seen latency/queue_s/p50 latency/ttft_s/p99 \
                  latency/tpot_s/mean latency/itl_s/p90 latency/end_to_end_s/max throughput/duration_s \
                  throughput/requests_per_s throughput/goodput_requests_per_s objectives/asked/ttft_s \
                  objectives/met objectives/attainment load/mean_queued_requests load/peak_used_blocks \
                  load/busy_ratio steps/steps steps/preemptions steps/busy_ns timeline/0/at_ns \
                  timeline/0/used_blocks";
    for path in words(paths) {
        assert!(report.pointer(&format!("/{path}")).is_some_and(|v| !v.is_null()), "no {path}");
    }
    assert_eq!(
        (&report["requests"]["total"], &report["objectives"]["asked"]["ttft_s"]),
        (&150.into(), &0.1.into())
    );
    assert!(report["cache"]["evicted_blocks"].as_u64() > Some(0), "700 blocks are few");
}

#[test]
fn a_page_is_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html").display().to_string();
    let (stdout, _) = succeed(&drawn(&["--html", &page, "--beside", "srpt"]));
    assert!(stdout.contains("fcfs") && stdout.contains("srpt"));
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    for section in ["Side by side", "Latency", "Memory and batch", "Requests", "Block map"] {
        assert!(page.contains(section), "no {section}");
    }
    for foreign in ["http:", "https:", "src=", "@import", "url(", "<link", "NaN"] {
        assert!(!page.contains(foreign), "it has {foreign}");
    }
}

/// Three requests (of seed 004) on a server with one batch place: 10 prompt tokens per millisecond, 10 ms per generated
/// token. The first token comes with the last token of the prompt.
#[test]
fn three_requests_under_three_schedulers() {
    let folder = tempfile::tempdir().unwrap();
    for (schedule, preempted, ends_ms) in [
        ("fcfs", "recompute", [5190, 5685, 5776]),
        ("sjf", "recompute", [5190, 5776, 5281]),
        // The two small requests run between the tokens of the large one.
        ("srpt", "kept", [5776, 1086, 696]),
        // The contents are unknown, so lost tokens are computed again.
        ("srpt", "recompute", [5965, 1082, 696]),
    ] {
        let csv = folder.path().join("rows.csv").display().to_string();
        let args = format!(
            "simulate -q --trace {} --max-batch 1 --prefill-rate 10 --decode-rate 0.1 --lengths oracle --schedule {schedule} --preempted {preempted} --csv {csv}",
            data("three.jsonl")
        );
        succeed(&words(&args));
        let rows = std::fs::read_to_string(&csv).unwrap();
        let ended: Vec<u64> = rows
            .lines()
            .skip(1)
            .map(|row| row.split(',').nth(4).unwrap().parse::<u64>().unwrap() / 1_000_000)
            .collect();
        assert_eq!(ended, ends_ms, "{schedule}, {preempted}");
    }
}

/// Estimates without an error are the truth; with one, srpt serves in another order, the same one for the same seed, and edf,
/// which weighs no work, does not change.
#[test]
fn wrong_estimates_change_policies_that_weigh_work() {
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("rows.csv").display().to_string();
    let rows = |schedule: &str, lengths: &str| {
        let command = "simulate -q --requests 60 --contents unknown --arrivals poisson:per_s=4 --max-batch 2 --max-new 100000 \
                       --deadline 9s --csv";
        let more = ["--schedule", schedule, "--lengths", lengths];
        succeed(&[&words(command)[..], &[&csv], &more].concat());
        std::fs::read_to_string(&csv).unwrap()
    };
    let truth = rows("srpt", "oracle");
    assert!(rows("srpt", "noisy:cv=0") == truth);
    let noisy = rows("srpt", "noisy:cv=2");
    assert!(noisy != truth && noisy == rows("srpt", "noisy:cv=2"));
    assert!(rows("edf", "noisy:cv=2") == rows("edf", "oracle"));
    let command = "simulate -q --requests 5 --json --max-new 9 --lengths noisy:cv=0.25";
    let report = json(&words(command));
    assert_eq!(report["setting"]["lengths"], "noisy: the true length times a log-normal error of cv 0.25");
}

/// Layers that see 32 tokens: by hand, no query needs more than 3 blocks of 16. The second request finds the blocks of the
/// window before its last token, though the block before them is gone.
#[test]
fn a_window_bounds_the_blocks_of_a_sequence() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("two.jsonl");
    let row = |id: u64| {
        let arrival_ns = id * 1_000_000_000;
        format!(
            "{{\"id\":{id},\"arrival_ns\":{arrival_ns},\"prompt_tokens\":64,\"output_tokens\":33,\"ids\":[1,2,3,4],\"tokens_per_id\":16}}\n"
        )
    };
    let header = "{\"format\":\"kvist-trace\",\"version\":1}\n";
    std::fs::write(&trace, [header.to_owned(), row(0), row(1)].concat()).unwrap();
    let command =
        "simulate -q --json --max-batch 1 --batch-tokens 16 --prefill-rate 1 --decode-rate 1 --trace";
    let trace = trace.display().to_string();
    let of = |more: &str| {
        let report = json(&[&words(command)[..], &[&trace], &words(more)].concat());
        let cache = &report["cache"];
        let figures = [
            &report["requests"]["finished"],
            &report["requests"]["refused"],
            &report["load"]["peak_used_blocks"],
            &cache["hit_tokens"],
        ];
        (figures.map(|figure| figure.as_u64().unwrap()), report["setting"]["layers"].clone())
    };
    // 64 tokens of the prompt and 32 of the answer are stored: 6 blocks. The last token of the prompt is no hit.
    assert_eq!(of("--capacity-blocks 6"), ([2, 0, 6, 48], serde_json::Value::Null));
    assert_eq!(of("--capacity-blocks 5").0, [0, 2, 0, 0]);
    let windowed = of("--capacity-blocks 6 --window 32");
    assert_eq!(windowed, ([2, 0, 3, 48], "all see the last 32 tokens".into()));
    // The last two of the prompt and the two of the answer are never alone in 4 blocks: 5 leave room for one more.
    assert_eq!(of("--capacity-blocks 5 --window 32").0, [2, 0, 3, 48]);
    assert_eq!(of("--capacity-blocks 4 --window 32").0, [2, 0, 3, 0]);
    // With a sink, its block stays too.
    assert_eq!(of("--capacity-blocks 6 --window 32 --sinks 1").0, [2, 0, 4, 48]);

    // A model's own windows: 3 of 4 layers see 7 tokens, and one sees all, whose blocks are counted.
    let model = fixtures().join("parity/gemma3/config.json").display().to_string();
    let (figures, layers) = of(&format!("--capacity-blocks 6 --model {model}"));
    assert_eq!((figures, layers), ([2, 0, 6, 48], "3 see the last 7 tokens, 1 see every token".into()));
}

fn sweep(out: &Path, more: &[&str]) -> String {
    let out = out.display().to_string();
    let command = "simulate sweep -q --json --requests 80 --seeds 2 --policies lru,lfu_decay --capacities \
                   500,2000,inf --out";
    succeed(&[&words(command)[..], &[&out], more].concat()).0
}

#[test]
fn a_sweep_is_the_same_on_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    assert!(sweep(&one, &["-j", "1"]) == sweep(&two, &["-j", "2"]));
    for file in ["sweep.json", "sweep.csv", "sweep.html", "goodput-against-capacity.svg"] {
        let read = |folder: &Path| std::fs::read(folder.join(file)).unwrap();
        assert!(read(&one) == read(&two), "{file}");
    }
    let table: serde_json::Value =
        serde_json::from_slice(&std::fs::read(one.join("sweep.json")).unwrap()).unwrap();
    let rows = table["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        assert_eq!((&row["seeds"], &row["figures"]["ttft_p90_s"]["n"]), (&2.into(), &2.into()));
        assert!(row["figures"]["token_hit_ratio"]["half_width"].is_f64(), "{row}");
    }
}

/// A cell whose file exists is not run again; it is if the file is gone, or belongs to another load.
#[test]
fn a_sweep_goes_on_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let first = sweep(folder.path(), &[]);
    let cells = folder.path().join("cells");
    assert_eq!(std::fs::read_dir(&cells).unwrap().count(), 12);
    let gone = cells.join("fcfs-lru-500-2.json");
    let whole = std::fs::read_to_string(&gone).unwrap();
    std::fs::remove_file(&gone).unwrap();
    // A changed file shows that the other cells are read and not run.
    let changed = cells.join("fcfs-lru-2000-1.json");
    let mut cell: serde_json::Value = serde_json::from_slice(&std::fs::read(&changed).unwrap()).unwrap();
    cell["figures"]["preemptions"] = 1e6.into();
    std::fs::write(&changed, cell.to_string()).unwrap();
    let second = sweep(folder.path(), &[]);
    assert_eq!(std::fs::read_to_string(&gone).unwrap(), whole, "the same cell, run again");
    assert!(second != first, "the changed cell is believed");
    std::fs::write(&changed, "{\"version\":1,").unwrap(); // half a file
    assert!(sweep(folder.path(), &[]) == first, "as at first");
    // A different load has different cells under the same names.
    let other = sweep(folder.path(), &["--max-batch", "3"]);
    assert!(other != first);
    assert!(sweep(folder.path(), &[]) == first, "as at first");
}

#[test]
fn a_sweep_of_zero_service() {
    let folder = tempfile::tempdir().unwrap();
    let (out, trace) = (folder.path().display().to_string(), data("conversation_trace.jsonl.zst"));
    let capacities = ["--policies", "lru,opt", "--capacities", "1000,10000,inf", "--out", &out];
    let command = ["simulate", "sweep", "--json", "--zero-service", "--trace", &trace];
    let table = json(&[&command[..], &capacities].concat());
    let hits: Vec<f64> = table["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["figures"]["block_hit_ratio"]["mean"].as_f64().unwrap() * 288_500.0)
        .map(f64::round)
        .collect();
    assert_eq!(hits, [12_847.0, 61_046.0, 105_710.0, 55_019.0, 105_710.0, 105_710.0]);
    let (text, _) =
        succeed(&[&["simulate", "sweep", "--zero-service", "--trace", &trace], &capacities[..]].concat());
    assert!(text.contains("token hits") && !text.contains("TTFT"), "{text}");
    assert!(folder.path().join("hit-ratio-against-capacity.svg").exists());
    assert!(!folder.path().join("goodput-against-capacity.svg").exists());
}

/// The oldest prompt is long, and space is needed. By uses and time its tail is evicted first. With `cost` blocks of
/// the short prompts are evicted, because attention makes deep blocks expensive: 60 blocks of 512 tokens deep, twice a
/// first one.
#[test]
fn cost_keeps_what_is_deep() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("deep.jsonl");
    let row = |at_s: u32, ids: std::ops::Range<u32>| {
        let tokens = ids.len() * 512;
        let ids: Vec<u32> = ids.collect();
        format!(
            "{{\"timestamp\":{},\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{ids:?}}}\n",
            at_s * 1000
        )
    };
    let short = (0..4).map(|i| row(10 + i, 1000 + 100 * i..1008 + 100 * i));
    // 60 + 4 · 8 blocks are in a cache of 100; 20 more need 12 of them.
    let rows = [row(0, 0..60)].into_iter().chain(short).chain([row(20, 2000..2020), row(30, 0..60)]);
    std::fs::write(&trace, rows.collect::<String>()).unwrap();
    let trace = trace.display().to_string();
    let hit = |more: &str| {
        let command = "simulate -q --json --capacity-blocks 100 --block-tokens 512 --trace";
        let report = json(&[&words(command)[..], &[&trace], &words(more)].concat());
        assert_eq!(report["requests"]["finished"], 7, "{more}");
        report["cache"]["hit_blocks"].as_u64().unwrap()
    };
    let roofline = "--hardware h100-sxm --shape llama-3.1-8b";
    let constant = "--prefill-rate 100 --decode-rate 1";
    for (more, blocks) in [
        // The last token is always computed, and so is its block.
        (format!("--policy cost {roofline}"), 59),
        (format!("--policy lfu_decay {roofline}"), 48),
        (format!("--policy lru {roofline}"), 48),
        // Context costs nothing.
        (format!("--policy cost {constant}"), 48),
        // Uses halve so fast that a factor of two is worth less than ten seconds.
        (format!("--policy cost --half-life 1s {roofline}"), 48),
    ] {
        assert_eq!(hit(&more), blocks, "{more}");
    }
}

/// The mean and the interval over single runs, computed by hand.
#[test]
fn intervals_over_seeds() {
    let drawn = ["simulate", "-q", "--requests", "60", "--capacity-blocks", "900"];
    let singles: Vec<f64> = ["5", "6", "7"]
        .iter()
        .map(|seed| json(&[&drawn[..], &["--json", "--seed", seed]].concat()))
        .map(|report| report["latency"]["ttft_s"]["p90"].as_f64().unwrap())
        .collect();
    let over = [&drawn[..], &["--seed", "5", "--seeds", "3"]].concat();
    let found = json(&[&over[..], &["--json"]].concat());
    assert_eq!((&found["seeds"], &found["first_seed"]), (&3.into(), &5.into()));
    let estimate = &found["figures"]["ttft_p90_s"];
    let mean = singles.iter().sum::<f64>() / 3.0;
    let variance = singles.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / 2.0;
    let half = 4.302_652_7 * (variance / 3.0).sqrt(); // Student's t, 2 degrees of freedom
    let close = |name: &str, expected: f64| {
        let found = estimate[name].as_f64().unwrap();
        assert!((found - expected).abs() < 1e-6 * expected, "{name}: {found}, by hand {expected}");
    };
    close("mean", mean);
    close("half_width", half);
    let (text, _) = succeed(&over);
    assert!(text.contains("3 seeds") && text.contains("TTFT") && text.contains(" ±"), "{text}");
}

/// Contiguous handles compared with a paged cache, on a load that does not fit.
#[test]
fn arena_beside_pages() {
    let drawn = ["simulate", "arena", "-q", "--requests", "300", "--capacity-blocks", "500"];
    let table = json(&[&drawn[..], &["--json"]].concat());
    let layouts = table["layouts"].as_array().unwrap();
    let of = |i: usize, name: &str| layouts[i][name].as_u64().unwrap();
    let names: Vec<&str> = layouts.iter().map(|layout| layout["layout"].as_str().unwrap()).collect();
    assert_eq!(names, ["first_fit", "buddy", "paged"]);
    for (i, layout) in layouts.iter().enumerate() {
        assert_eq!(of(i, "finished") + of(i, "turned_away") + of(i, "cut_short"), of(i, "requests"));
        assert!(of(i, "peak_used_blocks") <= 500 && of(i, "turned_away") > 0, "{layout}");
    }
    let lost = |i: usize| of(i, "turned_away_with_room") + of(i, "cut_short_with_room");
    assert!(lost(0) > 0 && lost(1) > 0 && lost(2) == 0, "pages are never in pieces: {table}");
    assert!(of(0, "moved") > 0 && of(2, "moved") == 0 && of(2, "finished") > of(0, "finished"), "{table}");
    let (text, _) = succeed(&[&drawn[..], &["--layouts", "buddy,paged", "--reserve", "whole"]].concat());
    assert!(text.contains("external fragmentation") && !text.contains("first_fit"), "{text}");
}

/// A recording has everything that its decisions depend on: the replay needs no flag, and reports where recorded
/// decisions differ.
#[test]
fn a_recording_is_decided_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (record, log) = (path("run.jsonl"), path("decisions.jsonl"));
    for way in [
        &["--policy", "cost", "--schedule", "srpt", "--preempted", "kept"][..],
        &["--block-tokens", "32", "--prefix-window", "4", "--policy", "lfu_decay", "--half-life", "20s"],
        &["--no-prefix-cache", "--conservative"],
    ] {
        succeed(&drawn(&[way, &["--record", &record]].concat()));
        let replayed = json(&["simulate", "replay", &record, "-o", &log, "--json"]);
        let n = |field: &str| replayed[field].as_u64().unwrap();
        assert!(n("events") > 300 && n("steps") > 100 && n("decisions") > 300, "{replayed}");
        assert_eq!(n("compared"), n("decisions"), "{way:?}");
        let recorded = std::fs::read_to_string(&record).unwrap();
        let is_decision = |line: &&str| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            line["format"] == "kvist-decisions" || (line["step"].is_u64() && line["blocks"].is_null())
        };
        let decisions: Vec<&str> = recorded.lines().filter(is_decision).collect();
        assert_eq!(std::fs::read_to_string(&log).unwrap(), decisions.join("\n") + "\n");
        // The two logs as separate files.
        let is_event = |line: &&str| line.starts_with("{\"n\":") || line.contains("kvist-events");
        let events: Vec<&str> = recorded.lines().filter(is_event).collect();
        let apart = path("events.jsonl");
        std::fs::write(&apart, events.join("\n")).unwrap();
        let (text, _) = succeed(&["simulate", "replay", &apart, "--decisions", &log]);
        assert!(text.contains("identical"), "{text}");
        let (text, _) = succeed(&["simulate", "replay", &apart]);
        assert!(text.contains("nothing to compare with"), "{text}");
    }

    let recorded = std::fs::read_to_string(&record).unwrap();
    let decisions = std::fs::read_to_string(&log).unwrap();
    let bad = path("bad.jsonl");
    let refused = |text: &str, more: &[&str], expected: &[&str]| {
        std::fs::write(&bad, text).unwrap();
        refused(&[&["simulate", "replay", &bad], more].concat(), 1, expected);
    };
    // A server that was killed leaves a partial line, or an event without the decisions it caused.
    let cut = &recorded[..recorded.len() - 5];
    std::fs::write(&bad, cut).unwrap();
    let (text, said) = succeed(&["simulate", "replay", &bad]);
    assert!(text.contains("identical") && said.contains("cut off"), "{text}{said}");
    let last_event = recorded.rfind("{\"n\":").unwrap();
    let after = recorded[last_event..].find('\n').unwrap();
    std::fs::write(&bad, &recorded[..=last_event + after]).unwrap();
    let (text, _) = succeed(&["simulate", "replay", &bad]);
    assert!(text.contains("identical"), "{text}");
    let middle = recorded.len() / 2;
    refused(
        &(recorded[..middle].to_owned() + "\n" + &recorded[middle..]),
        &[],
        &["not a line of a recording"],
    );

    let without_last = |text: &str| text[..text.trim_end().rfind('\n').unwrap()].to_owned();
    refused(
        &recorded.replacen("\"hit\":0", "\"hit\":16", 1),
        &[],
        &["bad.jsonl, line", "decides differently"],
    );
    refused(&recorded.replacen("{\"n\":1,", "{\"n\":2,", 1), &[], &["line", "found event 2, expected 1"]);
    refused(&recorded.replacen("\"cache\":", "\"bucket\":", 1), &[], &["does not describe its cache"]);
    refused(
        &recorded.replacen("\"cache\":{\"block_tokens\":16", "\"cache\":{\"block_tokens\":0", 1),
        &[],
        &["the described cache cannot be made"],
    );
    refused(&decisions, &[], &["--decisions"]);
    refused("{}\n", &[], &["line 1"]);
    refused("", &[], &["contains no event log"]);
    refused("prose\n", &[], &["line 1", "not a line of a recording"]);
    let fewer = path("fewer.jsonl");
    std::fs::write(&fewer, without_last(&decisions)).unwrap();
    refused(&recorded, &["--decisions", &fewer], &["fewer.jsonl ends after line"]);
    std::fs::write(&fewer, decisions.clone() + "{}\n").unwrap();
    refused(&recorded, &["--decisions", &fewer], &["recorded but not replayed"]);

    succeed(&drawn(&["--schedule", "srpt", "--lengths", "oracle", "--record", &record]));
    let recorded = std::fs::read_to_string(&record).unwrap();
    refused(&recorded, &[], &["--lengths oracle"]);
}

/// Regression: a generated load whose requests share nothing was called "5 requests of unrelated requests".
#[test]
fn a_load_is_called_by_what_it_is() {
    for (contents, expected) in [
        ("unknown", "5 unrelated requests"),
        (
            "prefixes:n=2,exponent=1,tokens=64,own_prompt=true,tokens_per_id=16",
            "5 requests with popular prefixes",
        ),
        ("chats:least_turns=1,most_turns=1,think_s=1,system_tokens=32", "5 requests of chats"),
    ] {
        let (stdout, stderr) = succeed(&["simulate", "--requests", "5", "--contents", contents]);
        let said = format!("{stdout}{stderr}");
        assert!(said.contains(expected) && !said.contains("requests of requests"), "{contents}: {said}");
        assert!(!said.contains("requests of unrelated"), "{said}");
    }
}

/// Drafts change when tokens come, and not how many. A recording tells another run how many are accepted.
#[test]
fn speculation() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (record, plain, page) = (at("run.jsonl"), at("plain.jsonl"), at("run.html"));
    let drafts = ["--speculate", "tokens=4,accept=0.8/0.6,draft_ms=0.2", "--json"];
    let off = json(&drawn(&["--json", "--record", &plain]));
    assert!(off.get("speculation").is_none() && off["setting"].get("speculation").is_none());
    let on = json(&drawn(&[&drafts[..], &["--record", &record, "--html", &page]].concat()));
    assert_eq!(on["requests"], off["requests"]);
    assert_eq!(on["steps"]["decode_tokens"], off["steps"]["decode_tokens"]);
    assert!(on["steps"]["steps"].as_u64() < off["steps"]["steps"].as_u64());
    let (speculation, setting) = (&on["speculation"], &on["setting"]["speculation"]);
    assert_eq!(setting, "4 draft tokens, accepted with probability 0.8/0.6; 0.2 ms to draft");
    assert_eq!(speculation["accepted_per_position"].as_array().unwrap().len(), 4);
    let per_step = |report: &serde_json::Value| report["speculation"]["tokens_per_step"].as_f64().unwrap();
    let expected = 1.0 + 0.8 * (1.0 + 0.6 * (1.0 + 0.6 * (1.0 + 0.6)));
    assert!((per_step(&on) / expected - 1.0).abs() < 0.03, "{}", per_step(&on));
    assert!(std::fs::read_to_string(&page).unwrap().contains("Tokens per decode step"));

    let from = drawn(&["--speculate-from", &record, "--json"]);
    let as_recorded = json(&from);
    assert!((per_step(&as_recorded) / per_step(&on) - 1.0).abs() < 0.03, "{}", per_step(&as_recorded));
    assert_eq!(json(&from), as_recorded);
    let replayed = json(&["simulate", "replay", &record, "--json"]);
    assert_eq!(replayed["speculation"]["draft_tokens"], speculation["draft_tokens"]);
    assert_eq!(replayed["speculation"]["accepted_tokens"], speculation["accepted_tokens"]);
    refused(&drawn(&["--speculate-from", &plain]), 1, &["plain.jsonl has no drafts", "speculates"]);

    let seeds = json(&drawn(&[&drafts[..], &["--seeds", "2"]].concat()));
    let mean = seeds["figures"]["tokens_per_step"]["mean"].as_f64().unwrap();
    assert!((mean / expected - 1.0).abs() < 0.03, "{mean}");
    let text = succeed(&drawn(&drafts[..2])).0;
    assert!(text.contains("tokens per request and decode step"), "{text}");
}
