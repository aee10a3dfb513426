use super::*;
use crate::serving::tiers::test_store::{TestStore, config, keys};

const BLOCK: usize = 100;

/// Reads that hang were given up with their loads, so their store never counted as one that fails.
#[tokio::test]
async fn reads_that_hang_are_errors_though_their_load_is_given_up() {
    let stores = loop {
        let store = TestStore::new(0);
        store.reads_hang.store(true, Relaxed);
        let mut stores = Stores::new(&config([store]));
        stores.longest_read = Duration::from_millis(50);
        let stores = Arc::new(stores);
        let (reports, _inbox) = std::sync::mpsc::channel();
        let wanted = keys(20).into_iter().map(|key| Wanted { tier: 0, key, bytes: BLOCK }).collect();
        let load = Fetch { id: TransferId(0), wanted };
        let load = tokio::spawn(fetch(stores.clone(), load, reports));
        tokio::task::yield_now().await;
        load.abort();
        // On a slow machine the reads may have ended before: once more.
        if load.await.is_err() {
            break stores;
        }
    };
    // The reads that go on end with an error, which a slow machine may see before the load is given up.
    while stores.stats()[0].errors < STRAGGLERS as u64
        || stores.list[0].stragglers.available_permits() < STRAGGLERS
    {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
