//! Trace readers: published formats, errors in files, and random bytes.
use flate2::{Compression, write::GzEncoder};
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Prompt, Vocabulary};
use kvist_simulator::cost::ConstantRates;
use kvist_simulator::report::RequestOutcome;
use kvist_simulator::request::Request;
use kvist_simulator::run::{Options, run};
use kvist_simulator::trace::{Format, ReadOptions, Trace, TraceError, write};
use kvist_simulator::zero_service::BlockStream;
use kvist_testing::SplitMix64;
use std::io::Write;
use std::path::{Path, PathBuf};

const MOONCAKE: &str = r#"{"timestamp": 3000, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 3000, "input_length": 512, "output_length": 5, "hash_ids": [46]}
{"timestamp": 9000, "input_length": 1, "output_length": 1, "hash_ids": [18446744073709551615]}
"#;
const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109";
const BURSTGPT: &str =
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,s1,1.5,ChatGPT,472,18,490,Conversation log
45.5,,2,GPT-4,0,0,0,API log
118,s1,3,ChatGPT,500,276,776,\"Conversation log\"
";
const BAILIAN: &str = r#"{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 40, "output_length": 80, "type": "text", "turn": 2, "hash_ids": [1, 2]}
{"chat_id": 161, "parent_chat_id": 7, "timestamp": 61.5, "input_length": 16, "output_length": 16, "type": "file", "turn": 3, "hash_ids": [9, 10]}
"#;
const NATIVE: &str = r#"{"format":"kvist-trace","version":1}
{"id":7,"arrival_ns":5,"prompt_tokens":3,"output_tokens":2,"tokens":[1,2,3,4],"salt":"a","priority":-3}
{"id":3,"arrival_ns":0,"prompt_tokens":33,"output_tokens":4,"ids":[5,6,7],"tokens_per_id":16,"known_tokens":35,"deadline_ns":9,"parent":7,"think_ns":1000}
"#;
const SAMPLES: [(&str, Format); 5] = [
    (MOONCAKE, Format::Mooncake),
    (AZURE, Format::Azure),
    (BURSTGPT, Format::BurstGpt),
    (BAILIAN, Format::Bailian),
    (NATIVE, Format::Native),
];

fn read_with(bytes: &[u8], options: ReadOptions) -> Result<Trace, TraceError> {
    Trace::read_from("trace", bytes, &options)
}
fn read(text: &str) -> Result<Trace, TraceError> {
    read_with(text.as_bytes(), ReadOptions::default())
}
fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

#[test]
fn every_format_is_recognised_and_can_be_forced() {
    for (text, format) in SAMPLES {
        let trace = read(text).unwrap();
        assert_eq!(trace.format, format);
        assert_eq!(Format::by_name(format.name()), Some(format));
        let forced = read_with(text.as_bytes(), ReadOptions { format: Some(format), ..Default::default() });
        assert_eq!(forced.unwrap(), trace, "{format:?}");
    }
}

#[test]
fn mooncake() {
    let requests = read(MOONCAKE).unwrap().requests;
    let facts: Vec<_> =
        requests.iter().map(|r| (r.id, r.arrival_ns, r.prompt_tokens, r.output_tokens)).collect();
    assert_eq!(facts, [(0, 0, 600, 52), (1, 0, 512, 5), (2, 6_000_000_000, 1, 1)]);
    assert_eq!(requests[0].content.ids(600), Some(&[46, 47][..]));
    assert_eq!(requests[2].content.ids(1), Some(&[u64::MAX][..]));
}

#[test]
fn azure() {
    let requests = read(AZURE).unwrap().requests;
    assert_eq!(requests.len(), 2, "the last line has no end");
    assert_eq!((requests[0].arrival_ns, requests[1].arrival_ns), (0, 4_314_579_000));
    assert_eq!(requests[1].content, Prompt::Unknown);
    assert_eq!((requests[1].prompt_tokens, requests[1].output_tokens), (396, 109));

    let excerpt = Trace::read(&data("azure_conv.csv"), &ReadOptions::default()).unwrap();
    assert_eq!((excerpt.format, excerpt.requests.len()), (Format::Azure, 60));
}

#[test]
fn burstgpt() {
    let trace = read(BURSTGPT).unwrap();
    assert_eq!((trace.requests.len(), trace.failed_rows), (2, 1));
    assert_eq!((trace.requests[1].id, trace.requests[1].arrival_ns), (1, 113_000_000_000));
    assert_eq!(trace.requests[1].parent, None);
    let followed =
        read_with(BURSTGPT.as_bytes(), ReadOptions { follow_parents: true, ..Default::default() }).unwrap();
    assert_eq!(followed.requests[1].parent, Some(0));
    // Older releases have fewer columns.
    let old =
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,x\n";
    assert_eq!(read(old).unwrap().requests.len(), 1);
}

#[test]
fn bailian() {
    let trace = read(BAILIAN).unwrap();
    let arrivals: Vec<_> = trace.requests.iter().map(|r| r.arrival_ns).collect();
    assert_eq!(arrivals, [0, 1_386_000_000, 386_000_000]);
    // Three ids for 33 tokens: the whole prompt. Two for 40: its last block has none, and gets one. Two for 16: the output too.
    let known: Vec<_> = trace.requests.iter().map(|r| r.content.known_tokens()).collect();
    assert_eq!(known, [33, 40, 32]);
    assert_eq!(trace.requests[1].content.ids(40), Some(&[1, 2, u64::MAX - 1][..]));
    assert!(trace.requests.iter().all(|r| r.parent.is_none()));
    let order: Vec<_> = trace.into_arrival_order().iter().map(|r| r.id).collect();
    assert_eq!(order, [0, 2, 1]);

    let followed =
        read_with(BAILIAN.as_bytes(), ReadOptions { follow_parents: true, ..Default::default() }).unwrap();
    let parents: Vec<_> = followed.requests.iter().map(|r| r.parent).collect();
    assert_eq!(parents, [None, Some(0), None], "chat 7 began before the trace did");
}

/// The publishers may leave out the id of a partial last block. Such a prompt was known only in part, and the scheduler
/// refused every one of them as malformed; zero service had no content for it.
#[test]
fn a_prompt_without_an_id_for_its_last_tokens_is_served() {
    let row = |chat: u32, input: u32, ids: &str| {
        format!(
            r#"{{"chat_id": {chat}, "parent_chat_id": -1, "timestamp": {chat}, "input_length": {input}, "output_length": 2, "hash_ids": [{ids}]}}"#
        )
    };
    let text = [row(1, 40, "1, 2"), row(2, 40, "1, 2"), row(3, 7, ""), row(4, 7, "")].join("\n");
    let requests = read(&text).unwrap().requests;
    let group = GroupSpec { capacity_tokens: 1024, visibility: Visibility::FULL, max_step_tokens: 1024 };
    let prefix =
        Some(PrefixSpec { vocabulary: Vocabulary::Ids { tokens_per_id: 16 }, ..PrefixSpec::default() });
    let spec = PagedSpec { block_tokens: 16, groups: vec![group], rollback_tokens: 0, prefix };
    let cost = ConstantRates::new(1.0, 1.0).unwrap();
    let cache = Cache::paged(&spec).unwrap();
    let record = run(&requests, cache, &cost, &Options::default(), None, &mut |_| {}).unwrap().record;
    let served: Vec<_> = record.requests.iter().map(|row| (row.outcome, row.hit_tokens)).collect();
    let finished = RequestOutcome::Finished;
    assert_eq!(served, [(finished, 0), (finished, 32), (finished, 0), (finished, 0)]);

    let stream = BlockStream::of(&requests, None).unwrap();
    assert_eq!((stream.total_blocks(), stream.distinct_blocks()), (8, 6), "only the whole blocks are shared");
}

#[test]
fn our_own_format_comes_back_as_it_went() {
    let trace = read(NATIVE).unwrap();
    assert_eq!(trace.requests[1].parent, Some(7));
    assert_eq!(trace.requests[0].salt(), "a");
    for (text, _) in SAMPLES {
        let requests = read_with(text.as_bytes(), ReadOptions { follow_parents: true, ..Default::default() })
            .unwrap()
            .requests;
        let requests: Vec<Request> = requests
            .into_iter()
            .map(|r| Request { parent: r.parent.filter(|_| text != BAILIAN), ..r })
            .collect();
        let mut bytes = Vec::new();
        write(&mut bytes, &requests).unwrap();
        assert_eq!(read_with(&bytes, ReadOptions::default()).unwrap().requests, requests);
    }
}

#[test]
fn compressed_files_are_recognised() {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(MOONCAKE.as_bytes()).unwrap();
    let mut gzip = gzip.finish().unwrap();
    // Two consecutive gzip members form one text (RFC 1952, 2.2).
    let mut second = GzEncoder::new(Vec::new(), Compression::default());
    second.write_all(MOONCAKE.as_bytes()).unwrap();
    gzip.extend(second.finish().unwrap());
    assert_eq!(read_with(&gzip, ReadOptions::default()).unwrap().requests.len(), 6);
    gzip.truncate(gzip.len() / 3);
    assert!(matches!(read_with(&gzip, ReadOptions::default()), Err(TraceError::Io { .. })));

    let zstd = std::fs::read(data("conversation_trace.jsonl.zst")).unwrap();
    let first = ReadOptions { limit: Some(100), ..Default::default() };
    assert_eq!(read_with(&zstd, first).unwrap().requests.len(), 100);
    // A skippable frame (RFC 8878, 3.1.2), then the frame, then the frame again.
    let twice: Vec<u8> = [&zstd[..], &[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3], &zstd[..]].concat();
    assert_eq!(read_with(&twice, ReadOptions::default()).unwrap().requests.len(), 2 * 12_031);
    let error = read_with(&zstd[..zstd.len() - 100], ReadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("zstd data are damaged"), "{error}");
}

#[test]
fn ties_keep_file_order() {
    let trace = Trace::read(&data("conversation_trace.jsonl.zst"), &ReadOptions::default()).unwrap();
    let mut times: Vec<u64> = trace.requests.iter().map(|r| r.arrival_ns).collect();
    times.dedup();
    assert_eq!((trace.requests.len(), times.len()), (12_031, 1_180));
    let order = trace.clone().into_arrival_order();
    assert_eq!(order, trace.requests, "the file is in order, so sorting changes nothing");
}

/// (text, expected error message)
#[test]
fn what_is_wrong_is_said() {
    let row = MOONCAKE.lines().next().unwrap();
    let mooncake = |from: &str, to: &str| format!("{row}\n{}\n", row.replacen(from, to, 1));
    let azure = |line: &str| format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{line}\n");
    let native = |from: &str, to: &str| NATIVE.replacen(from, to, 1);
    let bad: Vec<(String, &str)> = vec![
        (mooncake("3000", "-3"), "trace, line 2: field `timestamp`: found \"-3\"; expected milliseconds"),
        (mooncake("3000", "1e300"), "field `timestamp`: found 1000000"),
        (mooncake("600", "0"), "field `input_length`: found 0; expected a whole number from 1"),
        (mooncake("600", "6e9"), "field `input_length`: found \"6000000000.0\""),
        (mooncake("52", "\"52\""), "field `output_length`: found \"\\\"52\\\"\""),
        (
            mooncake("[46, 47]", "[46]"),
            "field `hash_ids`: found 1 ids; expected 2, one per 512 of the 600 tokens",
        ),
        (mooncake("[46, 47]", "[46, -47]"), "field `hash_ids`: found \"[46,-47]\""),
        (mooncake("hash_ids", "hashes"), "field `hash_ids`: found nothing"),
        (format!("{row}\n{}", &row[..50]), "line 2: field `(row)`"),
        (format!("{row}\n[1, 2]"), "expected one JSON object per line; fix the row, or read leniently"),
        (azure("2023-11-16 25:15:46.6805900,374,44"), "line 2: field `TIMESTAMP`"),
        (azure("2023-11-16 18:15:46.6805900,374"), "found 2 values in"),
        (azure("2023-11-16 18:15:46.6805900,374.5,44"), "field `ContextTokens`: found \"374.5\""),
        (azure("2023-11-16 18:15:46.6805900,374,-1"), "field `GeneratedTokens`"),
        (azure("2023-11-16 18:15:46.6805900,374,0"), "field `GeneratedTokens`: found 0"),
        (azure(""), "trace: no request in it"),
        (BURSTGPT.replace("45.5", "soon"), "line 3: field `Timestamp`: found \"soon\"; expected seconds"),
        (BURSTGPT.replace("472", "0"), "line 2: field `Request tokens`: found 0"),
        (BURSTGPT.replace("Response tokens", "Answer"), "line 1: field `Response tokens`"),
        (BAILIAN.replace("[1, 2]", "[1]"), "field `hash_ids`: found 1 ids; expected 2 to 8"),
        (
            BAILIAN.replace("\"parent_chat_id\": 159", "\"parent\": 159"),
            "field `parent_chat_id`: found nothing",
        ),
        (native("\"version\":1", "\"version\":2"), "line 1: field `version`: found 2; expected 1"),
        (native("\"id\":3", "\"id\":7"), "line 3: field `id`: found 7"),
        (native("\"parent\":7", "\"parent\":8"), "field `parent`: found 8"),
        (native("[1,2,3,4]", "[1,2]"), "field `tokens`: found 2 tokens; expected content of 3 to 5"),
        (native("[5,6,7]", "[5,6]"), "field `ids`: found 2 ids; expected 3"),
        (native(",\"tokens_per_id\":16", ""), "field `tokens_per_id`: found nothing"),
        (native("\"salt\"", "\"sult\""), "unknown field `sult`"),
        (native("\"priority\":-3", "\"priority\":3000000000"), "field `priority`"),
        ("hello\n".into(), "unknown trace format: the first line is \"hello\""),
        ("".into(), "trace: no request in it: it is empty"),
        ("\n\n".into(), "trace: no request in it: it is empty"),
    ];
    let mut wrong = Vec::new();
    for (text, says) in &bad {
        match read(text) {
            Ok(_) => wrong.push(format!("accepted: {text}")),
            Err(error) if !error.to_string().contains(says) => {
                wrong.push(format!("{error}\n   is not: {says}"))
            }
            Err(_) => {}
        }
    }
    let latin = [MOONCAKE.as_bytes(), b"caf\xe9\n"].concat();
    let error = read_with(&latin, ReadOptions::default()).unwrap_err().to_string();
    if !error.contains("line 4: field `(line)`: found bytes that are not UTF-8 at byte 3") {
        wrong.push(error);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let missing = Trace::read(Path::new("no/such/file"), &ReadOptions::default()).unwrap_err();
    assert!(missing.to_string().starts_with("no/such/file: cannot read it: "), "{missing}");
}

#[test]
fn lenient_readers_count() {
    let row = MOONCAKE.lines().next().unwrap();
    let bad = row.replace("600", "700000");
    let text = [row, &bad, row, "{", &bad, &bad, &bad, &bad, row].join("\n");
    let trace = read_with(text.as_bytes(), ReadOptions { lenient: true, ..Default::default() }).unwrap();
    assert_eq!((trace.requests.len(), trace.skipped.rows, trace.skipped.first.len()), (3, 6, 5));
    assert_eq!(trace.requests[2].id, 2, "ids have no gaps");
    assert!(trace.skipped.first[0].starts_with("trace, line 2: field `hash_ids`"), "{:?}", trace.skipped);
    assert!(!trace.skipped.first[0].contains("leniently"), "no advice that is taken already");
    let none = read_with(
        format!("{row}\n").replace("52", "0").as_bytes(),
        ReadOptions { lenient: true, ..Default::default() },
    );
    assert!(none.unwrap_err().to_string().contains("1 were skipped, the first because of"));
}

#[test]
fn limits() {
    for (limit, n) in [(1, 1), (2, 2), (3, 3), (100, 3)] {
        let options = ReadOptions { limit: Some(limit), ..Default::default() };
        assert_eq!(read_with(MOONCAKE.as_bytes(), options).unwrap().requests.len(), n);
    }
    let options = ReadOptions { limit: Some(0), ..Default::default() };
    assert!(matches!(read_with(MOONCAKE.as_bytes(), options), Err(TraceError::Empty { .. })));
}

/// An overlong line is refused before it fills the memory, and the next line is still read.
#[test]
fn endless_lines() {
    let text = [MOONCAKE, &"x".repeat((32 << 20) + 10), "\n", MOONCAKE].concat();
    let trace = read_with(text.as_bytes(), ReadOptions { lenient: true, ..Default::default() }).unwrap();
    assert_eq!((trace.requests.len(), trace.skipped.rows), (6, 1));
    assert!(trace.skipped.first[0].contains("more than 32 MiB"), "{:?}", trace.skipped);
}

/// Changes, removes and duplicates bytes, and inserts values that are likely to cause trouble.
fn mutate(bytes: &mut Vec<u8>, random: &mut SplitMix64) {
    const HURTFUL: [&str; 16] = [
        "-1",
        "0",
        "18446744073709551616",
        "1e999",
        "null",
        "{}",
        "[]",
        "\"",
        ",",
        "\n",
        "\u{feff}",
        "\u{0}",
        "é",
        "9999-99-99 99:99:99.999999999",
        "4294967296",
        "NaN",
    ];
    for _ in 0..1 + random.index(4) {
        let at = random.index(bytes.len() + 1);
        let end = (at + random.index(12)).min(bytes.len());
        match random.index(4) {
            0 if at < bytes.len() => bytes[at] = random.next() as u8,
            1 => drop(bytes.drain(at..end)),
            2 => {
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            _ => drop(bytes.splice(at..end, HURTFUL[random.index(HURTFUL.len())].bytes())),
        }
    }
}

/// Whatever the file was, the result must be a valid trace.
fn check(bytes: &[u8], options: ReadOptions) {
    let Ok(trace) = read_with(bytes, options) else { return };
    assert!(!trace.requests.is_empty());
    for (i, request) in trace.requests.iter().enumerate() {
        assert!(request.prompt_tokens > 0 && request.output_tokens > 0, "{request:?}");
        assert!(i64::try_from(request.arrival_ns).is_ok(), "{request:?}");
        assert!(u64::from(request.content.known_tokens()) <= request.total_tokens(), "{request:?}");
        if let Prompt::Ids { tokens_per_id, n_tokens, .. } = &request.content {
            let n = request.content.ids(*n_tokens).map(<[u64]>::len);
            assert_eq!(n, Some(n_tokens.div_ceil(*tokens_per_id) as usize), "{request:?}");
        }
        if let Some(parent) = request.parent {
            assert!(trace.requests[..i].iter().any(|r| r.id == parent), "{request:?}");
        }
    }
}

/// 100,000 malformed files: mutated rows of every format, and plain noise. None makes a reader panic.
#[test]
fn no_file_makes_a_reader_panic() {
    for case in 0..100_000u64 {
        let mut random = SplitMix64(case);
        let (text, format) = SAMPLES[random.index(SAMPLES.len())];
        let mut bytes = text.as_bytes().to_vec();
        if case % 10 == 0 {
            bytes = (0..random.index(80)).map(|_| random.next() as u8).collect();
        } else {
            mutate(&mut bytes, &mut random);
        }
        let options = ReadOptions {
            format: (random.index(3) > 0).then_some(format),
            lenient: random.index(2) == 0,
            follow_parents: random.index(2) == 0,
            limit: None,
        };
        let outcome = std::panic::catch_unwind(|| check(&bytes, options));
        assert!(outcome.is_ok(), "case {case}, {options:?}: {:?}", String::from_utf8_lossy(&bytes));
    }
}

/// The same for compressed files with damage that a decoder hits.
#[test]
fn no_compressed_file_makes_a_reader_panic() {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(MOONCAKE.repeat(20).as_bytes()).unwrap();
    let gzip = gzip.finish().unwrap();
    // `zstd -19` of MOONCAKE three times over.
    let zstd = include_bytes!("../data/small.jsonl.zst");
    assert_eq!(read_with(zstd, ReadOptions::default()).unwrap().requests.len(), 9);
    for case in 0..20_000u64 {
        let mut random = SplitMix64(case);
        let mut bytes = if case % 2 == 0 { gzip.clone() } else { zstd.to_vec() };
        mutate(&mut bytes, &mut random);
        let outcome =
            std::panic::catch_unwind(|| check(&bytes, ReadOptions { lenient: true, ..Default::default() }));
        assert!(outcome.is_ok(), "case {case}: {bytes:02x?}");
    }
}

/// Reads the whole published files from a folder: `KVIST_TRACES=DIR cargo test`.
#[test]
fn whole_traces() {
    let Some(folder) = std::env::var_os("KVIST_TRACES") else {
        eprintln!("skipped: KVIST_TRACES names no folder with traces");
        return;
    };
    for (name, format, n) in [
        ("conversation_trace.jsonl", Format::Mooncake, 12_031),
        ("synthetic_trace.jsonl", Format::Mooncake, 3_993),
        ("AzureLLMInferenceTrace_conv.csv", Format::Azure, 19_366),
        ("AzureLLMInferenceTrace_code.csv", Format::Azure, 8_819),
    ] {
        let trace = Trace::read(&Path::new(&folder).join(name), &ReadOptions::default()).unwrap();
        assert_eq!((trace.format, trace.requests.len()), (format, n), "{name}");
    }
}

/// An error in a row of millions of ids is reported in one line that names the field.
#[test]
fn a_huge_row_that_is_wrong() {
    let ids = "4294967296,".repeat(300_000);
    let row = |field: &str, last: &str| {
        format!(
            "{{\"format\":\"kvist-trace\",\"version\":1}}\n{{\"id\":0,\"arrival_ns\":0,\"prompt_tokens\":5,\"output_tokens\":5,\"{field}\":[{ids}{last}]}}\n"
        )
    };
    for (field, last, says) in [
        ("ids", "-1", "field `ids`: found"),
        ("ids", "1.5", "field `ids`: found"),
        ("tokens", "7", "field `tokens`: found"),
        ("fishes", "7", "field `(row)`: found"),
    ] {
        let error = Trace::read_from("t", row(field, last).as_bytes(), &ReadOptions::default()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(says) && error.contains("line 2") && error.len() < 500, "{error}");
    }
}
