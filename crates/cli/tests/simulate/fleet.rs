//! `kvist simulate --workers`, through the binary.
use crate::program::*;

const LOAD: &str = "--requests 300 --arrivals poisson:per_s=20 --capacity-blocks 1500";

fn fleet(more: &str) -> serde_json::Value {
    json(&words(&format!("simulate -q --json {LOAD} {more}")))
}

/// A fleet of one worker reports what a single run reports.
#[test]
fn one_worker_is_a_single_run() {
    let (single, fleet) = (fleet(""), fleet("--workers 1 --routing least_loaded"));
    for path in ["cache/hit_tokens", "cache/evicted_blocks", "steps", "requests", "throughput", "objectives"]
    {
        let at = |report: &serde_json::Value| report.pointer(&format!("/{path}")).cloned();
        assert!(at(&single).is_some());
        assert_eq!(at(&single), at(&fleet), "{path}");
    }
    assert_eq!(fleet["latency"]["itl_s"], single["latency"]["itl_s"]);
    assert_eq!(fleet["setting"]["routing"], "least_loaded");
    assert_eq!(fleet["fleet"]["list"].as_array().map(Vec::len), Some(1));
}

#[test]
fn workers_fail_and_join() {
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("rows.csv").display().to_string();
    let command = format!(
        "simulate -q {LOAD} --workers 3 --routing prefix_aware --router-delay 5ms --fail 1@3s --join 1@9s --join 3@10s \
         --slo-ttft 500ms --csv"
    );
    let (text, _) = succeed(&[&words(&command)[..], &[&csv]].concat());
    for line in ["3 at the start, 1 failed, 2 joined; ", "expected ", "most over mean", "goodput"] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    let rows = std::fs::read_to_string(csv).unwrap();
    assert_eq!(rows.lines().filter(|line| line.ends_with(",finished")).count(), 300);
    let report = fleet("--workers 3 --routing prefix_aware --fail 1@3s --join 1@9s --join 3@10s");
    assert_eq!((&report["fleet"]["failures"], &report["fleet"]["joins"]), (&1.into(), &2.into()));
    assert_eq!((&report["requests"]["finished"], &report["requests"]["total"]), (&300.into(), &300.into()));
    let scaled = fleet("--workers 6 --scale 2");
    assert_eq!((&scaled["requests"]["total"], &scaled["setting"]["scale"]), (&600.into(), &"2".into()));
}

/// A sweep over fleets draws curves over the number of workers; of one size it shows policies side by side.
#[test]
fn sweeps_of_fleets() {
    let folder = tempfile::tempdir().unwrap();
    let sweep = |name: &str, more: &str| {
        let out = folder.path().join(name).display().to_string();
        let command = format!("simulate sweep -q --json {LOAD} --seeds 2 --out {out} {more}");
        let table = json(&words(&command));
        let files =
            std::fs::read_dir(&out).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
        (table, files.collect::<Vec<_>>(), out)
    };
    let routings = "--routings round_robin,prefix_aware";
    let (table, files, out) = sweep("sizes", &format!("--fleet-sizes 2,4,8 {routings}"));
    let rows = table["rows"].as_array().unwrap();
    let seen: Vec<_> =
        rows.iter().map(|row| (row["routing"].as_str().unwrap(), row["workers"].as_u64().unwrap())).collect();
    let of = |routing| [2, 4, 8].map(|workers| (routing, workers));
    assert_eq!(seen, [of("round_robin"), of("prefix_aware")].concat());
    let hits = |i: usize| rows[i]["figures"]["token_hit_ratio"]["mean"].as_f64().unwrap();
    assert!((0..3).all(|i| hits(i + 3) > hits(i)), "prefix_aware finds more: {rows:?}");
    for plot in ["hit-ratio", "goodput", "imbalance", "time-to-first-token"] {
        let plot = format!("{plot}-against-the-number-of-workers.svg");
        assert!(files.contains(&plot), "{plot} is not among {files:?}");
    }
    let csv = std::fs::read_to_string(format!("{out}/sweep.csv")).unwrap();
    assert!(csv.starts_with("schedule,policy,capacity_blocks,workers,routing,seeds,"), "{csv}");
    // The cells of a fleet are read again.
    assert_eq!(sweep("sizes", &format!("--fleet-sizes 2,4,8 {routings}")).0, table);

    let (_, files, _) = sweep("policies", &format!("--workers 4 --router-temperature 0.5 {routings}"));
    assert!(files.contains(&"side-by-side.svg".to_owned()), "{files:?}");
}

/// What one worker computed, others load from a store that they share, also after it has failed.
#[test]
fn workers_share_a_store() {
    let tiers = "--tier ram:4GiB,bw=50GB/s,lat=10us --tier store:inf,bw=25GB/s,lat=100us";
    let command = |more: &str| format!("--workers 4 --routing round_robin --fail 1@3s {more}");
    let (own, shared) = (fleet(&command(tiers)), fleet(&command(&format!("{tiers},shared=50GB/s"))));
    let reused = |report: &serde_json::Value| report["tiers"]["reused_token_ratio"].as_f64().unwrap();
    assert!(reused(&shared) > 1.2 * reused(&own), "{} and {}", reused(&shared), reused(&own));
    let store = &shared["tiers"]["tiers"][1];
    assert_eq!((&store["name"], &store["capacity_bytes"]), (&"store".into(), &serde_json::Value::Null));
    assert!(store["loaded_tokens"].as_u64().unwrap() > 0);
    let (text, _) = succeed(&words(&format!("simulate -q {LOAD} {}", command(&format!("{tiers},shared")))));
    for line in ["from ram, ", "from store of tokens; with the cache's hits", "tier store ", "1 failed"] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }

    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("store").display().to_string();
    let sweep = |shared: &str| {
        json(&words(&format!(
            "simulate sweep -q --json {LOAD} --seeds 1 --out {out} --fleet-sizes 2,4 --routing round_robin \
             --tier store:inf,bw=25GB/s{shared} --tier-sizes 0,1GiB,inf"
        )))
    };
    let (own, shared) = (sweep(""), sweep(",shared"));
    let rows = shared["rows"].as_array().unwrap();
    let seen = rows.iter().map(|row| (row["tier_size"].as_str().unwrap(), row["workers"].as_u64().unwrap()));
    let of = |size| [2, 4].map(|workers| (size, workers));
    assert_eq!(seen.collect::<Vec<_>>(), [of("0"), of("1GiB"), of("inf")].concat());
    // The cells of another kind of store are not taken for those of this one.
    assert_ne!(own["rows"], shared["rows"]);
    let plot = format!("{out}/goodput-against-the-size-of-the-last-tier.svg");
    let plot = std::fs::read_to_string(plot).unwrap();
    assert!(plot.contains("2 workers") && plot.contains("4 workers"));
}

#[test]
fn what_a_fleet_refuses() {
    let rows: &[(&str, &[&str])] = &[
        ("--workers 0", &["0", "1..=65536"]),
        ("--workers 2 --routing lottery", &["there is no such policy", "prefix_aware", "overlap_cost"]),
        ("--routing round_robin", &["--routing needs a fleet", "--workers"]),
        ("--fail 0@1s", &["--fail needs a fleet"]),
        ("--scale 3", &["--scale needs a fleet"]),
        ("--workers 2 --fail 2@1s", &["--fail: worker 2 fails at 1 s", "no such worker"]),
        ("--workers 2 --join 1@1s", &["--join: worker 1 joins at 1 s", "there already"]),
        ("--workers 2 --join 5@1s", &["--join: worker 5", "new workers take the next number"]),
        ("--workers 2 --fail 1", &["`1` has no time", "3@120s"]),
        ("--workers 2 --fail x@1s", &["`x` is not the number of a worker"]),
        ("--workers 2 --fail 1@soon", &["`soon` is not a duration"]),
        (
            "--workers 2 --router-temperature 1 --routing round_robin",
            &["--router-temperature: ", "no cost to draw by"],
        ),
        ("--workers 2 --router-temperature=-1", &["--router-temperature: the temperature is -1"]),
        ("--workers 2 --overlap-weight 2", &["--overlap-weight needs --routing overlap_cost"]),
        ("--workers 2 --routing overlap_cost --overlap-weight nan", &["--overlap-weight NaN", "finite"]),
        ("--workers 2 --zero-service", &["--workers cannot be used with --zero-service"]),
        ("--workers 2 --speculate tokens=2,accept=0.5", &["--workers cannot be used with --speculate"]),
        ("--tier ram:1GiB,bw=1GB/s,durable", &["--tier ram: ", "in a fleet only", "--workers"]),
        ("--tier store:1GiB,bw=1GB/s,shared", &["--tier store: ", "in a fleet only", "--workers"]),
        (
            "--workers 2 --tier s:1GiB,bw=1GB/s,shared --tier d:1GiB,bw=1GB/s",
            &["--tier s: ", "only the last tier"],
        ),
        ("--workers 2 --tier s:1GiB,bw=1GB/s,shared=0", &["`shared=0` of the tier s", "write the unit"]),
        ("--workers 2 --tier s:1GiB,bw=1GB/s,shared,durable", &["outlives every worker"]),
        ("--workers 2 --lengths oracle", &["--workers cannot be used with --lengths oracle"]),
        ("--workers 2 --lengths noisy:cv=1 --max-new 9", &["--workers cannot be used with --lengths noisy"]),
        ("--workers 2 --scale 4294967295", &["--scale: 4294967295 copies", "give at most 20000000"]),
        ("--workers 2 --record x", &["--record cannot be used with --workers"]),
        ("--workers 2 --html x", &["--html cannot be used with --workers", "sweep"]),
        ("--workers 2 --beside sjf", &["--beside cannot be used with --workers"]),
        ("sweep --routings round_robin --out x", &["--routings needs fleets"]),
        ("sweep --fleet-sizes 2,2 --out x", &["--fleet-sizes names 2 twice"]),
        ("sweep --fleet-sizes 2 --routings lottery --out x", &["there is no such policy"]),
    ];
    for (more, said) in rows {
        let (command, of_sweep) = match more.strip_prefix("sweep ") {
            Some(of_sweep) => ("simulate sweep", of_sweep),
            None => ("simulate", *more),
        };
        refused(&words(&format!("{command} -q --requests 5 {of_sweep}")), 2, said);
    }
}
