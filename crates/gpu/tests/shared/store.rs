//! New rows in one launch against one launch for each part of that: the same bits in queries, keys, pools and recent rows.
use crate::common::{self, Api};
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_device::*;
use kvist_gpu::{Args, Driver, Form, GpuDevice, Kernel, RecentForm};
use kvist_testing::operations::random;

const TOKENS: u32 = 3;
const HEADS: u32 = 6;
const KV_HEADS: u32 = 2;
/// Cells of K and of V.
const CELLS: [u32; 2] = [7, 9];
/// Slots of recent rows.
const SLOTS: u32 = 4;
const NONE: u32 = u32::MAX;
/// The plan: a word in front, the cell of every token, the slot of its recent row.
const PLAN: [u32; 7] = [99, 5, 0, 2, 3, NONE, 1];
/// Elements in front of the angles, of another embedding.
const FIRST_ANGLE: u32 = 6;

type Buffer = <Api as Driver>::Buffer;

struct Case {
    k: Form,
    v: Form,
    dim: u32,
    pairs: u32,
    recent: bool,
}

/// What the kernels write.
struct Written {
    q: Buffer,
    k: Buffer,
    pools: [Buffer; 2],
    recent: Buffer,
}

fn words(gpu: &Api, words: impl IntoIterator<Item = u32>) -> Buffer {
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    gpu.filled("test", &bytes).unwrap()
}

impl Case {
    /// Words of a recent row of all heads, and the first one of values in it.
    fn recent_row(&self) -> (u32, u32) {
        let side = |form: Form| if form.is_packed() { KV_HEADS * self.dim.div_ceil(2) } else { 0 };
        (side(self.k) + side(self.v), side(self.k))
    }

    /// The bits of everything that is written, from the same inputs and poisoned pools.
    fn run(&self, gpu: &Api, together: bool) -> Vec<Vec<u8>> {
        let Case { k, v, dim, pairs, .. } = *self;
        let rows = |seed, heads: u32| {
            let mut x = random(seed, (TOKENS * heads * dim) as usize, 2.0);
            x[dim as usize / 2] = f32::NAN;
            x.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        let poisoned = |n: u32| words(gpu, (0..n.max(4)).map(|_| 0x7fc1_2345));
        let angles = random(5, (FIRST_ANGLE + 2 * TOKENS * pairs) as usize, 1.0);
        let angles = words(gpu, angles.into_iter().map(f32::to_bits));
        let (plan, values) = (words(gpu, PLAN), words(gpu, rows(3, KV_HEADS)));
        // Every head's channels in another order.
        let order = words(gpu, (0..KV_HEADS).flat_map(|head| (0..dim).map(move |i| (i + 3 + head) % dim)));
        let row = self.recent_row().0;
        let written = Written {
            q: words(gpu, rows(1, HEADS)),
            k: words(gpu, rows(2, KV_HEADS)),
            pools: [(k, CELLS[0]), (v, CELLS[1])]
                .map(|(form, cells)| poisoned(KV_HEADS * cells * form.words(dim))),
            recent: poisoned((SLOTS + TOKENS) * row),
        };
        let mut recorder = Default::default();
        match together {
            true => self.together(gpu, &mut recorder, &written, [&angles, &values, &plan, &order]),
            false => self.apart(gpu, &mut recorder, &written, [&angles, &values, &plan, &order]),
        }
        let submission = gpu.submit(&mut recorder, &[]);
        gpu.wait(&submission).unwrap();
        let read = |buffer: &Buffer, words: u32| {
            let mut found = Vec::new();
            gpu.read_back(&[(buffer, 0, u64::from(4 * words.max(4)))], |bytes| found = bytes.to_vec())
                .unwrap();
            found
        };
        vec![
            read(&written.q, TOKENS * HEADS * dim),
            read(&written.k, TOKENS * KV_HEADS * dim),
            read(&written.pools[0], KV_HEADS * CELLS[0] * k.words(dim)),
            read(&written.pools[1], KV_HEADS * CELLS[1] * v.words(dim)),
            read(&written.recent, (SLOTS + TOKENS) * row),
        ]
    }

    fn together(
        &self,
        gpu: &Api,
        recorder: &mut <Api as Driver>::Recorder,
        to: &Written,
        [angles, values, plan, order]: [&Buffer; 4],
    ) {
        let Case { k, v, dim, pairs, recent } = *self;
        let (row, first_value) = self.recent_row();
        let args =
            Args::new(&[HEADS, KV_HEADS, pairs, FIRST_ANGLE, TOKENS, CELLS[0], CELLS[1], 1, 1 + TOKENS])
                .u32(SLOTS)
                .u32(row)
                .u32(first_value);
        let order = (k.wide > 0).then_some(order);
        let buffers = [
            Some(angles).filter(|_| pairs > 0),
            Some(&to.q),
            Some(&to.k),
            Some(values),
            Some(plan),
            order,
            Some(&to.pools[0]),
            Some(&to.pools[1]),
            Some(&to.recent).filter(|_| recent),
        ];
        let groups = [2 * KV_HEADS + (HEADS * pairs).div_ceil(64), TOKENS, 1];
        gpu.record(recorder, &Kernel::StoreBoth { k, v, dim, recent }, &buffers, args, groups);
    }

    fn apart(
        &self,
        gpu: &Api,
        recorder: &mut <Api as Driver>::Recorder,
        to: &Written,
        [angles, values, plan, order]: [&Buffer; 4],
    ) {
        let Case { k, v, dim, pairs, recent } = *self;
        for (x, heads) in [(&to.q, HEADS), (&to.k, KV_HEADS)].into_iter().filter(|_| pairs > 0) {
            let args = Args::new(&[heads, dim, pairs, FIRST_ANGLE, TOKENS]);
            let groups = [(heads * pairs).div_ceil(64), TOKENS, 1];
            gpu.record(recorder, &Kernel::Rope, &[Some(angles), Some(x)], args, groups);
        }
        let (row, first_value) = self.recent_row();
        let sides = [(k, &to.k, RecentForm::Plain, 0), (v, values, RecentForm::Turned, first_value)];
        for (i, (form, rows, with, first)) in sides.into_iter().enumerate() {
            let recent = recent && form.is_packed();
            let with = if recent { with } else { RecentForm::No };
            let args = Args::new(&[CELLS[i], 0, KV_HEADS, 1, 1 + TOKENS, SLOTS, row, first]);
            let kernel = Kernel::Store { form, dim, recent: with };
            let order = (form.wide > 0).then_some(order);
            let recent = recent.then_some(&to.recent);
            let buffers = [Some(rows), Some(plan), order, Some(&to.pools[i]), recent];
            gpu.record(recorder, &kernel, &buffers, args, [KV_HEADS, TOKENS, 1]);
        }
    }
}

#[test]
fn one_launch_gives_the_bits_of_four() {
    let Some(gpu) = common::driver() else { return };
    let storages = ["f16", "q8", "t4-o", "f32", "q4-rot", "bf16-rot", "f32-rot"];
    for (i, k) in common::some(0, storages.into_iter().enumerate()) {
        for (v, dim, pairs) in [(k, 64, 32), (storages[(i + 1) % storages.len()], 33, 5), (k, 33, 0)] {
            let form = |storage: Storage| Form::new(storage, dim).unwrap();
            let (k, v): (Storage, Storage) = (k.parse().unwrap(), v.parse().unwrap());
            let (k_form, v_form) = (form(k), form(v.for_values()));
            for recent in [false, k_form.is_packed() || v_form.is_packed()] {
                let case = Case { k: k_form, v: v_form, dim, pairs, recent };
                let (one, four) = (case.run(&gpu, true), case.run(&gpu, false));
                for (what, (one, four)) in ["queries", "keys", "pool of K", "pool of V", "recent rows"]
                    .iter()
                    .zip(one.iter().zip(&four))
                {
                    assert!(one == four, "{what}: {k} and {v}, {pairs} pairs of {dim}, recent: {recent}");
                }
            }
        }
    }
}

/// What is rotated before attention.
#[derive(Clone, Copy, Debug)]
enum Rotated {
    Both,
    /// Queries and keys by different embeddings.
    Apart,
    Queries,
    /// Both, but the queries twice.
    Twice,
    Neither,
}

/// The bits of queries, keys and results of attention.
fn attended(device: &GpuDevice<Api>, rotated: Rotated) -> Vec<u32> {
    let (n, heads, kv_heads, dim) = (TOKENS as usize, HEADS as usize, KV_HEADS as usize, 16);
    let group = GroupSpec { capacity_tokens: 64, visibility: Visibility::FULL, max_step_tokens: 8 };
    let mut cache = Cache::new(vec![kinds::build("contiguous", &group).unwrap()]);
    let layer = LayerSpec::new(GroupId(0), LayerId(0), KV_HEADS, dim as u32);
    let spec = PoolSpec {
        layout: Layout { n_heads: HEADS, layers: vec![layer] },
        k: Storage::F16,
        v: Storage::F32,
        capacity_cells: cache.capacity_cells(),
        max_step_tokens: 8,
        budget: MemoryBudget::unlimited(),
        channels: None,
        recent: Recent::default(),
    };
    let shape = ModelShape {
        hidden: heads * dim,
        n_heads: heads,
        n_kv_heads: kv_heads,
        head_dim: dim,
        vocab: 8,
        intermediate: 16,
        routing: None,
        rope_pairs: vec![3, 8],
        features: 0,
    };
    let limits = StepLimits { max_tokens: 8, max_rows: 1 };
    let ropes = [3, 8].map(|pairs| RopeTable {
        inverse_frequencies: (0..pairs).map(|i| 1.0 / (1.0 + i as f32)).collect(),
        attention_factor: 1.25,
    });
    let mut pools = device.kv_pools(device, &spec).unwrap();
    let mut stream = device.stream(&shape, &ropes, &limits).unwrap();
    let s = &mut stream;
    let mut plan = StepPlan::default();
    let spans = [Span::chain(SeqId::ONLY, 0, TOKENS)];
    let mut step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
    let taps = [LayerId(0); 3];
    let inputs = StepInputs { tokens: &[1, 2, 3], rows: &[], taps: &taps, given: Given::Nothing, mass: None };
    let plan = step.with_reads();
    device.begin(s, &mut pools, plan, &inputs).unwrap();
    let mut buffer = |seed, heads: usize| {
        let mut buffer = device.buffer(RowsOf::Tokens, heads * dim, &limits).unwrap();
        device.upload(s, &random(seed, n * heads * dim, 1.0), &mut buffer);
        buffer
    };
    let (mut q, mut k, v) = (buffer(1, heads), buffer(2, kv_heads), buffer(3, kv_heads));
    let mut out = buffer(4, heads);
    let weight = device.vector(vec![0.5; dim]).unwrap();
    let s = &mut stream;
    match rotated {
        Rotated::Neither => {}
        Rotated::Queries => device.rope(s, &mut q, dim, 1),
        Rotated::Apart | Rotated::Both | Rotated::Twice => {
            if matches!(rotated, Rotated::Twice) {
                device.rope(s, &mut q, dim, 1);
            }
            device.rope(s, &mut q, dim, 1);
            // Of another buffer than the one that waits.
            device.norm_in_place(s, &mut k, Norm { weight: &weight, eps: 1e-5 });
            device.rope(s, &mut k, dim, usize::from(!matches!(rotated, Rotated::Apart)));
        }
    }
    let call = LayerAttention {
        layer: LayerId(0),
        q: &q,
        kv: Some((&k, &v)),
        out: &mut out,
        head_dim: dim,
        scale: 0.25,
        softcap: None,
        sinks: None,
    };
    device.attend(s, &mut pools, plan, call).unwrap();
    [&q, &k, &out].into_iter().enumerate().for_each(|(i, x)| device.tap(s, i, x));
    let ticket = device.submit(s).unwrap();
    device.wait(s, ticket).unwrap();
    GpuDevice::<Api>::output(s).taps.iter().flatten().map(|x| x.to_bits()).collect()
}

/// Embeddings that wait for attention give the bits of those that do not: in pools in parts they have a launch of their own.
#[test]
fn embeddings_wait_for_attention() {
    let Some(whole) = common::device() else { return };
    let Some(in_parts) = common::device_in_parts(64 * 16 * 4) else { return };
    let mut all = Vec::new();
    for rotated in [Rotated::Both, Rotated::Apart, Rotated::Queries, Rotated::Twice, Rotated::Neither] {
        let found = attended(&whole, rotated);
        assert!(found == attended(&in_parts, rotated), "{rotated:?}");
        assert!(!all.contains(&found), "{rotated:?} is another case");
        all.push(found);
    }
}
