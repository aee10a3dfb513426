//! A serving engine that begins with a frozen prefix.
use crate::engines::*;
use kvist_device::{DType, Storage};
use kvist_engine::devices;
use kvist_engine::frozen::EnginePrefix;
use kvist_engine::serving::*;
use kvist_testing::SplitMix64;
use std::time::Duration;

fn random_tokens(n: usize, seed: u64) -> Vec<u32> {
    let mut random = SplitMix64(seed);
    (0..n).map(|_| random.below(4000)).collect()
}

fn config_of(storage: Storage) -> EngineConfig {
    let mut config = config(512);
    (config.paged.cache.k, config.paged.cache.v) = (storage, storage);
    config
}

/// The engine finds the prefix at once, in whole blocks, and never evicts it; requests with a salt do not see it.
#[tokio::test]
async fn an_engine_begins_with_a_prefix() {
    for (storage, len, cached) in [("f32", 120, 112), ("f16", 96, 96), ("q8", 100, 96)] {
        let storage: Storage = storage.parse().unwrap();
        let tokens = random_tokens(len + 9, 3);
        let begun = |prefix: fn(&[u32], &EngineConfig) -> EnginePrefix| {
            let mut config = config_of(storage);
            config.prefix = Some(prefix(&tokens[..len], &config));
            engine(config)
        };
        let (with, without, in_memory) = (begun(frozen), engine(config_of(storage)), begun(shared));
        for round in 0..3 {
            let mut texts = Vec::new();
            for (engine, least) in [(&with, cached), (&without, 0), (&in_memory, cached)] {
                let received = receive(&mut engine.submit(greedy(&tokens, 12)).unwrap()).await;
                let (found, _) = received.admitted.unwrap();
                assert!(found >= least, "{found} of {least} tokens were cached");
                texts.push(received.tokens);
            }
            // Packed caches depend on the chunks that a prompt is computed in.
            if storage.dtype != DType::Q8 {
                assert_eq!(texts[0], texts[1], "{storage} {round}");
                assert_eq!(texts[2], texts[1], "{storage} {round}: in memory");
            }
            // Other prompts fill the cache: everything that may be evicted is.
            for other in 0..3 {
                let other = random_tokens(370, 100 + 3 * round + other);
                receive(&mut with.submit(greedy(&other, 4)).unwrap()).await;
            }
        }
        assert!(with.stats().evicted_blocks > 0, "nothing was evicted");
        let mut job = with.submit(Job { salt: "mine".into(), ..greedy(&tokens, 4) }).unwrap();
        assert_eq!(receive(&mut job).await.admitted.unwrap().0, 0, "a salt shares nothing");
    }
}

/// Nothing that ends makes room for less than the prefix, so nothing is waited for.
#[tokio::test]
async fn a_cache_stays_larger_than_its_prefix() {
    let mut config = config_of("f32".parse().unwrap());
    config.prefix = Some(frozen(&random_tokens(96, 3), &config));
    let engine = engine(config);
    for tokens in [16, 96, 97 + 15] {
        // Regression: a time that clocks do not have was a panic.
        match engine.resize(tokens, Duration::MAX).await {
            Err(ResizeError::Prefix { needed: 112, capacity }) => assert_eq!(capacity, u64::from(tokens)),
            Ok(112) if tokens == 112 => {}
            other => panic!("{tokens}: {other:?}"),
        }
    }
}

#[test]
fn an_engine_refuses_what_does_not_fit() {
    let start = |change: fn(&mut EngineConfig, &mut EnginePrefix), n| {
        let mut config = config_of("f32".parse().unwrap());
        let mut prefix = frozen(&random_tokens(n, 3), &config);
        change(&mut config, &mut prefix);
        config.prefix = Some(prefix);
        match Engine::start(model().clone(), &devices::all(), config) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("it started"),
        }
    };
    assert!(start(|_, _| {}, 15).contains("less than a block of 16"));
    assert!(start(|_, prefix| prefix.origin.model.weights = "0".repeat(64), 40).contains("weights"));
    assert!(start(|config, _| config.paged.prefix = None, 40).contains("no prefix index"));
    assert!(start(|config, _| config.paged.cache.context_tokens = 32, 40).contains("--context"));
    // The file has the blocks that a query at the end of the prefix sees, and a request begins at the end of a block.
    for (n, fits) in [(96, true), (100, false)] {
        let mut config = config_of("f32".parse().unwrap());
        config.paged.cache.window = Some(20);
        config.prefix = Some(frozen(&random_tokens(n, 3), &config));
        let error =
            Engine::start(model().clone(), &devices::all(), config).err().map(|error| error.to_string());
        assert_eq!(error.is_none(), fits, "{error:?}");
        assert!(error.is_none_or(|error| error.contains("whole blocks of 16")));
    }
}

/// Regression: of layers with a window, only the rows that the end of the prefix sees were in the file. The index had their whole blocks,
/// so prompts that share less of the prefix attended rows that had not been written.
#[tokio::test]
async fn prompts_that_share_a_part_of_a_prefix_with_windows_are_as_without_it() {
    let (base, other) = (random_tokens(120, 3), random_tokens(120, 4));
    for (window, sinks) in [(34, 0), (34, 4), (36, 16), (50, 0), (50, 4), (64, 4), (64, 16)] {
        let config_of = || {
            let mut config = config_of(Storage::F32);
            (config.paged.cache.window, config.paged.cache.sinks) = (Some(window), sinks);
            config.scheduler.max_batch_tokens = 32;
            config.fit();
            config
        };
        let (mut begun, without) = (config_of(), engine(config_of()));
        begun.prefix = Some(frozen(&base[..96], &begun));
        let with = engine(begun);
        for shared in [20, 60, 70, 88, 96] {
            let prompt = [&base[..shared], &other[..100 - shared]].concat();
            let expected = receive(&mut without.submit(greedy(&prompt, 6)).unwrap()).await.tokens;
            // At first, and from the blocks that the first one has stored.
            for round in 0..2 {
                let received = receive(&mut with.submit(greedy(&prompt, 6)).unwrap()).await;
                let what = format!("window {window}, {sinks} sinks, {shared} tokens, round {round}");
                assert_eq!(received.tokens, expected, "{what}");
                assert!(shared < 96 || received.admitted.unwrap().0 >= 96, "{what}: not cached");
            }
        }
    }
}

/// Files have whole blocks of 16, which do not fill larger ones.
#[test]
fn blocks_that_a_file_does_not_fill_are_refused() {
    let mut config = config_of(Storage::F32);
    (config.paged.cache.window, config.paged.block_tokens) = (Some(34), 32);
    config.fit();
    config.prefix = Some(frozen(&random_tokens(96, 3), &config));
    let Err(error) = Engine::start(model().clone(), &devices::all(), config) else { panic!("it started") };
    let error = error.to_string();
    assert!(error.contains("whole blocks of 32") && error.contains("use blocks of 16"), "{error}");
}
