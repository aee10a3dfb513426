//! Imports of a text's K and V in parts, between steps, by models some of whose layers have a window.
use crate::engines::*;
use kvist_engine::devices;
use kvist_engine::serving::*;
use kvist_model::{Model, ModelFile};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

const BLOCK: usize = 4;

fn small(context_tokens: u32) -> EngineConfig {
    let mut config = config(context_tokens);
    config.paged.block_tokens = BLOCK as u32;
    (config.scheduler.max_batch, config.scheduler.max_batch_tokens) = (2, 6);
    config
}

fn start(model: &Arc<Model>, context_tokens: u32) -> Engine {
    Engine::start(model.clone(), &devices::all(), small(context_tokens)).unwrap()
}

fn text(model: &Model, first: u32, n: u32) -> Vec<u32> {
    let vocab = model.config().vocab as u32;
    (0..n).map(|i| (first + i * 7 + i * i) % (vocab - 4) + 3).collect()
}

async fn ask(engine: &Engine, text: &[u32]) -> (Vec<u32>, u32) {
    let heard = receive(&mut engine.submit(greedy(text, 8)).unwrap()).await;
    let done = heard.done.unwrap_or_else(|| panic!("{:?}", heard.failure));
    (heard.tokens, done.usage.cached_tokens)
}

/// The whole blocks of a text, from an engine that has computed it.
async fn blocks_of(engine: &Engine, text: &[u32]) -> TextBlocks {
    let whole = text[..text.len() / BLOCK * BLOCK].to_vec();
    let wanted: BTreeSet<(u16, usize)> =
        (0..4).flat_map(|g| (0..whole.len() / BLOCK).map(move |at| (g, at))).collect();
    let export =
        move |state: &mut EngineState| state.export_blocks("", &whole, BLOCK as u32, &wanted, usize::MAX);
    engine.inspect(export).await.unwrap().unwrap()
}

async fn begin(engine: &Engine, text: &[u32], blocks: &TextBlocks) -> Option<Begun> {
    let (text, has) = (text.to_vec(), blocks.keys().copied().collect());
    let begin = move |state: &mut EngineState| state.begin_import("", &text, BLOCK as u32, &has);
    engine.inspect(begin).await.unwrap().unwrap()
}

async fn go_on(engine: &Engine, id: ImportId, blocks: TextBlocks) -> bool {
    let go_on = move |state: &mut EngineState| state.continue_import(id, &blocks);
    engine.inspect(go_on).await.unwrap().unwrap()
}

async fn end(engine: &Engine, id: ImportId) -> usize {
    engine.inspect(move |state| state.end_import(id)).await.unwrap().unwrap()
}

async fn free(engine: &Engine) -> u64 {
    engine.inspect(|state| state.scheduler.free_cells() + state.scheduler.evictable_cells()).await.unwrap()
}

#[tokio::test]
async fn blocks_come_in_parts_between_the_steps_of_others() {
    for name in ["gemma3", "gpt-oss", "qwen2-window-mixed"] {
        let model = load_f32(&ModelFile::Path(fixtures("parity").join(name)));
        let (first, text, other) = (start(&model, 512), text(&model, 1, 62), text(&model, 900, 30));
        let ((answer, _), (answer_of_other, _)) = (ask(&first, &text).await, ask(&first, &other).await);
        let blocks = blocks_of(&first, &text).await;
        let engine = start(&model, 512);
        let all = free(&engine).await;
        let Begun { id, missing } = begin(&engine, &text, &blocks).await.expect("there is room");
        // Of a window only what later queries see is asked for.
        assert!(
            missing.len() < 2 * (62 / BLOCK) && missing.iter().all(|at| blocks.contains_key(at)),
            "{name}"
        );
        for (i, at) in missing.iter().enumerate() {
            assert!(go_on(&engine, id, TextBlocks::from([(*at, blocks[at].clone())])).await);
            if i % 8 == 3 {
                assert_eq!(ask(&engine, &other).await.0, answer_of_other, "{name}");
            }
        }
        assert_eq!(end(&engine, id).await, 60);
        assert_eq!(ask(&engine, &text).await, (answer.clone(), 60), "{name}");

        // Without one of the blocks there is nothing, and nothing is lost.
        let engine = start(&model, 512);
        let Begun { id, missing } = begin(&engine, &text, &blocks).await.unwrap();
        let mut part = blocks.clone();
        part.remove(&missing[missing.len() / 2]);
        assert!(go_on(&engine, id, part).await && free(&engine).await < all);
        assert_eq!((end(&engine, id).await, free(&engine).await), (0, all), "{name}");
        assert!(!go_on(&engine, id, blocks.clone()).await, "it has ended");
        assert_eq!(ask(&engine, &text).await, (answer.clone(), 0), "{name}");

        // What is as long as another cache's blocks is an error, and the cache has what it had.
        let engine = start(&model, 512);
        let Begun { id, missing } = begin(&engine, &text, &blocks).await.unwrap();
        let short = TextBlocks::from([(missing[0], vec![0; 3])]);
        let tried = engine.inspect(move |state| state.continue_import(id, &short).is_err()).await;
        assert_eq!((tried, free(&engine).await), (Some(true), all), "{name}");
    }
}

/// A step never lacks the cells of an import.
#[tokio::test]
async fn an_import_makes_way() {
    let model = load_f32(&ModelFile::Path(fixtures("parity").join("gemma3")));
    let (first, long, other) = (start(&model, 512), text(&model, 1, 90), text(&model, 900, 70));
    let (answer, _) = ask(&first, &other).await;
    let (long_answer, _) = ask(&first, &long).await;
    let blocks = blocks_of(&first, &long).await;
    let engine = start(&model, 112);
    let Begun { id, missing } = begin(&engine, &long, &blocks).await.expect("an idle engine has room");
    assert!(go_on(&engine, id, TextBlocks::from([(missing[0], blocks[&missing[0]].clone())])).await);
    assert_eq!(ask(&engine, &other).await, (answer, 0));
    assert!(!go_on(&engine, id, blocks.clone()).await, "it was given up");
    assert_eq!(ask(&engine, &long).await, (long_answer, 0));
}

/// Begins an import when only a preempted request is left. Keeps which one.
struct Import {
    text: Vec<u32>,
    has: BTreeSet<(u16, usize)>,
    begun: Arc<Mutex<Option<ImportId>>>,
}

impl Watcher for Import {
    fn stepped(&mut self, _: u64, _: u64, state: &mut EngineState) {
        let scheduler = &state.scheduler;
        let is_alone = scheduler.n_running() == 0 && scheduler.n_waiting() == 1;
        let mut begun = self.begun.lock().unwrap();
        if begun.is_none() && is_alone && scheduler.counters().preemptions > 0 {
            let import = state.begin_import("", &self.text, BLOCK as u32, &self.has).unwrap();
            *begun = Some(import.expect("an idle engine has room").id);
        }
    }
}

/// Regression: an import made way for requests that had never been admitted. One that was preempted ended in the middle of its answer,
/// as if the cache were too small for it.
#[tokio::test]
async fn an_import_makes_way_for_a_preempted_request() {
    let model = load_f32(&ModelFile::Path(fixtures("parity").join("gemma3")));
    let (first, long) = (start(&model, 512), text(&model, 1, 90));
    ask(&first, &long).await;
    let blocks = blocks_of(&first, &long).await;
    let others = [text(&model, 900, 48), text(&model, 531, 48)];
    let mut expected = Vec::new();
    for other in &others {
        expected.push(receive(&mut first.submit(greedy(other, 40)).unwrap()).await.tokens);
    }
    let begun = Arc::default();
    let import = Import { text: long, has: blocks.keys().copied().collect(), begun: Arc::clone(&begun) };
    let mut config = small(112);
    config.watchers.push(Box::new(import));
    let engine = Engine::start(model, &devices::all(), config).unwrap();
    let jobs = submit_together(&engine, others.iter().map(|other| greedy(other, 40))).await;
    for (mut job, expected) in jobs.into_iter().zip(expected) {
        let heard = receive(&mut job).await;
        assert_eq!((heard.tokens, heard.failure), (expected, None));
    }
    let id = begun.lock().unwrap().expect("no request was preempted");
    assert!(!go_on(&engine, id, blocks).await, "it was given up");
}
