//! The serving engine on a GPU: shared prefixes, forks, preemption, and blocks that go to a tier in RAM and come back, with the
//! texts of the CPU. The program `serving` tests the engine itself.
use crate::engines::{config, greedy, model, receive, submit_together, tokens};
use kvist_device::MemoryBudget;
use kvist_engine::devices::{self, Place, WgpuOptions, open_wgpu};
use kvist_engine::serving::*;
use kvist_model::weights::WeightFormat;
use kvist_model::{LoadOptions, Model, ModelFile};
use kvist_scheduler::{Preempted, Write};
use kvist_store::Ram;
use std::sync::Arc;
use std::time::Duration;

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector.";

/// A cache that is too small for what comes, above a tier in RAM with room for all of it.
fn small(preempted: Preempted) -> EngineConfig {
    let mut config = config(112);
    config.scheduler.preempted = preempted;
    config.scheduler.wait_for_prefix = true;
    let ram =
        TierStore { store: Arc::new(Ram::new(1 << 30)), bytes_per_s: u64::MAX, latency: Duration::ZERO };
    // Requests wait for every answer of the tier: no result depends on time.
    let grace = Duration::from_secs(3600);
    let tiers =
        TierConfig { write: Write::Through, grace, ..TierConfig::new(vec![ram], b"a model".to_vec()) };
    config.tiers = Some(tiers);
    config
}

/// Two conversations whose prompts begin alike, turn by turn at the same time; after two turns each one forks. The cache
/// has room for one history: what a branch has computed goes to the tier while others run. All answers, and the tokens that came
/// from the cache and from the tier.
async fn converse(engine: &Engine) -> (Vec<Vec<u32>>, u64, u64) {
    let (all, mut answers, mut cached, mut loaded) = (tokens(TEXT), Vec::new(), 0, 0);
    let mut branches = vec![all[..32].to_vec(), all[..41].to_vec()];
    for round in 0..4 {
        let jobs = submit_together(engine, branches.iter().map(|history| greedy(history, 14))).await;
        for (history, mut job) in branches.iter_mut().zip(jobs) {
            let heard = receive(&mut job).await;
            let usage = heard.done.unwrap_or_else(|| panic!("{:?}", heard.failure)).usage;
            cached += u64::from(usage.cached_tokens - usage.loaded_tokens);
            loaded += u64::from(usage.loaded_tokens);
            history.extend(&heard.tokens);
            answers.push(heard.tokens);
        }
        if round == 1 {
            branches = branches.iter().flat_map(|history| [history.clone(), history.clone()]).collect();
        }
        for (i, history) in branches.iter_mut().enumerate() {
            history.extend(&all[5 * i + round..5 * i + round + 4]);
        }
    }
    engine.until_idle().await;
    (answers, cached, loaded)
}

#[tokio::test]
async fn a_serving_engine_gives_the_texts_of_the_cpu() {
    let Some(index) = kvist_testing::wgpu_adapter() else { return };
    let device = open_wgpu(index, &WgpuOptions::default()).unwrap_or_else(|error| panic!("{error}"));
    let options = LoadOptions { format: WeightFormat::F32, ..LoadOptions::default() };
    let budget = MemoryBudget::unlimited();
    let on_gpu =
        Model::load(&ModelFile::Embedded, device.clone(), &options, &budget, &mut |_, _| {}).unwrap();
    let (on_gpu, registry) = (Arc::new(on_gpu), Place::Wgpu(device).registry());
    // Room for everything, and no tier: the truth.
    let roomy = Engine::start(model().clone(), &devices::all(), config(2048)).unwrap();
    let (expected, _, none) = converse(&roomy).await;
    assert!(expected.len() == 12 && none == 0);
    for preempted in [Preempted::Recompute, Preempted::Kept] {
        let mut config = small(preempted);
        config.paged.cache.backend = "wgpu".into();
        let engine = Engine::start(on_gpu.clone(), &registry, config).unwrap();
        let (answers, cached, loaded) = converse(&engine).await;
        assert_eq!(answers, expected, "{preempted:?}");
        let preemptions = engine.inspect(|state| state.scheduler.counters().preemptions).await.unwrap();
        let stats = engine.stats();
        let tiers = stats.tiers.unwrap();
        println!(
            "{preempted:?}: {cached} tokens from the cache, {loaded} from the tier, {preemptions} preemptions"
        );
        assert!(cached >= 32, "prefixes are shared: {cached}");
        assert!(loaded > 0 && stats.evicted_blocks > 0, "blocks went to the tier and came back: {tiers:?}");
        assert!(preemptions > 0, "the cache was full");
        assert!(engine.failure().is_none());
    }
}
