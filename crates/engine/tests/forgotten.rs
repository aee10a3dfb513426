//! What is deleted under a salt is not found again, wherever it is: in the cache, in tiers alone, after a restart.
mod engines;
use engines::*;
use kvist_engine::serving::*;
use kvist_store::{BlockStore, KeyChain, Ram};
use std::sync::Arc;
use std::time::Duration;

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a vector \
     is the amount of space allocated for any future elements that will be added onto the vector. This is not to be confused \
     with the length of a vector, which specifies the number of actual elements within the vector.";

/// An engine over this store, whose cache has room for one of the prompts.
fn over(store: &Arc<Ram>) -> Engine {
    let mut config = config(96);
    let store = store.clone() as Arc<dyn BlockStore>;
    let tier = TierStore { store, bytes_per_s: u64::MAX, latency: Duration::ZERO };
    let grace = Duration::from_secs(3600);
    config.tiers = Some(TierConfig { grace, ..TierConfig::new(vec![tier], b"a model".to_vec()) });
    engine(config)
}

/// The tokens of each prompt that were not computed, under a salt, and the answers.
async fn serve(engine: &Engine, salt: &str) -> (Vec<u32>, Vec<Vec<u32>>) {
    let all = tokens(TEXT);
    let (mut cached, mut answers) = (Vec::new(), Vec::new());
    for from in 0..4 {
        let job = Job { salt: salt.into(), ..greedy(&all[from * 6..from * 6 + 50], 8) };
        let heard = receive(&mut engine.submit(job).unwrap()).await;
        cached.push(heard.done.expect("it ended").usage.cached_tokens);
        answers.push(heard.tokens);
    }
    engine.until_idle().await;
    // Copies go on: from the cache's memory, and then to the store.
    let copied = async || engine.inspect(|state| state.scheduler.bytes_in_flight().1).await == Some(0);
    while !copied().await || engine.stats().tiers.is_none_or(|tiers| tiers.store_bytes > 0) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    (cached, answers)
}

/// `DELETE /v1/cache` removed from tiers what the cache had; what had been evicted from it before was found again.
#[tokio::test]
async fn what_only_a_tier_has_is_deleted_too() {
    let store = Arc::new(Ram::new(1 << 30));
    let first = over(&store);
    let (cached, answers) = serve(&first, "a").await;
    assert_eq!(cached, [0; 4]);
    serve(&first, "b").await;
    assert_eq!(serve(&first, "a").await, (vec![48; 4], answers.clone()));
    // The cache has one prompt of "b" at most, and nothing of "a" but the last one.
    assert!(first.forget("a").await.is_some());
    assert_eq!(serve(&first, "a").await, (vec![0; 4], answers.clone()), "deleted");
    assert_eq!(serve(&first, "a").await, (vec![48; 4], answers.clone()), "and stored again");
    assert_eq!(serve(&first, "b").await.0, [48; 4], "another salt stays");
    // A later process with the same store.
    first.forget("b").await;
    // A task writes the note.
    let note = KeyChain::note(b"a model", "b");
    while store.lookup(&[note], Duration::MAX).await.unwrap() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(first);
    let later = over(&store);
    assert_eq!(serve(&later, "b").await, (vec![0; 4], answers.clone()));
    assert_eq!(serve(&later, "a").await.0, [48; 4]);
}
