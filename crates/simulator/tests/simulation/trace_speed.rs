//! How fast a whole trace runs. Needs the public Mooncake conversation trace:
//! `KVIST_TRACE=conversation_trace.jsonl cargo test --release -p kvist-simulator --test simulation -- --ignored --nocapture trace_speed::`
//! `KVIST_CAPACITY` bounds the cache, in tokens: then most steps that begin blocks must evict first.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Vocabulary};
use kvist_scheduler::Config;
use kvist_simulator::cost::ConstantRates;
use kvist_simulator::run::{Options, run};
use kvist_simulator::trace::{ReadOptions, Trace};
use std::time::Instant;

#[test]
#[ignore = "needs a trace, and a release build"]
fn conversation_trace() {
    let path = std::env::var("KVIST_TRACE").expect("KVIST_TRACE names the trace");
    let start = Instant::now();
    let trace = Trace::read(path.as_ref(), &ReadOptions::default()).unwrap();
    println!("read in {:.3} s", start.elapsed().as_secs_f64());
    let requests = trace.into_arrival_order();
    let capacity = std::env::var("KVIST_CAPACITY").ok().map(|tokens| tokens.parse().expect("tokens"));
    let capacity_tokens = capacity.unwrap_or(u32::MAX);
    for (prefill, decode) in [(100.0, 10.0), (20.0, 2.0), (200.0, 1.3)] {
        let cost = ConstantRates::new(prefill, decode).unwrap();
        for block_tokens in [512, 16] {
            let group = GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: 8192 };
            let vocabulary = Vocabulary::Ids { tokens_per_id: 512 };
            let prefix = Some(PrefixSpec { vocabulary, ..PrefixSpec::default() });
            let spec = PagedSpec { block_tokens, groups: vec![group], rollback_tokens: 0, prefix };
            let options = Options {
                scheduler: Config { max_batch: 256, max_batch_tokens: 8192, ..Config::default() },
                itl: std::env::var("KVIST_ITL").is_ok(),
                ..Options::default()
            };
            let start = Instant::now();
            let run =
                run(&requests, Cache::paged(&spec).unwrap(), &cost, &options, None, &mut |_| ()).unwrap();
            let seconds = start.elapsed().as_secs_f64();
            println!(
                "blocks of {block_tokens}: {seconds:.3} s, {} turns of {} steps, {} tokens computed, {} hit, mean requests {:.1}, ended at {:.0} s",
                run.turns,
                run.counters.steps,
                run.counters.computed_tokens,
                run.counters.hit_tokens,
                run.record.timeline.mean_requests(),
                run.record.timeline.end_ns() as f64 / 1e9,
            );
        }
    }
}
