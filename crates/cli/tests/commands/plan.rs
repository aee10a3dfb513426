//! `kvist plan --memory`: the recommended cache is the best that fits, and the printed command line makes that cache.
use crate::program::*;
use serde_json::Value;

fn candidates<'a>(plan: &'a Value, command: &str) -> Vec<&'a Value> {
    let all = plan["recommendation"]["candidates"].as_array().unwrap();
    all.iter().filter(|row| row["command"] == command).collect()
}
fn parity(case: &str) -> String {
    fixtures().join("parity").join(case).join("config.json").display().to_string()
}
fn plan(memory: &str, more: &[&str]) -> Value {
    json(&[&["plan", "--json", "--memory", memory], more].concat())
}

/// The words of a printed command line, without the program's name.
fn words(line: &Value) -> Vec<&str> {
    let line = line.as_str().unwrap();
    line.strip_prefix("kvist ").unwrap_or_else(|| panic!("{line}")).split(' ').collect()
}

/// Checks the choice against the report's own figures, at memory sizes from "too small for f16" upwards.
#[test]
fn the_least_kl_that_fits_is_recommended() {
    let all = plan("1TiB", &["--context", "1k"]);
    let mut sizes: Vec<u64> = [candidates(&all, "run"), candidates(&all, "serve")]
        .concat()
        .into_iter()
        .map(|row| number(row, "total_bytes") as u64)
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    assert!(sizes.len() >= 10, "{sizes:?}: five pairs of dtypes at least, in a session and in a server");
    for memory in sizes {
        let plan = plan(&memory.to_string(), &["--context", "1k"]);
        for command in ["run", "serve"] {
            let rows = candidates(&plan, command);
            for row in &rows {
                assert_eq!(row["fits"] == true, number(row, "total_bytes") <= memory as f64, "{row}");
                assert_eq!(row["fits"] == true, number(row, "context_fits_tokens") >= 1024.0, "{row}");
            }
            let fits = rows.iter().filter(|row| row["fits"] == true);
            let best = fits.map(|row| number(row, "kl_mean")).reduce(f64::min);
            let pick = &plan["recommendation"][command];
            assert_eq!(pick["kl_mean"].as_f64(), best, "{memory}: {pick}");
            assert!(pick.is_null() || number(pick, "total_bytes") <= memory as f64, "{pick}");
        }
        // The plan is for the recommended cache.
        let pick = &plan["recommendation"]["run"];
        assert_eq!(
            (&plan["cache"]["kind"], &plan["cache"]["k"], &plan["cache"]["v"], &plan["bound"]["total"]),
            (&pick["kind"], &pick["k"], &pick["v"], &pick["total_bytes"])
        );
    }
    let f16 = &all["recommendation"]["run"];
    assert_eq!((&f16["kind"], &f16["k"], &f16["v"]), (&"contiguous".into(), &"f16".into(), &"f16".into()));
}

#[test]
fn what_is_to_be_pasted_makes_the_cache_that_was_planned() {
    let all = plan("1TiB", &["--context", "1k", "--chunk", "32"]);
    let totals = candidates(&all, "run");
    let kind = |row: &&&Value| row["kind"] == "contiguous";
    for row in totals.iter().filter(kind) {
        let memory = row["total_bytes"].to_string();
        let plan = plan(&memory, &["--context", "1k", "--chunk", "32"]);
        let pick = &plan["recommendation"]["run"];
        let run =
            json(&[&words(&pick["command_line"])[..], &["--json", "-n", "4", "The borrow checker"]].concat());
        assert_eq!((&run["bound"], &run["cache"]), (&plan["bound"], &plan["cache"]));
        assert!(number(&run, "used.total") <= number(row, "total_bytes"));
    }
    // A server's total includes its requests, and it starts with that memory.
    let min = candidates(&all, "serve").iter().map(|row| number(row, "total_bytes") as u64).min().unwrap();
    let tight = plan(&min.to_string(), &["--context", "1k"]);
    let pick = &tight["recommendation"]["serve"];
    let serve = json(&[&words(&pick["command_line"])[..], &["--dry-run", "--json"]].concat());
    assert_eq!(serve["total_bytes"], pick["total_bytes"]);
    assert_eq!((&serve["k"], &serve["v"], &serve["cache_tokens"]), (&pick["k"], &pick["v"], &1024.into()));
}

#[test]
fn the_longest_context_that_fits_does_and_no_longer_one() {
    let all = plan("16MiB", &["--context", "1000"]);
    let row = candidates(&all, "run")[0];
    let fits = number(row, "context_fits_tokens") as u64;
    assert!(row["fits"] == false && fits > 0 && fits.is_multiple_of(64), "{row}");
    // A context that fits is accepted, also if it is not a multiple of 64.
    let tight = plan(&row["total_bytes"].to_string(), &["--context", "1000"]);
    let row = candidates(&tight, "run")[0];
    assert_eq!((&row["fits"], &row["context_fits_tokens"]), (&true.into(), &1000.into()), "{row}");
    let at = |context: u64| {
        let context = context.to_string();
        run(&["plan", "--memory", "16MiB", "--kind", "contiguous", "--context", &context], b"").status.code()
    };
    assert_eq!((at(fits), at(fits + 64)), (Some(0), Some(1)), "{row}");
}

#[test]
fn people_see_a_table_and_lines_to_paste() {
    let (text, _) = succeed(&["plan", "--memory", "1GB", "--context", "1k"]);
    for words in [
        "kvist run --kind contiguous or cells or tree or paged\n",
        "kvist serve, its requests included\n",
        "longest context",
        "KL SmolLM2 135M",
        "not of this model (that is --measure): measured on SmolLM2 135M and Gemma 3 270M, 2,048 tokens",
        "run it           kvist run --memory 1GB --kind contiguous --kv f16 --context 1024\n",
        "serve it         kvist serve --memory 1GB --kv f16 --context 1024\n",
    ] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    assert!(!text.contains("ring"), "this model has no window: {text}");
    // A server may not fit although a session does.
    let (text, _) = succeed(&["plan", "--memory", "100MB", "--context", "1k"]);
    assert!(text.contains("serve it         does not fit"), "{text}");
    // A chosen kind or dtype is planned without a recommendation.
    for chosen in [["--kv", "q8"], ["--kv-v", "q8"], ["--kind", "cells"]] {
        let one = plan("1GB", &chosen);
        assert!(one.get("recommendation").is_none(), "{one}");
    }
}

/// A config.json is enough; a model with windows can use a ring.
#[test]
fn a_ring_is_recommended_where_it_alone_lets_a_better_dtype_fit() {
    for case in ["mistral-window", "qwen2-window-mixed"] {
        let config = parity(case);
        let all = plan("1TiB", &["--model", &config, "--chunk", "4"]);
        assert_eq!(all["recommendation"]["run"]["kind"], "contiguous", "the simplest of equals");
        let f16 = |kind: &str| {
            let rows = candidates(&all, "run").into_iter();
            let row = rows.into_iter().find(|row| row["kind"] == kind && row["k"] == "f16");
            row.unwrap_or_else(|| panic!("no {kind} in {all}")).clone()
        };
        let (ring, contiguous) = (f16("ring"), f16("contiguous"));
        assert!(number(&ring, "total_bytes") < number(&contiguous, "total_bytes"));
        let memory = ring["total_bytes"].to_string();
        let tight = plan(&memory, &["--model", &config, "--chunk", "4"]);
        let pick = &tight["recommendation"]["run"];
        assert_eq!((&pick["kind"], &pick["k"]), (&"ring".into(), &"f16".into()), "{pick}");
        // In the folder where the weights belong, the printed command line makes the same cache.
        let mut args = words(&pick["command_line"]);
        args[0] = "plan";
        let same = json(&[&args[..], &["--json"]].concat());
        assert_eq!(
            (&same["bound"]["kv_cache"], &same["cache"]),
            (&tight["bound"]["kv_cache"], &tight["cache"])
        );
    }
}

#[test]
fn where_nothing_fits_it_says_what_would() {
    let out = run(&["plan", "--memory", "9MiB", "--context", "4k"], b"");
    let said = String::from_utf8(out.stderr).unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("nothing fits: the least is") && said.contains("9 MiB are available"), "{said}");
    assert!(text.contains("longest context") && !text.contains("run it"), "{text}");
    let advice = said.split("try ").nth(1).unwrap().split([',', '\n']).next().unwrap();
    let advice: Vec<&str> = advice.split_whitespace().collect();
    assert!(advice.contains(&"--context"), "{said}");
    succeed(&[&["run", "--memory", "9MiB", "-n", "2"], &advice[..], &["a"]].concat());
    // The weights do not fit either.
    let out = run(&["plan", "--json", "--memory", "1MiB"], b"");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("a smaller model") && !said.contains("--context"), "{said}");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(report["recommendation"]["run"].is_null() && report["recommendation"]["serve"].is_null());
    let folder = fixtures().join("parity/llama-gqa").display().to_string();
    let out = run(&["plan", "--model", &folder, "--memory", "1KiB"], b"");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(said.contains("--weights q8_0"), "these are f32: {said}");
}

#[test]
fn a_measured_plan_goes_by_what_this_model_loses() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    std::fs::write(
        &file,
        "A struct groups values of several types under one name, and an enum is one of several. The compiler checks \
         that every reference is valid for as long as it is used, and that no two of them change the same value. A \
         trait says what a type can do, and a function that is generic over it can be called with any such type.",
    )
    .unwrap();
    let file = file.display().to_string();
    let measured = plan("1GB", &["-q", "--context", "1k", "--measure", "48", "--text", &file]);
    let kl = &measured["recommendation"]["kl"];
    assert_eq!((&kl["of_this_model"], kl["models"].as_array().unwrap().len()), (&true.into(), 1));
    assert!(kl["measured_on"].as_str().unwrap().contains("weights held as f32"), "{kl}");
    assert_eq!(measured["recommendation"]["run"]["k"], "f16");
    // The figures are those of `eval`.
    std::fs::write(folder.path().join("cut.txt"), "").unwrap();
    for row in candidates(&measured, "run").into_iter().filter(|row| row["kind"] == "contiguous") {
        let (k, v) = (row["k"].as_str().unwrap(), row["v"].as_str().unwrap());
        let dtypes = ["--kv", k, "--kv-v", v, "--weights", "f32", "--context", "49", "--limit", "48"];
        let eval = json(&[&["eval", "-q", "--json", "--text", &file], &dtypes[..]].concat());
        assert_eq!((&row["kl_mean"], &eval["tokens"]), (&eval["kl_mean"], &48.into()), "{row}");
    }
    let (text, _) = succeed(&["plan", "-q", "--memory", "1GB", "--context", "1k", "--measure", "8"]);
    assert!(
        text.contains("measured here") && text.contains("8 tokens of the embedded model's held-out text"),
        "{text}"
    );
}

/// The tiers of a plan are those of a server that is started with the same flags, to the byte.
#[test]
fn tiers_are_planned_as_a_server_has_them() {
    let dry_run = |args: &[&str]| json(&[&["serve", "--dry-run", "--json"], args].concat());
    let cache = ["--context", "1k", "--kv", "q8"];
    let mut of_ram = 0.0;
    for tiers in [&["--tier-ram", "1GiB"][..], &["--tier-ram", "64MiB", "--tier-write", "back"]] {
        let flags = [&cache[..], tiers].concat();
        let plan = json(&[&["plan", "--json"], &flags[..]].concat());
        let serve = dry_run(&flags);
        assert_eq!(plan["cache"]["kind"], "paged", "{plan}");
        assert_eq!((&plan["tier_bytes"], &plan["tier_disk_bytes"]), (&serve["tier_bytes"], &Value::Null));
        of_ram = number(&plan, "tier_bytes");
        let line = |text: &str| text.lines().find(|line| line.starts_with("tiers")).map(str::to_owned);
        let (text, _) = succeed(&[&["plan"], &flags[..]].concat());
        let (served, _) = succeed(&[&["serve", "--dry-run"], &flags[..]].concat());
        assert!(line(&text).is_some_and(|line| line.contains("of RAM, written")), "{text}");
        assert_eq!(line(&text), line(&served));
        assert!(text.contains("with the tiers"), "{text}");
    }
    assert!(of_ram > f64::from(64 << 20), "what is on its way takes memory too: {of_ram}");

    // A chosen cache fits with its tiers, or is refused with what they take.
    let flags = [&cache[..], &["--tier-ram", "64MiB"]].concat();
    let bound = number(&json(&[&["plan", "--json"], &flags[..]].concat()), "bound.total");
    let at = |memory: f64| {
        let memory = memory.to_string();
        run(&[&["plan", "--memory", &memory], &flags[..]].concat(), b"")
    };
    assert_eq!(at(bound + of_ram).status.code(), Some(0));
    let refused = at(bound + of_ram - 1.0);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("the tiers take") && said.contains("--tier-ram"), "{said}");

    let (text, _) = succeed(&["plan", "--context", "1k"]);
    assert!(!text.contains("tier"), "{text}");
}

#[test]
fn a_recommended_server_has_the_tiers_that_were_asked_for() {
    let all = plan("1TiB", &["--context", "1k", "--tier-ram", "64MiB", "--tier-grace", "2s"]);
    let without = plan("1TiB", &["--context", "1k"]);
    let totals = |plan: &Value, command: &str| -> Vec<f64> {
        candidates(plan, command).iter().map(|row| number(row, "total_bytes")).collect()
    };
    let tiers = number(&all, "tier_bytes");
    // Writes in flight and lookups of prompts are counted by their number: a packed cache has more of them.
    for (all, without) in totals(&all, "serve").into_iter().zip(totals(&without, "serve")) {
        let more = all - without;
        assert!(
            more > 64.0 * 1048576.0 && (more - tiers).abs() < 16.0 * 1048576.0,
            "{more}, {tiers} in the plan"
        );
    }
    assert_eq!(totals(&all, "run"), totals(&without, "run"), "a session has no tiers");

    let pick = &all["recommendation"]["serve"];
    let line = words(&pick["command_line"]);
    assert!(line.ends_with(&["--tier-ram", "64MiB", "--tier-grace", "2000ms"]), "{line:?}");
    let serve = json(&[&line[..], &["--dry-run", "--json"]].concat());
    assert_eq!((&serve["total_bytes"], &serve["tier_bytes"]), (&pick["total_bytes"], &all["tier_bytes"]));
    assert!(!words(&all["recommendation"]["run"]["command_line"]).contains(&"--tier-ram"));
    let (text, _) = succeed(&["plan", "--memory", "1TiB", "--context", "1k", "--tier-ram", "64MiB"]);
    assert!(text.contains("kvist serve, its requests and tiers included"), "{text}");

    // Only f16 is packed, so nothing else is offered for a server.
    let packed = plan("1TiB", &["--context", "1k", "--tier-ram", "64MiB", "--tier-ram-packed"]);
    let storages: Vec<&Value> = candidates(&packed, "serve").iter().map(|row| &row["k"]).collect();
    assert_eq!(storages, ["f16"]);
    assert!(candidates(&packed, "run").len() > 1);
}

/// The plan and the server name the same bytes on the disk.
#[test]
fn a_disk_is_planned() {
    let flags = ["--context", "1k", "--tier-disk", "/nowhere/blocks", "--tier-disk-size", "10GiB"];
    let plan = [&["plan", "--json"], &flags[..]].concat();
    let (plan, serve) = (json(&plan), json(&[&["serve", "--dry-run", "--json"], &flags[..]].concat()));
    assert_eq!(plan["tier_disk_bytes"].as_u64(), Some(10 << 30));
    assert_eq!(
        (&plan["tier_bytes"], &plan["tier_disk_bytes"]),
        (&serve["tier_bytes"], &serve["tier_disk_bytes"])
    );
    let (text, _) = succeed(&[&["plan"], &flags[..]].concat());
    assert!(text.contains("10 GiB on disk in /nowhere/blocks"), "{text}");
}

#[test]
fn bad_input_is_told_by_the_name_of_its_flag() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty.txt");
    std::fs::write(&empty, "").unwrap();
    let (empty, config, windows) =
        (empty.display().to_string(), parity("llama-gqa"), parity("mistral-window"));
    let alone = folder.path().join("config.json");
    std::fs::copy(&config, &alone).unwrap();
    let alone = alone.display().to_string();
    for (args, status, words) in [
        (&["--memory", "lots"][..], 2, &["--memory", "`lots` is not a size"][..]),
        (
            &["--memory", "1GB", "--context", "32q"],
            2,
            &["--context", "`32q` is not a number of tokens", "32k"],
        ),
        (&["--memory", "1GB", "--context", "0k"], 2, &["--context", "`0k`"]),
        (&["--measure"], 2, &["--memory"]),
        (&["--memory", "1GB", "--text", "a"], 2, &["--measure"]),
        (&["--memory", "1GB", "--measure", "--kv", "q8"], 2, &["--measure", "--kv"]),
        (&["--memory", "1GB", "--measure", "0"], 2, &["--measure", "`0`"]),
        (&["--memory", "1GB", "--measure", "./a.gguf"], 2, &["--measure", "`./a.gguf` is not a number"]),
        (&["--memory", "1GB", "--measure", "8", "--text", &empty], 2, &["--text", "two tokens"]),
        (&["--memory", "1GB", "--measure", "8", "--text", "/missing"], 1, &["/missing"]),
        (&["--memory", "1GB", "--measure", "8", "--model", &alone], 1, &["--measure", "needs its weights"]),
        (&["--tier-ram", "lots"], 2, &["--tier-ram", "`lots` is not a size"]),
        (&["--tier-ram", "1GiB", "--kind", "cells"], 2, &["--kind cells", "kvist serve", "leave --kind out"]),
        (&["--tier-ram", "1GiB", "--window", "64"], 2, &["--window", "kvist serve", "leave --window out"]),
        (&["--tier-ram", "1GiB", "--tier-ram-packed", "--kv", "q8"], 2, &["tiers.ram_packed", "f16"]),
        (&["--tier-ram-packed"], 2, &["tiers.ram_packed", "--tier-ram"]),
        (&["--tier-disk-size", "1GiB"], 2, &["tiers.disk_bytes", "--tier-disk"]),
        (&["--tier-ram", "1GiB", "--tier-grace", "0s"], 2, &["tiers.grace_ms", "--tier-grace"]),
        (&["--tier-ram", "1GiB", "--model", &windows], 2, &["sliding window", "--tier-ram"]),
    ] {
        refused(&[&["plan"], args].concat(), status, words);
    }
}
