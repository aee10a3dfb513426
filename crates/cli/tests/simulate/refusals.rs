//! What `kvist simulate` refuses, and what it warns about.
use crate::program::*;
use std::path::Path;

/// (arguments, exit status, what stderr says)
type Row = (&'static str, i32, &'static [&'static str]);

#[test]
fn bad_input() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let good = "{\"timestamp\":0,\"input_length\":600,\"output_length\":2,\"hash_ids\":[1,2]}\n";
    let names = [
        ("BAD", put("bad.jsonl", &format!("{good}{good}{}", good.replace("600", "-6")))),
        ("SHORT", put("short.jsonl", &format!("{good}{}", good.replace("[1,2]", "[1]")))),
        ("EMPTY", put("empty.jsonl", "")),
        ("PROSE", put("prose.txt", "Call me Ishmael.\n")),
        (
            "TABLE",
            put(
                "costs.json",
                "{\"format\":\"kvist-step-cost\",\"version\":1,\"prefill\":{\"tokens\":[2,1],\"context\":[0],\"ns\":[[1],[2]]},\"decode\":{\"sequences\":[1],\"context\":[0],\"ns\":[[1]]}}",
            ),
        ),
        ("MISSING", folder.path().join("missing.jsonl").display().to_string()),
        ("GOOD", put("good.jsonl", good)),
        ("AZURE", data("azure_conv.csv")),
        ("OUT", folder.path().join("out").display().to_string()),
        ("NOFOLDER", folder.path().join("good.jsonl/x").display().to_string()),
    ];
    let rows: &[Row] = &[
        ("--policy mru", 2, &["mru", "lru", "lfu_decay"]),
        ("--policy opt", 2, &["opt", "future"]),
        ("--policy lru --half-life 5m", 2, &["half_life", "lru"]),
        ("--policy lfu_decay --half-life soon", 2, &["`soon` is not a duration", "500ms"]),
        ("--schedule lottery", 2, &["lottery", "fcfs", "srpt"]),
        ("--beside lottery --html OUT", 2, &["lottery", "srpt"]),
        ("--beside sjf --json", 2, &["--beside", "--json", "cannot be used with"]),
        ("--lengths guess", 2, &["`guess` is no source of lengths", "running-mean", "noisy:cv=0.5"]),
        ("--lengths noisy", 2, &["`noisy` has no coefficient of variation", "noisy:cv=0.5"]),
        ("--lengths noisy:cv=-1 --max-new 9", 2, &["`noisy:cv=-1`", "from 0 to 1000"]),
        ("--lengths noisy:cv=NaN --max-new 9", 2, &["`noisy:cv=NaN`"]),
        ("--lengths noisy:cv=0.5", 2, &["--lengths noisy needs --max-new"]),
        ("--max-batch 0", 2, &["max_batch", "at least 1"]),
        ("--max-batch 9000", 2, &["max_batch_tokens is 8192", "max_batch"]),
        ("--capacity-blocks 4000000000", 2, &["--capacity-blocks 4000000000", "2^32", "inf"]),
        ("--capacity-blocks many", 2, &["`many` is not a number of blocks", "inf"]),
        ("--block-tokens 0", 2, &["0"]),
        ("--hardware abacus", 2, &["no such machine", "h100-sxm"]),
        ("--shape gpt-9", 2, &["no such model", "llama-3.1-8b"]),
        ("--hardware rtx-4090 --shape llama-3.1-70b", 2, &["does not fit", "another machine"]),
        ("--efficiency 2", 2, &["--efficiency 2", "share"]),
        ("--prefill-rate 10", 2, &["--decode-rate"]),
        ("--prefill-rate 0 --decode-rate 1", 2, &["above 0"]),
        ("--prefill-rate 1e-300 --decode-rate 1", 2, &["--prefill-rate", "2e-10"]),
        ("--efficiency 1e-200", 2, &["a step of one token takes", "--efficiency"]),
        ("--requests 99999999999999999", 2, &["the number of requests is 99999999999999999", "100000000"]),
        ("sweep --policies lru,lfu,lru --out OUT", 2, &["--policies names lru twice"]),
        ("sweep --capacities 10,010 --out OUT", 2, &["--capacities names 10 twice"]),
        ("sweep --schedules fcfs,fcfs --out OUT", 2, &["--schedules names fcfs twice"]),
        ("--costs MISSING", 1, &["cannot read", "missing.jsonl"]),
        ("--costs TABLE", 1, &["costs.json", "goes from 2 to 1", "increasing order"]),
        ("--arrivals poisson", 2, &["`poisson` lacks `per_s`", "poisson:per_s=4"]),
        ("--prompt-tokens 300", 2, &["300", "deterministic"]),
        ("--trace MISSING", 1, &["missing.jsonl", "cannot read it", "No such file"]),
        ("--trace EMPTY", 1, &["empty.jsonl", "it is empty"]),
        ("--trace PROSE", 1, &["prose.txt", "unknown trace format", "mooncake, azure"]),
        ("--trace BAD", 1, &["bad.jsonl, line 3", "`input_length`", "found \"-6\"", "leniently"]),
        ("--trace SHORT", 1, &["short.jsonl, line 2", "`hash_ids`", "1 ids", "expected 2"]),
        ("--trace GOOD --format parquet", 2, &["no such format", "bailian"]),
        ("--trace GOOD --requests 5", 2, &["--requests", "cannot be used with"]),
        ("--trace GOOD --block-tokens 300", 2, &["300", "512", "divide"]),
        ("--lenient", 2, &["--trace"]),
        ("--speculate tokens=4", 2, &["`drafts` lacks `accept`", "tokens=4,accept=0.8/0.6,draft_ms=0.3"]),
        ("--speculate tokens=4,accept=1.5", 2, &["`accept=1.5`", "from 0 to 1"]),
        ("--speculate tokens=4,accept=0.5,width=2", 2, &["does not read `width`"]),
        ("--speculate draft_ms=1", 2, &["give tokens and accept, or --speculate-from"]),
        ("--speculate tokens=1,accept=1 --speculate-from GOOD", 2, &["--speculate can only add draft_ms"]),
        ("--speculate tokens=1,accept=1 --zero-service", 2, &["--speculate", "--zero-service"]),
        ("--speculate-from MISSING", 1, &["cannot read", "missing.jsonl"]),
        ("--speculate-from GOOD", 1, &["good.jsonl, line 1", "not a header"]),
        ("sweep --speculate draft_ms=1 --out OUT", 2, &["give tokens and accept"]),
        ("--zero-service --window 5", 2, &["--window cannot be used with --zero-service"]),
        ("--window 0", 2, &["0", "tokens hold nothing"]),
        ("--sinks 4", 2, &["--window"]),
        ("--kv q8", 2, &["--model"]),
        ("--model MISSING --shape llama-2-7b", 2, &["--model", "--shape", "cannot be used with"]),
        ("--model MISSING", 1, &["missing.jsonl"]),
        (
            "--window 5 --workers 2",
            2,
            &["--workers cannot be used with layers that see a window", "--window"],
        ),
        ("--window 5 --tier ram:1GB,bw=1GB/s", 2, &["--tier cannot be used with layers that see a window"]),
        ("--zero-service --csv OUT", 2, &["--csv cannot be used with --zero-service", "--json"]),
        ("--zero-service --html OUT", 2, &["--html cannot be used with --zero-service"]),
        ("--zero-service --svg OUT", 2, &["--svg cannot be used with --zero-service"]),
        ("--zero-service --record OUT", 2, &["--record cannot be used with --zero-service"]),
        ("--zero-service --beside sjf", 2, &["--beside cannot be used with --zero-service"]),
        ("--zero-service --trace GOOD --policy mru", 2, &["mru", "lru"]),
        ("--zero-service --trace AZURE", 1, &["request 0 has no content", "Mooncake"]),
        ("--zero-service --trace GOOD --block-tokens 300", 1, &["300", "512"]),
        ("--touch-order forward", 2, &["--zero-service"]),
        ("--html NOFOLDER", 1, &["cannot write", "good.jsonl"]),
        ("--svg NOFOLDER", 1, &["cannot make the folder", "good.jsonl"]),
        ("sweep", 2, &["--out"]),
        ("sweep --out OUT --policies lru,mru", 2, &["mru", "lfu"]),
        ("sweep --out OUT --policies lru,opt", 2, &["opt", "future"]),
        ("sweep --out OUT --schedules fcfs,lottery", 2, &["lottery", "srpt"]),
        ("sweep --out OUT --capacities 5,x", 2, &["`x` is not a number of blocks"]),
        ("sweep --out OUT --capacities 5,4000000000", 2, &["--capacity-blocks 4000000000"]),
        ("sweep --out OUT --seeds 0", 2, &["0"]),
        ("arena", 2, &["--capacity-blocks"]),
        ("arena --capacity-blocks 0", 2, &["0 blocks of 16 tokens", "give 1 to"]),
        ("arena --capacity-blocks 9 --layouts slab", 2, &["no layout `slab`", "first_fit, buddy, paged"]),
        ("arena --capacity-blocks 9 --trace MISSING", 1, &["missing.jsonl", "cannot read it"]),
        ("--seeds 1", 2, &["--seeds"]),
        ("--seeds 3 --record OUT", 2, &["--seeds", "--record"]),
        ("--seeds 3 --trace MISSING", 2, &["--seeds", "--trace"]),
        ("sweep --out OUT --zero-service --schedules sjf", 2, &["--schedules cannot be used"]),
        ("sweep --out OUT --trace MISSING", 1, &["missing.jsonl", "cannot read it"]),
    ];
    let mut bad = Vec::new();
    for (args, status, words) in rows {
        let args: Vec<&str> = args
            .split(' ')
            .map(|arg| names.iter().find(|(name, _)| *name == arg).map_or(arg, |(_, path)| path))
            .collect();
        let out = run(&[&["simulate"], &args[..]].concat(), b"");
        bad.extend(judge(&args.join(" "), &out, *status, words));
    }
    assert!(bad.is_empty(), "{} of {} rows:\n{}", bad.len(), rows.len(), bad.join("\n"));
    let out = Path::new(&names.iter().find(|(name, _)| *name == "OUT").unwrap().1).to_owned();
    assert!(!out.exists(), "what is refused leaves nothing behind");
}

/// Bad rows are counted, and the first ones are reported.
#[test]
fn leniently() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.jsonl");
    let row = "{\"timestamp\":0,\"input_length\":600,\"output_length\":2,\"hash_ids\":[1,2]}\n";
    std::fs::write(&path, [row, "{}\n", row].concat()).unwrap();
    let (stdout, stderr) =
        succeed(&["simulate", "--lenient", "--json", "--trace", &path.display().to_string()]);
    let report: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(report["requests"]["finished"], 2);
    assert!(stderr.contains("1 rows were skipped") && stderr.contains("line 2"), "{stderr}");
}

/// A policy without anything to rank by warns that it behaves as first come, first served.
#[test]
fn policies_without_deadlines_are_remarked_on() {
    let drawn = ["simulate", "--requests", "20", "--schedule", "edf"];
    let (_, stderr) = succeed(&drawn);
    assert!(stderr.contains("no request has a deadline") && stderr.contains("--deadline"), "{stderr}");
    let report = json(&[&drawn[..], &["--deadline", "1ms", "--json"]].concat());
    assert_eq!(report["requests"]["late"], report["requests"]["finished"]);
    let (_, stderr) = succeed(&[&drawn[..], &["--deadline", "1ms"]].concat());
    assert!(!stderr.contains("no request has a deadline"), "{stderr}");
}
