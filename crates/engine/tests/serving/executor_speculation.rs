//! Drafts in the executor's steps where something goes wrong: no token is emitted twice, and none that was not sampled.
use crate::common::*;
use kvist_cache::{CellRun, GroupId, MovePlan, PrefixSpec, StepPlan};
use kvist_cpu::Cpu;
use kvist_device::*;
use kvist_engine::executor::{ModelExecutor, PagedConfig, SampledToken, TokenSampler};
use kvist_engine::memory::CacheConfig;
use kvist_engine::speculate::{Bounds, DraftRequest, Drafter, SpeculationConfig, Speculator};
use kvist_engine::{Error, devices};
use kvist_model::{Model, ModelFile, top_two};
use kvist_scheduler::*;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

const N: u32 = 24;

fn model() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| load(ModelFile::Embedded).unwrap())
}

fn config() -> PagedConfig {
    let cache = CacheConfig {
        k: Storage::F32,
        v: Storage::F32,
        max_step_tokens: 64,
        max_rows: 32,
        ..CacheConfig::new(512)
    };
    PagedConfig { cache, block_tokens: 16, prefix: Some(PrefixSpec::default()) }
}

fn prompt() -> Vec<u32> {
    (0..30).map(|at| 300 + at * 7).collect()
}

/// Proposes a wrong token, and beside it the text's next four: an accepted path is never where it has to be.
struct BesideAWrongOne(Vec<u32>);

impl Drafter for BesideAWrongOne {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        for DraftRequest { tokens, tree, .. } in requests {
            let next = &self.0[tokens.len().min(self.0.len())..];
            let next = &next[..next.len().min(4)];
            let Some(first) = next.first() else { continue };
            tree.push(None, first ^ 1, 0.5);
            let mut parent = None;
            for token in next {
                parent = Some(tree.push(parent, *token, 0.5));
            }
        }
        Ok(())
    }
}

fn speculator(text: &[u32]) -> Speculator {
    let bounds = Bounds { tokens: 8, depth: 8, width: 2 };
    Speculator::new(
        vec![Box::new(BesideAWrongOne(text.to_vec()))],
        SpeculationConfig { bounds, adaptive: false },
    )
}

struct Greedy(Arc<Mutex<Vec<u32>>>);

impl TokenSampler for Greedy {
    fn choose(&mut self, row: RowResult<'_>) -> SampledToken {
        let RowResult::Logits(logits) = row else { panic!("{row:?} instead of logits") };
        let (token, _) = top_two(logits).expect("logits are numbers");
        self.0.lock().unwrap().push(token);
        SampledToken { token, finished: false }
    }
}

fn request(id: u64) -> Request {
    let prompt = prompt();
    let n = prompt.len() as u32;
    Request { prompt: Prompt::Tokens(prompt), ..Request::new(id, 0, n, N) }
}

/// The prompt and what follows it.
fn text() -> Vec<u32> {
    let answer = greedy(&mut session(model(), &exact("contiguous", 128, 64)), &prompt(), N as usize, false);
    [prompt(), answer].concat()
}

/// The CPU's pools, which cannot move anything.
struct Immovable(Cpu, Arc<AtomicU32>);

struct ImmovablePools(Box<dyn Pools>, Arc<AtomicU32>);

impl Backend for Immovable {
    fn id(&self) -> &'static str {
        self.0.id()
    }
    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, DeviceError> {
        Ok(Box::new(ImmovablePools(self.0.pools(spec)?, self.1.clone())))
    }
    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage> {
        self.0.usage(spec, cells)
    }
}

impl Pools for ImmovablePools {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        self.0.begin(plan)
    }
    fn attend(&mut self, plan: &StepPlan, call: Attend<'_>) -> Result<(), DeviceError> {
        self.0.attend(plan, call)
    }
    fn relocate(&mut self, _: &MovePlan) -> Result<(), DeviceError> {
        self.1.fetch_add(1, Ordering::Relaxed);
        Err(DeviceError::Unsupported("these pools move nothing".into()))
    }
    fn block_bytes(&self, group: GroupId, cells: u32) -> Option<usize> {
        self.0.block_bytes(group, cells)
    }
    fn export(
        &mut self,
        after: Ticket,
        group: GroupId,
        cells: CellRun,
        into: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        self.0.export(after, group, cells, into)
    }
    fn import(
        &mut self,
        after: Ticket,
        group: GroupId,
        cells: CellRun,
        from: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        self.0.import(after, group, cells, from)
    }
    fn finished(&mut self, transfer: &Transfer) -> Option<Result<HostBlock, DeviceError>> {
        self.0.finished(transfer)
    }
    fn inspect(
        &self,
        layer: kvist_cache::LayerId,
        side: Side,
        kv_head: u32,
        cell: u32,
        row: &mut [f32],
    ) -> Result<(), DeviceError> {
        self.0.inspect(layer, side, kv_head, cell, row)
    }
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
    fn counters(&self) -> KvCounters {
        self.0.counters()
    }
}

/// The accepted tokens are with the client when their K and V cannot be moved. They are not drawn again but computed again,
/// and the text goes on without drafts.
#[test]
fn a_path_that_cannot_be_moved_is_computed_again() {
    let (text, moves) = (text(), Arc::<AtomicU32>::default());
    let registry =
        Registry::of(Cpu::new(compute())).with(Box::new(Immovable(Cpu::new(compute()), moves.clone())));
    let (cache, mut executor) = ModelExecutor::new(model(), &registry, &config()).unwrap();
    executor.speculate(speculator(&text));
    let scheduling = Config { max_batch: 4, max_batch_tokens: 64, ..Config::default() };
    let mut scheduler = Scheduler::new(scheduling, cache, None).unwrap();
    // The second one reads the first one's blocks from the prefix index.
    for id in 0..2 {
        let heard = Arc::<Mutex<Vec<u32>>>::default();
        executor.register(RequestId(id), Box::new(Greedy(heard.clone())));
        scheduler.arrive(id, request(id)).unwrap();
        while let Iteration::Ran { .. } = scheduler.iterate(id, &mut executor) {
            assert!(executor.failure().is_none());
        }
        let ended = scheduler.drain_ended().next().expect("it ran to its end");
        assert_eq!((ended.end, ended.generated), (End::Finished, N));
        assert_eq!(*heard.lock().unwrap(), text[30..], "request {id}");
        assert_eq!(ended.hit_tokens > 0, id == 1);
        executor.unregister(RequestId(id));
    }
    assert_eq!(moves.load(Ordering::Relaxed), 1);
    let counts = executor.speculation().unwrap();
    assert_eq!((counts.drafts, counts.accepted), (1, 4), "no drafts after the failure: {counts:?}");
    assert_eq!(scheduler.counters().failed_steps, 0);
}

/// Notes what its executor's steps emit.
struct Watched(ModelExecutor, Vec<u32>);

impl Executor for Watched {
    fn draft(&mut self, now_ns: u64, batch: Batch<'_>, limit: u32, drafts: &mut BatchDrafts) {
        self.0.draft(now_ns, batch, limit, drafts);
    }
    fn execute(&mut self, now_ns: u64, step: kvist_cache::Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        self.0.execute(now_ns, step, batch, out);
        for advance in out.advances() {
            if let Emitted::Tokens(tokens) = advance.emitted {
                self.1.extend(tokens);
            }
        }
    }
}

/// A request whose sampler is gone ends at its next token, which is not known, and with a draft too.
#[test]
fn a_request_without_a_sampler_emits_no_token() {
    for drafts in [false, true] {
        let text = text();
        let registry = devices::on(&compute());
        let (cache, mut executor) = ModelExecutor::new(model(), &registry, &config()).unwrap();
        executor.speculate(drafts.then(|| speculator(&text)));
        let scheduling = Config { max_batch: 4, max_batch_tokens: 64, ..Config::default() };
        let mut scheduler = Scheduler::new(scheduling, cache, None).unwrap();
        executor.register(RequestId(0), Box::new(Greedy(Arc::default())));
        scheduler.arrive(0, request(0)).unwrap();
        let mut watched = Watched(executor, Vec::new());
        assert!(matches!(scheduler.iterate(0, &mut watched), Iteration::Ran { .. }));
        assert_eq!(watched.1, text[30..31], "the prompt's step emits a token");
        watched.0.unregister(RequestId(0));
        assert!(matches!(scheduler.iterate(1, &mut watched), Iteration::Ran { .. }));
        assert_eq!(watched.1, text[30..31]);
        let ended = scheduler.drain_ended().next().expect("it has ended");
        assert_eq!((ended.end, ended.generated), (End::Finished, 2), "drafts: {drafts}");
        assert_eq!(ended.draft_tokens > 0, drafts);
    }
}
