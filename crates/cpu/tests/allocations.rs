//! A decode step allocates nothing after warm-up, as long as no segment grows, so no token waits for the allocator.
//! Accepting a path of a tree splits its sequence into more and more extents; their lists double occasionally.
//!
//! A program of its own, because its allocator counts.
mod decoding;
use decoding::*;
use kvist_cache::kinds::Visibility;
use kvist_cache::*;
use kvist_cpu::Cpu;
use kvist_device::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The draft tree of every turn, and the path that is accepted.
#[derive(Clone, Copy, Debug)]
struct Tree {
    parents: [Option<NodeId>; 4],
    accepted: &'static [NodeId],
}

const CHAIN: Tree = Tree {
    parents: [None, Some(NodeId(0)), Some(NodeId(1)), Some(NodeId(2))],
    accepted: &[NodeId(0), NodeId(1), NodeId(2), NodeId(3)],
};
const REFUTED: Tree = Tree { accepted: &[], ..BRANCHES };
const BRANCHES: Tree = Tree {
    parents: [None, Some(NodeId(0)), Some(NodeId(0)), Some(NodeId(2))],
    accepted: &[NodeId(0), NodeId(2)],
};

/// One turn with preallocated activations: a token, or a draft tree of which a path is accepted.
struct Turn {
    model: Model,
    q: Vec<f32>,
    kv: Vec<f32>,
    out: Vec<f32>,
}

impl Turn {
    fn new(model: Model) -> Self {
        let (heads, kv_heads) = (model.heads.0 as usize, model.heads.1 as usize);
        let row = 4 * model.head_dim as usize;
        let ramp = |n: usize| (0..n).map(|i| (i % 13) as f32 * 0.1 - 0.6).collect::<Vec<_>>();
        Turn { q: ramp(heads * row), kv: ramp(kv_heads * row), out: vec![0.0; heads * row], model }
    }

    fn run(&mut self, session: &mut Session, tree: Option<Tree>) {
        let Turn { model, q, kv, out } = self;
        let (heads, kv_heads) = (model.heads.0 as usize, model.heads.1 as usize);
        let head_dim = model.head_dim as usize;
        let start = session.cache.next_position(A).unwrap();
        let parents = tree.map(|tree| tree.parents);
        let new = parents.as_ref().map_or(New::Chain(1), |parents| New::Tree(parents));
        let spans = [Span { seq: A, start, new }];
        let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
        for layer in 0..model.n_layers {
            let rows = || Tensor::dense(kv, kv_heads, head_dim);
            step.attend(Attend {
                layer: LayerId(layer),
                q: Tensor::dense(q, heads, head_dim),
                kv: Some((rows(), rows())),
                out: TensorMut::dense(out, heads, head_dim),
                scale: 0.2,
                softcap: Some(30.0),
                sinks: None,
            })
            .unwrap();
        }
        step.commit().unwrap();
        if let Some(tree) = tree {
            session.cache.trees().unwrap().commit_path(A, tree.accepted).unwrap();
        }
    }
}

#[test]
fn a_decode_step_allocates_nothing_after_warm_up() {
    let window = Visibility { window: Some(40), sinks: 4 };
    // kind, visibility, tree of every turn, allocations allowed
    let kinds = [
        ("contiguous", Visibility::FULL, None, 0),
        ("contiguous", window, None, 0),
        ("ring", window, None, 0),
        ("cells", Visibility::FULL, None, 0),
        ("cells", window, None, 0),
        ("tree", Visibility::FULL, None, 0),
        ("tree", Visibility::FULL, Some(CHAIN), 0),
        ("tree", window, Some(CHAIN), 0),
        ("tree", window, Some(REFUTED), 0),
        ("tree", Visibility::FULL, Some(BRANCHES), 5),
        ("tree", window, Some(BRANCHES), 5),
    ];
    let mut bad = Vec::new();
    for storage in storages() {
        for (kind, visibility, tree, allowed) in kinds {
            let model = Model { k: storage, v: storage, visibility, max_step_tokens: 64, ..Model::default() };
            let mut session = model.session(&Cpu::default(), kind, 2_000);
            new(&mut session, &[A]);
            for chunk in 0..5 {
                model.step(&mut session, &[Span::chain(A, chunk * 60, 60)], 1); // 300: the segments have 512
            }
            let mut turn = Turn::new(model);
            let n_turns = if tree.is_some() { 20 } else { 60 };
            (0..n_turns).for_each(|_| turn.run(&mut session, tree));
            let bytes = session.pools().bytes();
            let n = allocation_counter::measure(|| (0..n_turns).for_each(|_| turn.run(&mut session, tree)));
            assert_eq!(session.pools().bytes(), bytes, "no segment grew");
            if n.count_total > allowed {
                bad.push(format!("{kind} {visibility:?}, {tree:?}, {storage}: {}", n.count_total));
            }
        }
    }
    assert!(bad.is_empty(), "allocations after warm-up:\n{}", bad.join("\n"));
}

/// Rows of f16, and batches of f32 that two strides do not describe, are converted without allocating.
#[test]
fn converted_rows_allocate_nothing_after_warm_up() {
    let model = Model { heads: (4, 2), head_dim: 32, ..Model::default() };
    let mut session = model.session(&Cpu::default(), "cells", 2_000);
    new(&mut session, &[A, B]);
    let [q_shape, kv_shape] = [4, 2].map(|heads| StridedShape::heads_first(2, heads, 3, 32));
    let len = 2 * 4 * 3 * 32;
    let (q, kv, mut out) = (vec![f16::ONE; len], vec![1f32; len / 2], vec![bf16::NAN; len]);
    let mut run = || {
        let start = session.cache.next_position(A).unwrap();
        let spans = [Span::chain(A, start, 3), Span::chain(B, start, 3)];
        let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
        for layer in 0..model.n_layers {
            let kv = Rows::F32(&kv, kv_shape);
            step.attend_rows(AttendRows {
                layer: LayerId(layer),
                q: Rows::F16(&q, q_shape),
                kv: Some((kv, Some(kv))),
                out: RowsMut::Bf16(&mut out, q_shape),
                scale: 0.2,
                softcap: None,
                sinks: None,
            })
            .unwrap();
            assert!(out.iter().all(|x| *x == bf16::ONE));
            out.fill(bf16::NAN);
        }
        step.commit().unwrap();
    };
    (0..45).for_each(|_| run()); // 270 cells: the segments have 512
    let n = allocation_counter::measure(|| (0..20).for_each(|_| run()));
    assert_eq!(n.count_total, 0);
}

/// A petabyte is refused by the budget, not by the allocator: the system is not asked.
#[test]
fn refusal_comes_before_allocation() {
    let budget = MemoryBudget::new(MIB);
    let model = Model {
        heads: (1 << 14, 1 << 14),
        head_dim: 1 << 14,
        max_step_tokens: 1 << 20,
        budget,
        ..Model::default()
    };
    let spec = model.spec(vec![u32::MAX]);
    let refused = Cpu::default().pools(&spec).err().expect("a scratch of petabytes");
    assert!(
        matches!(&refused, DeviceError::OutOfBudget(OutOfBudget { purpose: Purpose::Scratch, .. })),
        "{refused}"
    );
    assert_eq!(model.budget.usage(), Usage::default());

    // The scratch fits, the first segment does not.
    let model =
        Model { budget: MemoryBudget::new(MIB), head_dim: 1 << 12, max_step_tokens: 1, ..Model::default() };
    let mut session = model.session(&Cpu::default(), "contiguous", 2_000);
    let before = model.budget.usage();
    let spans = [Span::chain(A, 0, 1)];
    let info = allocation_counter::measure(|| {
        let refused = session.step(&StepRequest { spans: &spans });
        assert!(matches!(refused.err(), Some(StepError::Device(DeviceError::OutOfBudget(_)))));
    });
    assert!(info.bytes_total < 64 * KIB, "{} bytes allocated for a refusal", info.bytes_total);
    assert_eq!(model.budget.usage(), before);
}
