//! The scheduler's steps on a model: requests get the same tokens and logits as in a session of their own.
use crate::common::*;
use kvist_cache::{Cache, CellRun, GroupId, PrefixSpec, RecomputeCost, SeqId};
use kvist_cpu::{Compute, Cpu};
use kvist_device::{HostBlock, MemoryBudget, Purpose, RowOutput, RowResult, Storage};
use kvist_engine::devices;
use kvist_engine::executor::{ModelExecutor, PagedConfig, SampledToken, TokenSampler};
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::config::ModelConfig;
use kvist_model::{LoadOptions, Model, ModelFile, top_two};
use kvist_scheduler::{Config, End, Ended, Iteration, Request, RequestId, Scheduler};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

/// Row arithmetic is independent of the batch: logits are compared bit by bit.
fn model() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| load(ModelFile::Embedded).unwrap())
}

fn config(context_tokens: u32, max_step_tokens: u32, max_rows: u32) -> PagedConfig {
    let cache = CacheConfig {
        k: Storage::F32,
        v: Storage::F32,
        max_step_tokens,
        max_rows,
        ..CacheConfig::new(context_tokens)
    };
    PagedConfig { cache, block_tokens: 16, prefix: Some(PrefixSpec::default()) }
}

fn prompt(i: u32, n: u32) -> Vec<u32> {
    (0..n).map(|at| 300 + (at * 7 + i * 31) % 500).collect()
}

/// What a request received.
#[derive(Default)]
struct Heard {
    tokens: Vec<u32>,
    scores: Vec<(u32, Vec<f32>)>,
    ended: u32,
}

/// Takes the most likely token; asks for the logits of `wanted`.
struct Greedy {
    wanted: Range<u32>,
    heard: Arc<Mutex<Heard>>,
}

impl TokenSampler for Greedy {
    fn choose(&mut self, row: RowResult<'_>) -> SampledToken {
        let RowResult::Logits(logits) = row else { panic!("{row:?} instead of logits") };
        let (token, _) = top_two(logits).expect("logits are numbers");
        self.heard.lock().unwrap().tokens.push(token);
        SampledToken { token, finished: false }
    }
    fn wants(&self, _computed: Range<u32>) -> Range<u32> {
        self.wanted.clone()
    }
    fn score(&mut self, position: u32, logits: &[f32]) {
        self.heard.lock().unwrap().scores.push((position, logits.to_vec()));
    }
    fn end(&mut self) {
        self.heard.lock().unwrap().ended += 1;
    }
}

/// Asks for no additional logits, which is the trait's default, and for the most likely token instead of its own.
struct Plain(Arc<Mutex<Heard>>);

impl TokenSampler for Plain {
    fn row_output(&self) -> RowOutput {
        RowOutput::Argmax
    }
    fn choose(&mut self, row: RowResult<'_>) -> SampledToken {
        let RowResult::Token(token) = row else { panic!("{row:?} instead of a token") };
        let mut heard = self.0.lock().unwrap();
        heard.tokens.push(token);
        SampledToken { token, finished: heard.tokens.len() == 3 }
    }
    fn score(&mut self, _: u32, _: &[f32]) {
        panic!("nothing was wanted");
    }
}

fn run(scheduler: &mut Scheduler, executor: &mut ModelExecutor) -> Vec<Ended> {
    let (mut all, mut now) = (Vec::new(), 0);
    while let Iteration::Ran { .. } = scheduler.iterate(now, executor) {
        now += 1;
        for ended in scheduler.drain_ended() {
            executor.unregister(ended.id);
            all.push(ended);
        }
    }
    all.extend(scheduler.drain_ended());
    all
}

fn request(id: u64, prompt: &[u32], max_new: u32) -> Request {
    let n = prompt.len() as u32;
    Request { prompt: kvist_scheduler::Prompt::Tokens(prompt.to_vec()), ..Request::new(id, 0, n, max_new) }
}

/// Three requests at once, in chunks: tokens and scores equal those of each request alone, whatever its row in the
/// batch.
#[test]
fn tokens_and_scores_are_those_of_a_session_alone() {
    let (cache, mut executor) = ModelExecutor::new(model(), &registry(), &config(512, 24, 5)).unwrap();
    let scheduling = Config { max_batch: 4, max_batch_tokens: 24, ..Config::default() };
    let mut scheduler = Scheduler::new(scheduling, cache, None).unwrap();
    let wanted = [3..3, 0..40, 10..22];
    let heard: Vec<Arc<Mutex<Heard>>> = wanted.iter().map(|_| Arc::default()).collect();
    for (i, wanted) in wanted.iter().enumerate() {
        let choose = Greedy { wanted: wanted.clone(), heard: heard[i].clone() };
        executor.register(RequestId(i as u64), Box::new(choose));
        scheduler.arrive(0, request(i as u64, &prompt(i as u32, 30 + i as u32), 6)).unwrap();
    }
    let plain: Arc<Mutex<Heard>> = Arc::default();
    executor.register(RequestId(3), Box::new(Plain(plain.clone())));
    scheduler.arrive(0, request(3, &prompt(0, 30), 6)).unwrap();
    let ended = run(&mut scheduler, &mut executor);
    assert_eq!(ended.len(), 4);
    assert!(ended.iter().all(|ended| ended.end == End::Finished), "{ended:?}");
    assert!(executor.failure().is_none());
    assert!(executor.kv_bytes() > 0 && executor.counters().bytes_written > 0);

    for (i, wanted) in wanted.into_iter().enumerate() {
        let prompt = prompt(i as u32, 30 + i as u32);
        let heard = heard[i].lock().unwrap();
        let alone = greedy(&mut session(model(), &exact("contiguous", 128, 64)), &prompt, 6, false);
        assert_eq!(heard.tokens, alone, "request {i}");
        assert_eq!(heard.ended, 1);
        let whole: Vec<u32> = prompt.iter().chain(&alone[..5]).copied().collect();
        let expected = logits(&mut session(model(), &exact("contiguous", 128, 64)), &whole);
        let vocab = model().config().vocab;
        // Computed positions: those of the prompt, and of all generated tokens except the last.
        let positions: Vec<u32> = wanted.filter(|at| (*at as usize) < whole.len()).collect();
        assert_eq!(heard.scores.iter().map(|(at, _)| *at).collect::<Vec<_>>(), positions, "request {i}");
        for (at, scored) in &heard.scores {
            let at = *at as usize;
            assert_eq!(scored, &expected[at * vocab..(at + 1) * vocab], "request {i}, position {at}");
        }
    }
    let plain = plain.lock().unwrap();
    assert_eq!(plain.tokens, heard[0].lock().unwrap().tokens[..3], "it said itself when it was over");
}

fn registry() -> kvist_device::Registry {
    devices::on(&Compute::default().deterministic(true))
}

/// A token outside the vocabulary, and a request without tokens: the step fails, the cache is unchanged, and the error
/// is available.
#[test]
fn steps_that_cannot_be_computed_fail_and_say_why() {
    let vocab = model().config().vocab as u32;
    let (cache, mut executor) = ModelExecutor::new(model(), &registry(), &config(128, 32, 1)).unwrap();
    let scheduling = Config { max_batch: 1, max_failures: 1, ..Config::default() };
    let mut scheduler = Scheduler::new(scheduling, cache, None).unwrap();
    let heard: Arc<Mutex<Heard>> = Arc::default();
    let said = |executor: &ModelExecutor| executor.failure().map(|error| error.to_string());
    for (id, token, fails) in [(0, vocab - 1, false), (1, vocab, true), (2, 5, false)] {
        executor.register(RequestId(id), Box::new(Plain(heard.clone())));
        scheduler.arrive(0, request(id, &[7, token], 1)).unwrap();
        let ended = run(&mut scheduler, &mut executor);
        assert_eq!(ended[0].end != End::Finished, fails, "token {token}");
        assert_eq!(said(&executor).is_some_and(|why| why.contains(&vocab.to_string())), fails);
        assert_eq!(scheduler.used_cells(), 0);
    }
    scheduler.arrive(0, Request::new(3, 0, 4, 1)).unwrap();
    run(&mut scheduler, &mut executor);
    assert!(said(&executor).is_some_and(|why| why.contains("request 3 has no token ids")));
    // A request that was not registered gets no token and ends.
    scheduler.arrive(0, request(4, &[7, 8], 5)).unwrap();
    let ended = run(&mut scheduler, &mut executor);
    assert_eq!((ended[0].end, ended[0].generated), (End::Finished, 1));
}

/// The plan equals what is set aside: with one byte less the executor is refused, with advice.
#[test]
fn a_paged_cache_takes_what_its_plan_says() {
    let weights = model().budget().usage().of(Purpose::Weights);
    let config = config(250, 32, 4);
    let plan = config.plan(model().config(), &registry()).unwrap();
    assert_eq!(plan.capacity_cells, [256], "whole blocks");
    let load = |bytes| {
        let (options, device) = (LoadOptions::default(), Cpu::new(Compute::default().deterministic(true)));
        let budget = MemoryBudget::new(weights + bytes);
        Arc::new(Model::load(&ModelFile::Embedded, device, &options, &budget, &mut |_, _| {}).unwrap())
    };
    let fits = load(plan.session_bound());
    let (cache, mut executor) = ModelExecutor::new(&fits, &registry(), &config).unwrap();
    assert_eq!(executor.kv_bytes(), 0);
    let mut scheduler = Scheduler::new(Config::default(), cache, None).unwrap();
    scheduler.arrive(0, request(0, &prompt(0, 32), 1)).unwrap();
    run(&mut scheduler, &mut executor);
    assert_eq!(executor.kv_bytes(), fits.budget().usage().of(Purpose::KvCache));
    // What was written can leave the pools.
    let mut transfers = executor.transfers();
    let block = HostBlock::new(transfers.block_bytes(GroupId(0), 16).unwrap()).unwrap();
    let transfer = transfers.export(GroupId(0), CellRun { start: 0, len: 16 }, block).unwrap();
    let block = transfers.finished(&transfer).unwrap().unwrap();
    assert!(block.bytes().iter().any(|byte| *byte != 0));
    let tight = load(plan.session_bound() - 1);
    let refused = ModelExecutor::new(&tight, &registry(), &config).map(drop).unwrap_err().to_string();
    assert!(refused.contains("context of 250 tokens") && refused.contains("try "), "{refused}");
}

/// Cost-based eviction weighs the multiply-adds that recomputing a block takes with this model.
#[test]
fn blocks_cost_what_the_model_takes_to_compute_them() {
    let model = ModelConfig::from_json(
        "it",
        r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160,
        "vocab_size": 1000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "torch_dtype": "float16"}"#,
    )
    .unwrap();
    let cache: Cache = config(128, 32, 1).cache(&model).unwrap();
    let spec = cache.paged_spec().unwrap();
    let prefix = spec.prefix.as_ref().unwrap();
    // Two heads of 16 values, K and V, of 4 bytes each: in three layers, for 16 tokens.
    assert_eq!(prefix.block_bytes, [3 * 2 * (16 + 16) * 4 * 16]);
    // Per layer: Q and output of 64 by 64, K and V of 64 by 32, three matrices of 64 by 160; scores and values of a
    // visible position, 64 each.
    let per_token = 3.0 * 64.0 * f64::from(2 * 64 + 2 * 32 + 3 * 160);
    assert_eq!(prefix.cost, RecomputeCost { per_token, per_pair: 3.0 * 2.0 * 64.0 });
}

/// The shorter of two windows applies: the policy's with its sinks, the model's without sinks.
#[test]
fn the_shorter_window_counts() {
    // One group with a window of 9, one without.
    let model = load(ModelFile::Path(fixtures("parity/qwen2-window-mixed"))).unwrap();
    let groups = |window, sinks| {
        let config = CacheConfig { window, sinks, ..CacheConfig::new(64) };
        let groups = config.groups(model.config());
        let mut seen: Vec<_> = groups.iter().map(|g| (g.visibility.window, g.visibility.sinks)).collect();
        seen.sort_unstable();
        seen
    };
    assert_eq!(groups(None, 0), [(None, 0), (Some(9), 0)]);
    assert_eq!(groups(Some(8), 2), [(Some(8), 2), (Some(8), 2)]);
    assert_eq!(groups(Some(9), 2), [(Some(9), 0), (Some(9), 2)]);
    assert_eq!(groups(Some(20), 2), [(Some(9), 0), (Some(20), 2)]);
}

/// Logits rows are those requested, at most as many as reserved, and chunks end where documented.
#[test]
fn a_session_gives_the_rows_that_were_asked_for() {
    let tokens = prompt(0, 10);
    let mut s = session(model(), &CacheConfig { max_rows: 4, ..exact("contiguous", 64, 8) });
    let only = SeqId::ONLY;
    let mut heard = Vec::new();
    let done = s.prefill(only, &tokens, &mut |done| {
        heard.push(done);
        true
    });
    assert_eq!((done.unwrap(), heard), (10, vec![8, 10]));
    let vocab = model().config().vocab;
    assert_eq!((s.n_rows(), s.logits().len()), (1, vocab), "of the last token alone");
    let last = s.logits_row(0).to_vec();
    let mut whole = session(model(), &exact("contiguous", 64, 16));
    whole.forward(&[SequenceInput::chain(only, &tokens)], LogitRows::All).unwrap();
    assert_eq!(whole.n_rows(), 10);
    assert_eq!(whole.logits_row(9), last);
    s.forward(&[SequenceInput::chain(only, &tokens[..4])], LogitRows::All).unwrap();
    assert_eq!(s.n_rows(), 4, "as many as were reserved");
    let error =
        s.forward(&[SequenceInput::chain(only, &tokens[..5])], LogitRows::All).unwrap_err().to_string();
    assert!(error.contains("5 rows of logits wanted, 4 reserved"), "{error}");
    s.forward(&[SequenceInput::chain(only, &tokens[..8])], LogitRows::None).unwrap();
    assert_eq!(s.n_rows(), 0);
    let error =
        s.forward(&[SequenceInput::chain(only, &tokens[..9])], LogitRows::None).map(drop).unwrap_err();
    assert!(error.to_string().contains('9'), "{error}");
    let stops: Result<usize, _> = ModelSession::prefill(&mut s, only, &tokens, &mut |_| false);
    assert_eq!(stops.unwrap(), 8, "it was told to stop");
}
