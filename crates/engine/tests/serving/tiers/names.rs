//! A tier gives a text its own K and V, whatever else puts blocks into the cache, moves them there, or deletes them: restored
//! sessions, a frozen prefix, another capacity, `DELETE /v1/cache`.
use crate::engines::*;
use kvist_engine::serving::*;
use kvist_scheduler::Write;
use kvist_store::{BlockStore, Ram};
use kvist_testing::SplitMix64;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

const MODEL: &[u8] = b"a model";
const BLOCK: usize = 16;

fn store() -> Arc<Ram> {
    Arc::new(Ram::new(1 << 30))
}

/// A cache of so many tokens above this store, which is always worth reading.
fn over(store: &Arc<Ram>, tokens: u32, write: Write) -> EngineConfig {
    let mut config = config(tokens);
    let store = store.clone() as Arc<dyn BlockStore>;
    let tier = TierStore { store, bytes_per_s: u64::MAX, latency: Duration::ZERO };
    let grace = Duration::from_secs(3600);
    config.tiers =
        Some(TierConfig { write, grace, always: true, ..TierConfig::new(vec![tier], MODEL.to_vec()) });
    config
}

/// A text of 72 tokens, which no other `i` has.
fn text(i: usize) -> Vec<u32> {
    let mut random = SplitMix64(i as u64);
    (0..72).map(|_| random.below(4000)).collect()
}

/// The answer to a text under a salt, and the tokens of it that were not computed.
async fn ask(engine: &Engine, salt: &str, text: &[u32]) -> (Vec<u32>, Done) {
    let job = Job { salt: salt.into(), ..greedy(text, 6) };
    let heard = receive(&mut engine.submit(job).unwrap()).await;
    (heard.tokens, heard.done.expect("it ended"))
}

/// Waits for the copies that are on their way, from the cache's memory and then to the store.
async fn copied(engine: &Engine) {
    engine.until_idle().await;
    let in_flight = async || engine.inspect(|state| state.scheduler.bytes_in_flight().1).await;
    while in_flight().await != Some(0) || engine.stats().tiers.is_none_or(|tiers| tiers.store_bytes > 0) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Texts, their answers without tiers, and the bytes of their whole blocks.
async fn plain(n: usize) -> Vec<(Vec<u32>, Vec<u32>, TextBlocks)> {
    let plain = engine(config(2048));
    let mut all = Vec::new();
    for i in 0..n {
        let text = text(i);
        let answer = ask(&plain, "", &text).await.0;
        let whole = text[..text.len() / BLOCK * BLOCK].to_vec();
        let wanted: BTreeSet<(u16, usize)> = (0..whole.len() / BLOCK).map(|block| (0, block)).collect();
        let export =
            move |state: &mut EngineState| state.export_blocks("", &whole, BLOCK as u32, &wanted, usize::MAX);
        all.push((text, answer, plain.inspect(export).await.unwrap().unwrap()));
    }
    all
}

/// Puts the blocks of a text into the cache, as a server restores a session. Returns how many of its tokens are cached.
async fn import(
    engine: &Engine,
    salt: &'static str,
    (text, _, blocks): &(Vec<u32>, Vec<u32>, TextBlocks),
) -> usize {
    let (whole, blocks) = (text[..text.len() / BLOCK * BLOCK].to_vec(), blocks.clone());
    let import = move |state: &mut EngineState| state.import_blocks(salt, &whole, BLOCK as u32, &blocks);
    engine.inspect(import).await.unwrap().unwrap()
}

/// Imports that took the numbers of evicted blocks were stored as what had been there, and other texts were answered from them.
#[tokio::test]
async fn an_import_is_not_stored_as_what_was_in_its_place() {
    let texts = plain(9).await;
    let mut imported = 0;
    // How many texts come before, are imported, and come after.
    for (before, imports, after) in (0..27).map(|i| (1 + i / 9, 1 + i / 3 % 3, 1 + i % 3)) {
        for ahead_tokens in [32, 64] {
            let tiered = engine(over(&store(), 160, Write::Back { ahead_tokens }));
            let check = async |i: usize| {
                let (text, answer, _) = &texts[i];
                let (given, done) = ask(&tiered, "", text).await;
                copied(&tiered).await;
                let what = format!("{before} before, {imports} imports, {after} after, {ahead_tokens} ahead");
                assert_eq!(given, *answer, "text {i}, {what}");
                done.usage.loaded_tokens
            };
            for i in 0..before {
                check(i).await;
            }
            // They take the place of what was there, which no tier has.
            for text in &texts[3..3 + imports] {
                assert_eq!(import(&tiered, "", text).await, 64);
            }
            // These take their place, so that they go to the tier.
            for i in 6..6 + after {
                check(i).await;
            }
            for i in 0..before {
                check(i).await;
            }
            for i in 3..3 + imports {
                imported += check(i).await;
            }
        }
    }
    assert!(imported > 0, "imported blocks come back from the tier");
}

/// The same and more at random.
#[tokio::test]
async fn every_text_is_answered_from_its_own_blocks() {
    const TEXTS: usize = 6;
    let texts = plain(TEXTS).await;
    let (mut loaded, mut imported, mut deleted) = (0, 0, 0);
    for seed in 0..6 {
        let mut random = SplitMix64(seed);
        let write = if seed % 2 == 0 { Write::Through } else { Write::Back { ahead_tokens: 32 } };
        let store = store();
        let mut tiered = engine(over(&store, 160, write));
        for step in 0..60 {
            let (i, salt) = (random.index(TEXTS), if random.below(4) == 0 { "other" } else { "" });
            match random.below(12) {
                0..=5 => {
                    let (text, expected, _) = &texts[i];
                    let (answer, done) = ask(&tiered, salt, text).await;
                    assert_eq!(answer, *expected, "seed {seed}, step {step}: text {i} under {salt:?}");
                    loaded += done.usage.loaded_tokens;
                }
                6..=8 => imported += import(&tiered, salt, &texts[i]).await,
                9 => deleted += tiered.forget(salt).await.unwrap().blocks,
                10 => {
                    let tokens = 112 + 16 * random.below(4);
                    tiered.resize(tokens, Duration::from_secs(60)).await.unwrap();
                }
                // Another process with the same store.
                _ if random.below(3) == 0 => {
                    copied(&tiered).await;
                    tiered = engine(over(&store, 160, write));
                }
                _ => copied(&tiered).await,
            }
        }
    }
    assert!(loaded > 500 && imported > 500 && deleted > 10, "{loaded}, {imported}, {deleted}");
}

/// What followed a frozen prefix had no name, and no tier got it.
#[tokio::test]
async fn what_follows_a_frozen_prefix_comes_back() {
    let mut begun = over(&store(), 256, Write::Through);
    let prefix = &text(9)[..64];
    begun.prefix = Some(frozen(prefix, &begun));
    let texts: Vec<Vec<u32>> = (0..4).map(|i| [prefix, &text(i)].concat()).collect();
    let (with, without) = (engine(begun), engine(config(2048)));
    for round in 0..2 {
        for text in &texts {
            let (answer, done) = ask(&with, "", text).await;
            assert_eq!(answer, ask(&without, "", text).await.0);
            copied(&with).await;
            let expected = if round == 0 { 64 } else { 128 };
            assert_eq!(done.usage.cached_tokens, expected, "{done:?}");
        }
    }
    let tiers = with.stats().tiers.unwrap();
    assert!(tiers.counters.failed_blocks == 0 && tiers.counters.loaded_tokens[0] >= 64, "{tiers:?}");
}

/// What follows the K and V of another machine is not what this one computes: a tier keeps both apart.
#[tokio::test]
async fn what_follows_a_prefix_of_another_machine_is_kept_apart() {
    let store = store();
    let prefix = &text(9)[..64];
    let text = [prefix, &text(0)].concat();
    let begun = |is_foreign: bool| {
        let mut begun = over(&store, 256, Write::Through);
        begun.prefix = Some(match is_foreign {
            false => frozen(prefix, &begun),
            true => frozen_elsewhere(prefix, &begun),
        });
        engine(begun)
    };
    let own = begun(false);
    ask(&own, "", &text).await;
    copied(&own).await;
    let loaded = async |engine: Engine| ask(&engine, "", &text).await.1.usage.loaded_tokens;
    assert_eq!(loaded(begun(false)).await, 64);
    assert_eq!(loaded(begun(true)).await, 0);
}

/// The tokens of four texts that were not computed, under a salt.
async fn serve(engine: &Engine, salt: &str) -> Vec<u32> {
    let mut cached = Vec::new();
    for i in 0..4 {
        cached.push(ask(engine, salt, &text(i)).await.1.usage.cached_tokens);
    }
    copied(engine).await;
    cached
}

/// `DELETE /v1/cache` removed from tiers what the cache had; what had been evicted from it before was found again.
#[tokio::test]
async fn what_only_a_tier_has_is_deleted_too() {
    let store = store();
    let first = engine(over(&store, 128, Write::Through));
    assert_eq!(serve(&first, "a").await, [0; 4]);
    serve(&first, "b").await;
    assert_eq!(serve(&first, "a").await, [64; 4]);
    // The cache has a text of "b" at most, and nothing of "a" but the last one.
    assert!(first.forget("a").await.is_some());
    assert_eq!(serve(&first, "a").await, [0; 4], "deleted");
    assert_eq!(serve(&first, "a").await, [64; 4], "and stored again");
    assert_eq!(serve(&first, "b").await, [64; 4], "another salt stays");
    // A later process with the same store.
    // It waits two seconds at most, and the machine may be slow.
    while !first.forget("b").await.unwrap().untold.is_empty() {}
    drop(first);
    let later = engine(over(&store, 128, Write::Through));
    assert_eq!(serve(&later, "b").await, [0; 4]);
    assert_eq!(serve(&later, "a").await, [64; 4]);
}

/// After a deletion while a request used a system prompt, everything that followed it was stored under names that nothing asked for,
/// for as long as the prompt stayed in the cache.
#[tokio::test]
async fn what_follows_blocks_from_before_a_deletion_is_found() {
    let store = store();
    let engine = engine(over(&store, 192, Write::Through));
    let system = &text(9)[..64];
    let chats: Vec<Vec<u32>> = (0..4).map(|i| [system, &text(i)].concat()).collect();
    loop {
        // A token a second: it still runs when the deletion comes.
        let mut running = engine.submit(Job { pace: Some(1), ..greedy(&chats[0], 20) }).unwrap();
        while !matches!(running.next().await.unwrap(), Event::Token(_)) {}
        engine.forget("").await.unwrap();
        // On a busy machine it may have ended before.
        if engine.inspect(|state| state.scheduler.used_cells()).await.unwrap() > 0 {
            break;
        }
    }
    for (i, expected) in [(1, 0), (2, 0), (3, 0), (1, 64), (2, 64)] {
        let (_, done) = ask(&engine, "", &chats[i]).await;
        copied(&engine).await;
        let usage = (done.usage.cached_tokens - done.usage.loaded_tokens, done.usage.loaded_tokens);
        assert_eq!(usage, (64, expected), "chat {i}: the system prompt is cached, the rest in the tier");
    }
}

/// Blocks that a tier has are said to be there, and no others.
#[tokio::test]
async fn an_engine_knows_which_cached_blocks_a_tier_has() {
    let engine = engine(over(&store(), 128, Write::Through));
    let below = async || engine.blocks_below().await.unwrap().blocks;
    assert_eq!(below().await, []);
    let before = engine.changes_below().unwrap();
    ask(&engine, "a", &text(0)).await;
    copied(&engine).await;
    let of_a = below().await;
    let full = text(0).len() / 16;
    assert!(of_a.len() >= full && of_a.iter().all(|(_, tiers)| *tiers == 1), "{of_a:?}");
    assert!(engine.changes_below().unwrap() > before);
    // Nothing of what was deleted is below, though its blocks may be cached again.
    engine.forget("a").await;
    assert_eq!(below().await, []);
    ask(&engine, "b", &text(0)).await;
    copied(&engine).await;
    assert!(below().await.len() >= full);
    assert_eq!(self::engine(config(128)).blocks_below().await, None, "no tiers");
}
