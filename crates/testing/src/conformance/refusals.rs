//! What a backend must refuse, and what must be unchanged afterwards.
use super::transfers::finish;
use kvist_cache::kinds::{self, GroupSpec, KINDS, Visibility};
use kvist_cache::*;
use kvist_device::*;
use std::sync::Arc;

/// A backend, and the storages in which it is tested.
#[derive(Clone, Copy)]
struct Subject<'b> {
    backend: &'b dyn Backend,
    k: Storage,
    v: Storage,
}

impl<'b> std::ops::Deref for Subject<'b> {
    type Target = dyn Backend + 'b;
    fn deref(&self) -> &Self::Target {
        self.backend
    }
}

/// Tests every refusal, with K in q8 and V in f16. `Err` is a table of those that were missing or that changed something.
pub fn refusals(backend: &dyn Backend) -> Result<(), String> {
    refusals_in(backend, Storage::Q8, Storage::F16)
}

/// [`refusals`] with K and V in other storages, for backends without q8.
pub fn refusals_in(backend: &dyn Backend, k: Storage, v: Storage) -> Result<(), String> {
    type Check = fn(Subject<'_>) -> Result<(), String>;
    const TABLE: [(&str, Check); 10] = [
        ("a plan that was not begun, or not this one", stale_plan),
        ("a plan without reads", without_reads),
        ("activations of a wrong shape", wrong_shapes),
        ("layers that do not exist, or out of order", layer_order),
        ("inspection out of range", inspect_out_of_range),
        ("a layout no model has", bad_layout),
        ("recurrent layers, until a device has them", recurrent_layers),
        ("growth past the budget", out_of_budget),
        ("no growth within it, after fewer cells", fewer_cells),
        ("transfers that do not fit", transfers),
    ];
    let rows = TABLE.iter().filter_map(|(what, check)| {
        let why = check(Subject { backend, k, v }).err()?;
        Some(format!("{}: {what}: {why}\n", backend.id()))
    });
    let bad: String = rows.collect();
    if bad.is_empty() { Ok(()) } else { Err(bad) }
}

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;

impl Subject<'_> {
    fn spec(&self, budget: &Arc<MemoryBudget>) -> PoolSpec {
        let layer = |owner| LayerSpec::new(GroupId(0), LayerId(owner), KV_HEADS as u32, HEAD_DIM as u32);
        PoolSpec {
            layout: Layout { n_heads: HEADS as u32, layers: vec![layer(0), layer(1), layer(0)] },
            k: self.k,
            v: self.v,
            capacity_cells: vec![2_000],
            max_step_tokens: 300,
            budget: budget.clone(),
            channels: None,
            recent: Recent::default(),
        }
    }
}

fn cache() -> Cache {
    let group = GroupSpec { capacity_tokens: 2_000, visibility: Visibility::FULL, max_step_tokens: 300 };
    let contiguous = KINDS[0].build;
    Cache::new(vec![contiguous(&group).expect("contiguous serves any group")])
}

fn session(backend: Subject<'_>, budget: &Arc<MemoryBudget>) -> Result<Session, String> {
    let spec = backend.spec(budget);
    let pools = backend.pools(&spec).map_err(|e| e.to_string())?;
    Ok(Session::new(cache(), pools, &spec))
}

/// Inputs of ones for one call, with lengths that a test can make wrong.
struct Call {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
}

impl Call {
    fn new(n_tokens: usize) -> Self {
        let (wide, narrow) = (n_tokens * HEADS * HEAD_DIM, n_tokens * KV_HEADS * HEAD_DIM);
        Call { q: vec![1.0; wide], k: vec![1.0; narrow], v: vec![1.0; narrow], out: vec![f32::NAN; wide] }
    }
    fn of(&mut self, layer: u16, kv: bool) -> Attend<'_> {
        let Call { q, k, v, out } = self;
        let kv = kv.then(|| (Tensor::dense(k, KV_HEADS, HEAD_DIM), Tensor::dense(v, KV_HEADS, HEAD_DIM)));
        Attend {
            layer: LayerId(layer),
            q: Tensor::dense(q, HEADS, HEAD_DIM),
            kv,
            out: TensorMut::dense(out, HEADS, HEAD_DIM),
            scale: 1.0,
            softcap: None,
            sinks: None,
        }
    }
}

fn chain(session: &Session, n_tokens: u32) -> [Span<'static>; 1] {
    let start = session.cache.next_position(SeqId::ONLY).expect("contiguous has its only sequence");
    [Span::chain(SeqId::ONLY, start, n_tokens)]
}

/// Runs a whole step with inputs of ones. Every output must be one.
fn step(session: &mut Session, n_tokens: u32) -> Result<(), StepError> {
    let mut call = Call::new(n_tokens as usize);
    let spans = chain(session, n_tokens);
    let mut step = session.step(&StepRequest { spans: &spans })?;
    for layer in 0..3 {
        step.attend(call.of(layer, layer < 2))?;
        let is_one = |x: &f32| (x - 1.0).abs() <= 1e-2; // fails on NaN
        if let Some(wrong) = call.out.iter().find(|x| !is_one(x)) {
            return Err(DeviceError::Unsupported(format!("ones attended to ones give {wrong}")).into());
        }
        call.out.fill(f32::NAN);
    }
    Ok(step.commit()?)
}

fn must<T, E: std::fmt::Display>(done: Result<T, E>, what: &str) -> Result<T, String> {
    done.map_err(|e| format!("{what}: {e}"))
}

macro_rules! refused {
    ($done:expr, $error:pat, $what:expr) => {
        match $done {
            Err($error) => {}
            Err(other) => return Err(format!("{}: refused as {other:?}", $what)),
            Ok(_) => return Err(format!("{}: accepted", $what)),
        }
    };
}

fn stale_plan(backend: Subject<'_>) -> Result<(), String> {
    let mut pools = must(backend.pools(&backend.spec(&MemoryBudget::unlimited())), "pools")?;
    let (mut cache, mut plan, mut call) = (cache(), StepPlan::default(), Call::new(1));
    let spans = [Span::chain(SeqId::ONLY, 0, 1)];
    let request = StepRequest { spans: &spans };
    {
        let mut step = must(Step::begin(&mut cache, &request, &mut plan), "step")?;
        let plan = step.with_reads();
        refused!(pools.attend(plan, call.of(0, true)), DeviceError::StalePlan, "never begun");
        must(pools.begin(plan), "begin")?;
        must(pools.attend(plan, call.of(0, true)), "attend")?;
    }
    let mut step = must(Step::begin(&mut cache, &request, &mut plan), "step")?;
    let plan = step.with_reads();
    refused!(pools.attend(plan, call.of(0, true)), DeviceError::StalePlan, "another was begun");
    must(pools.begin(plan), "begin")?;
    must(pools.attend(plan, call.of(0, true)), "attend")
}

fn without_reads(backend: Subject<'_>) -> Result<(), String> {
    let mut pools = must(backend.pools(&backend.spec(&MemoryBudget::unlimited())), "pools")?;
    let (mut cache, mut plan) = (cache(), StepPlan::default());
    let spans = [Span::chain(SeqId::ONLY, 0, 1)];
    let step = must(Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan), "step")?;
    refused!(pools.begin(step.plan()), DeviceError::Unsupported(_), "begin");
    if pools.bytes() == 0 { Ok(()) } else { Err(format!("it holds {} bytes", pools.bytes())) }
}

fn wrong_shapes(backend: Subject<'_>) -> Result<(), String> {
    let mut session = session(backend, &MemoryBudget::unlimited())?;
    must(step(&mut session, 2), "a first step")?;
    let spans = chain(&session, 3);
    {
        let mut step = must(session.step(&StepRequest { spans: &spans }), "step")?;
        for spoilt in ["q", "k", "v", "out"] {
            let mut call = Call::new(3);
            match spoilt {
                "q" => call.q.truncate(call.q.len() - 1),
                "k" => call.k.truncate(call.k.len() - 1),
                "v" => call.v.truncate(call.v.len() - 1),
                _ => call.out.truncate(call.out.len() - 1),
            }
            match step.attend(call.of(0, true)) {
                Err(DeviceError::Shape { what, .. }) if what == spoilt => {}
                other => return Err(format!("{spoilt} too short: {other:?}")),
            }
        }
        let mut call = Call::new(3);
        let attend = Attend { sinks: Some(&[0.0; HEADS - 1]), ..call.of(0, true) };
        refused!(step.attend(attend), DeviceError::Shape { what: "sinks", .. }, "sinks of fewer heads");
        let (mut call, full) = (Call::new(3), Call::new(3));
        let huge = Tensor::strided(&full.q, usize::MAX / 2, HEAD_DIM);
        let attend = Attend { q: huge, ..call.of(0, true) };
        refused!(step.attend(attend), DeviceError::Shape { .. }, "a stride that overflows");
        // A refused call has had no effect, and can be repeated correctly.
        must(step.attend(call.of(0, true)), "a right call after wrong ones")?;
    }
    must(step(&mut session, 3), "a step after wrong ones")
}

fn layer_order(backend: Subject<'_>) -> Result<(), String> {
    use DeviceError::{LayerOrder, UnknownLayer};
    let mut session = session(backend, &MemoryBudget::unlimited())?;
    must(step(&mut session, 1), "a first step")?;
    let before = session.cache.report();
    let (spans, mut call) = (chain(&session, 1), Call::new(1));
    {
        let mut step = must(session.step(&StepRequest { spans: &spans }), "step")?;
        refused!(step.attend(call.of(3, true)), UnknownLayer { n_layers: 3, .. }, "layer 3 of 3");
        refused!(step.attend(call.of(u16::MAX, false)), UnknownLayer { .. }, "layer 65535");
        refused!(step.attend(call.of(2, false)), LayerOrder(LayerId(2)), "a borrower before its owner");
        refused!(step.attend(call.of(0, false)), LayerOrder(LayerId(0)), "an owner without K and V");
        must(step.attend(call.of(0, true)), "layer 0")?;
        refused!(step.attend(call.of(0, true)), LayerOrder(LayerId(0)), "an owner twice");
        refused!(step.attend(call.of(2, true)), LayerOrder(LayerId(2)), "a borrower with K and V");
        must(step.attend(call.of(2, false)), "layer 2")?;
        refused!(step.commit(), LayerOrder(LayerId(1)), "a commit before layer 1");
    }
    if session.cache.report() != before {
        return Err("a refused commit changed the cache".into());
    }
    must(step(&mut session, 1), "a step afterwards")?;

    // The pools enforce this themselves, without a session.
    let mut pools = must(backend.pools(&backend.spec(&MemoryBudget::unlimited())), "pools")?;
    let (mut cache, mut plan) = (cache(), StepPlan::default());
    let spans = [Span::chain(SeqId::ONLY, 0, 1)];
    let mut step = must(Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan), "step")?;
    let plan = step.with_reads();
    must(pools.begin(plan), "begin")?;
    refused!(pools.attend(plan, call.of(3, true)), UnknownLayer { .. }, "pools: layer 3 of 3");
    refused!(pools.attend(plan, call.of(2, true)), LayerOrder(_), "pools: a borrower with K and V");
    refused!(pools.attend(plan, call.of(1, false)), LayerOrder(_), "pools: an owner without");
    Ok(())
}

fn inspect_out_of_range(backend: Subject<'_>) -> Result<(), String> {
    let mut session = session(backend, &MemoryBudget::unlimited())?;
    let mut row = [f32::NAN; HEAD_DIM];
    let pools = session.pools();
    refused!(
        pools.inspect(LayerId(0), Side::K, 0, 0, &mut row),
        DeviceError::OutOfRange { what: "cell", .. },
        "a cell of empty pools"
    );
    must(step(&mut session, 1), "a step")?;
    let pools = session.pools();
    for side in [Side::K, Side::V] {
        for layer in 0..3 {
            must(pools.inspect(LayerId(layer), side, 1, 0, &mut row), "the written row")?;
            if !row.iter().all(|x| (x - 1.0).abs() <= 1e-2) {
                return Err(format!("layer {layer} {side:?} holds {row:?}, not ones"));
            }
        }
        refused!(
            pools.inspect(LayerId(3), side, 0, 0, &mut row),
            DeviceError::UnknownLayer { n_layers: 3, .. },
            "layer 3 of 3"
        );
        refused!(
            pools.inspect(LayerId(0), side, 2, 0, &mut row),
            DeviceError::OutOfRange { what: "KV head", index: 2, len: 2 },
            "head 2 of 2"
        );
        for cell in [2_000, u32::MAX] {
            refused!(
                pools.inspect(LayerId(0), side, 0, cell, &mut row),
                DeviceError::OutOfRange { what: "cell", .. },
                "a cell past the capacity"
            );
        }
        refused!(
            pools.inspect(LayerId(0), side, 0, 0, &mut row[1..]),
            DeviceError::Shape { .. },
            "a row too short"
        );
    }
    Ok(())
}

fn bad_layout(backend: Subject<'_>) -> Result<(), String> {
    let budget = MemoryBudget::unlimited();
    let good = backend.spec(&budget);
    type Spoil = fn(&mut Layout);
    let spoils: [(&str, Spoil); 6] = [
        ("heads that do not divide", |layout| layout.n_heads = 3),
        ("no head_dim", |layout| layout.layers[1].k_dim = 0),
        ("no KV heads", |layout| layout.layers[1].n_kv_heads = 0),
        ("a borrower of a later layer", |layout| layout.layers[0].owner = LayerId(2)),
        ("a borrower of a borrower", |layout| {
            layout.layers.push(LayerSpec { owner: LayerId(2), ..layout.layers[2] })
        }),
        ("a borrower of another shape", |layout| layout.layers[2].k_dim = 64),
    ];
    for (what, spoil) in spoils {
        let mut spec = good.clone();
        spoil(&mut spec.layout);
        refused!(backend.pools(&spec), DeviceError::Layout(_), what);
    }
    if budget.usage() == Usage::default() { Ok(()) } else { Err("refused pools hold bytes".into()) }
}

/// The refusal names what is missing, and the backend.
fn recurrent_layers(backend: Subject<'_>) -> Result<(), String> {
    let mut spec = backend.spec(&MemoryBudget::unlimited());
    spec.layout.layers.push(LayerSpec::recurrent(GroupId(0), LayerId(3), 4096));
    let error = match backend.pools(&spec) {
        Err(DeviceError::Unsupported(error)) => error,
        Err(other) => return Err(format!("refused as {other:?}")),
        Ok(_) => return Err("accepted".into()),
    };
    match error.contains("recurrent") && error.contains(backend.id()) {
        true => Ok(()),
        false => Err(error),
    }
}

fn out_of_budget(backend: Subject<'_>) -> Result<(), String> {
    let all = backend.spec(&MemoryBudget::unlimited());
    let usage = |cells| backend.usage(&all, &[cells]).ok_or("the usage overflows");
    // A budget for 256 cells and for all but one byte of one more cell.
    let budget = MemoryBudget::new(usage(257)?.total() - 1);
    let mut session = session(backend, &budget)?;
    if budget.usage() != usage(0)? {
        return Err(format!("empty pools hold {:?}, not {:?}", budget.usage(), usage(0)?));
    }
    must(step(&mut session, 255), "255 cells")?;
    must(step(&mut session, 1), "256 cells")?;
    let (used, report) = (budget.usage(), session.cache.report());
    if used != usage(256)? {
        return Err(format!("256 cells hold {used:?}, not {:?}", usage(256)?));
    }
    let counters = session.pools().counters();
    for n_tokens in [1, 2, 300] {
        let refused = step(&mut session, n_tokens);
        refused!(
            refused,
            StepError::Device(DeviceError::OutOfBudget(OutOfBudget { purpose: Purpose::KvCache, .. })),
            format!("{n_tokens} cells too many")
        );
    }
    let mut row = [0.0; HEAD_DIM];
    for layer in 0..2 {
        for side in [Side::K, Side::V] {
            refused!(
                session.pools().inspect(LayerId(layer), side, 0, 256, &mut row),
                DeviceError::OutOfRange { what: "cell", .. },
                format!("layer {layer} grew although all could not")
            );
        }
    }
    if budget.usage() != used || session.pools().bytes() != used.of(Purpose::KvCache) {
        return Err(format!("the refusal left {:?} of {used:?}", budget.usage()));
    }
    if session.cache.report() != report || session.pools().counters() != counters {
        return Err("the refusal changed the cache".into());
    }
    // A shortened sequence continues within the reserved memory.
    must(session.cache.rewinds().expect("contiguous rewinds").rewind(250), "rewind")?;
    must(step(&mut session, 6), "six cells written again")?;
    if budget.usage() != used {
        return Err(format!("cells written again took {:?}, not {used:?}", budget.usage()));
    }
    drop(session);
    if budget.usage() != Usage::default() {
        return Err(format!("after the end {:?} are left", budget.usage()));
    }

    // Once another reservation is released, the refused step runs.
    let budget = MemoryBudget::new(usage(257)?.total());
    let mut session = self::session(backend, &budget)?;
    must(step(&mut session, 256), "256 cells")?;
    let other = must(budget.reserve(Purpose::Weights, 1), "one byte for another")?;
    refused!(step(&mut session, 1), StepError::Device(DeviceError::OutOfBudget(_)), "one byte too few");
    drop(other);
    must(step(&mut session, 1), "the same step with that byte")?;
    if budget.usage() == usage(257)? { Ok(()) } else { Err(format!("257 cells hold {:?}", budget.usage())) }
}

/// Pools that had more recent rows than they have cells now grow to every cell of a budget that is just large enough.
fn fewer_cells(backend: Subject<'_>) -> Result<(), String> {
    const CELLS: u32 = 64;
    let spec = |budget: &Arc<MemoryBudget>| PoolSpec {
        recent: Recent { tokens: 16, sequences: 8 },
        ..backend.spec(budget)
    };
    let bound = backend.bound(&spec(&MemoryBudget::unlimited())).ok_or("the bound overflows")?;
    let all = MemoryBudget::new(bound.total());
    let spec = spec(&must(all.promise(&bound), "a promise")?);
    let group = GroupSpec { capacity_tokens: 2_000, visibility: Visibility::FULL, max_step_tokens: 300 };
    let cache = Cache::new(vec![must(kinds::build("paged", &group), "a paged cache")?]);
    let mut session = Session::new(cache, must(backend.pools(&spec), "pools")?, &spec);
    must(session.cache.sequences().expect("paged has them").seq_new(SeqId::ONLY), "a sequence")?;
    must(session.resize(&[CELLS]), "fewer cells")?;
    must(step(&mut session, CELLS), "as many tokens")?;
    must(session.resize(&[2_000]), "all cells")?;
    for n_tokens in [300, 300, 300, 300, 300, 300, 2_000 - 6 * 300 - CELLS] {
        must(step(&mut session, n_tokens), "more tokens")?;
    }
    match (all.usage(), all.free()) {
        (used, 0) if used == bound => Ok(()),
        (used, free) => Err(format!("full pools hold {used:?} of {bound:?}, and {free} bytes are free")),
    }
}

fn transfers(backend: Subject<'_>) -> Result<(), String> {
    const G: GroupId = GroupId(0);
    let all = backend.spec(&MemoryBudget::unlimited());
    let bytes = |cells| backend.usage(&all, &[cells]).map(|usage| usage.total()).ok_or("the usage overflows");
    let budget = MemoryBudget::new(bytes(257)? - 1);
    let mut pools = must(backend.pools(&backend.spec(&budget)), "pools")?;
    let size = |pools: &dyn Pools, cells| pools.block_bytes(G, cells).ok_or("no size of a block");
    let block = |len: usize| -> Result<HostBlock, String> {
        let mut block = must(HostBlock::new(len), "a block")?;
        block.bytes_mut().fill(1);
        Ok(block)
    };
    let ten = size(&*pools, 10)?;
    if size(&*pools, 1)? * 10 != ten || pools.block_bytes(GroupId(1), 1).is_some() {
        return Err("the sizes of blocks are wrong".into());
    }
    let run = |start, len| CellRun { start, len };
    let transfer = pools.import(Ticket::START, G, run(246, 10), block(ten)?);
    let block_again = must(finish(&mut *pools, transfer), "import of cells that no step has written")?;
    let before = (budget.usage(), pools.bytes(), pools.counters());

    let cases = [
        ("another group", GroupId(1), run(0, 10), ten),
        ("a group past all", GroupId(u16::MAX), run(0, 10), ten),
        ("cells past the pools", G, run(250, 10), ten),
        ("cells past the capacity", G, run(1_995, 10), ten),
        ("cells past all numbers", G, run(u32::MAX - 4, 10), ten),
        ("a block too short", G, run(0, 10), ten - 1),
        ("a block too long", G, run(0, 10), ten + 1),
        ("an empty block", G, run(0, 10), 0),
    ];
    for (what, group, cells, len) in cases {
        for import in [false, true] {
            let given = block(len)?;
            let refused = match import {
                true => pools.import(Ticket::START, group, cells, given.clone()),
                false => pools.export(Ticket::START, group, cells, given.clone()),
            };
            let what = format!("{what}, import: {import}");
            let Err(TransferRefused { error, block }) = refused else {
                return Err(format!("{what}: accepted"));
            };
            match error {
                DeviceError::OutOfRange { what: "layer group", .. } if group != G => {}
                DeviceError::OutOfBudget(_) if import && cells.start == 250 => {}
                DeviceError::OutOfRange { what: "cell", .. } if cells.start >= 250 => {}
                DeviceError::BlockSize { expected, got } if (expected, got) == (ten, len) && len != ten => {}
                other => return Err(format!("{what}: refused as {other:?}")),
            }
            if block != given {
                return Err(format!("{what}: the block was changed"));
            }
        }
    }
    if before != (budget.usage(), pools.bytes(), pools.counters()) {
        return Err("a refusal changed the pools".into());
    }
    let transfer = must(pools.export(Ticket::START, G, run(246, 10), block(ten)?), "export")?;
    let exported = loop {
        if let Some(done) = pools.finished(&transfer) {
            break must(done, "export")?;
        }
    };
    if exported != block_again {
        return Err("a refusal changed the cells".into());
    }
    let done = pools.finished(&transfer).ok_or("a transfer that has ended runs")?;
    refused!(done, DeviceError::UnknownTransfer, "a block that was returned already");
    let mut others = must(backend.pools(&all), "pools")?;
    let transfer = must(pools.export(Ticket::START, G, run(246, 10), exported), "export")?;
    let done = others.finished(&transfer).ok_or("a transfer of other pools runs")?;
    refused!(done, DeviceError::UnknownTransfer, "a transfer of other pools");
    must(finish(&mut *pools, Ok(transfer)), "the same transfer, asked of its own pools")?;
    Ok(())
}
