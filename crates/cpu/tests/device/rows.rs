//! Rows in the caller's memory: any dtype at any strides gives what a naive copy to dense f32 rows gives, bit for bit, on
//! the CPU and on the reference, and what the scalar reference computes.
use crate::decoding::{A, B, new};
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_cpu::Cpu;
use kvist_device::reference::Reference;
use kvist_device::*;
use kvist_testing::SplitMix64;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Dtype {
    F32,
    F16,
    Bf16,
}
use Dtype::*;

/// Fills outputs, and everything between rows.
const POISON: u32 = 0x7fc0_dead; // a NaN
const POISON_16: u16 = 0x7fad; // a NaN in f16 and bf16

/// A tensor in the caller's memory.
#[derive(Debug)]
struct Owned {
    dtype: Dtype,
    shape: StridedShape,
    f32: Vec<f32>,
    f16: Vec<f16>,
    bf16: Vec<bf16>,
}

impl Owned {
    fn poisoned(dtype: Dtype, shape: StridedShape, len: usize) -> Self {
        let len_of = |of| if of == dtype { len } else { 0 };
        Owned {
            dtype,
            shape,
            f32: vec![f32::from_bits(POISON); len_of(F32)],
            f16: vec![f16::from_bits(POISON_16); len_of(F16)],
            bf16: vec![bf16::from_bits(POISON_16); len_of(Bf16)],
        }
    }

    /// A tensor whose axes lie in a random order in memory, most with gaps between them.
    fn strided(random: &mut SplitMix64, sizes: [usize; 4]) -> Self {
        let mut axes = [0, 1, 2];
        (1..3).for_each(|i| axes.swap(i, random.index(i + 1)));
        let (mut strides, mut span) = ([0, 0, 0, 1], sizes[3]);
        for axis in axes {
            strides[axis] = span + random.index(2) * random.index(4);
            span = strides[axis] * sizes[axis];
        }
        Owned::poisoned(random.pick(&[F32, F16, Bf16]), StridedShape { sizes, strides }, span)
    }

    /// The same with random rows.
    fn filled(random: &mut SplitMix64, sizes: [usize; 4]) -> Self {
        let mut tensor = Owned::strided(random, sizes);
        for at in tensor.places() {
            let x = (random.unit() * 2.0 - 1.0) as f32;
            match tensor.dtype {
                F32 => tensor.f32[at] = x,
                F16 => tensor.f16[at] = f16::from_f32(x),
                Bf16 => tensor.bf16[at] = bf16::from_f32(x),
            }
        }
        tensor
    }

    /// Where the elements are, in the order of a dense `[tokens, heads, dim]` tensor.
    fn places(&self) -> Vec<usize> {
        let StridedShape { sizes, strides } = self.shape;
        let mut places = Vec::new();
        for entry in 0..sizes[0] {
            for token in 0..sizes[1] {
                for head in 0..sizes[2] {
                    for i in 0..sizes[3] {
                        let index = [entry, token, head, i];
                        places.push(index.iter().zip(strides).map(|(index, stride)| index * stride).sum());
                    }
                }
            }
        }
        places
    }

    /// A naive copy: dense f32 rows.
    fn dense(&self) -> Vec<f32> {
        let element = |at: usize| match self.dtype {
            F32 => self.f32[at],
            F16 => self.f16[at].to_f32(),
            Bf16 => self.bf16[at].to_f32(),
        };
        self.places().into_iter().map(element).collect()
    }

    fn rows(&self) -> Rows<'_> {
        match self.dtype {
            F32 => Rows::F32(&self.f32, self.shape),
            F16 => Rows::F16(&self.f16, self.shape),
            Bf16 => Rows::Bf16(&self.bf16, self.shape),
        }
    }

    fn rows_mut(&mut self) -> RowsMut<'_> {
        match self.dtype {
            F32 => RowsMut::F32(&mut self.f32, self.shape),
            F16 => RowsMut::F16(&mut self.f16, self.shape),
            Bf16 => RowsMut::Bf16(&mut self.bf16, self.shape),
        }
    }

    /// Whether element `at` is the value of its dtype that is nearest to `x`; of two, the one with the even code.
    fn is_nearest(&self, at: usize, x: f32) -> bool {
        let (bits, decode): (u16, fn(u16) -> f64) = match self.dtype {
            F32 => return self.f32[at].to_bits() == x.to_bits(),
            F16 => (self.f16[at].to_bits(), |bits| f16::from_bits(bits).to_f64()),
            Bf16 => (self.bf16[at].to_bits(), |bits| bf16::from_bits(bits).to_f64()),
        };
        let off = |bits| (decode(bits) - f64::from(x)).abs();
        let closer = |other| off(bits) < off(other) || off(bits) == off(other) && bits % 2 == 0;
        (bits & 0x7fff == 0 || closer(bits - 1)) && closer(bits + 1)
    }

    /// Poisons the rows. Returns whether all elements are poisoned then: nothing was written between the rows.
    fn untouched_between_rows(&mut self) -> bool {
        for at in self.places() {
            match self.dtype {
                F32 => self.f32[at] = f32::from_bits(POISON),
                F16 => self.f16[at] = f16::from_bits(POISON_16),
                Bf16 => self.bf16[at] = bf16::from_bits(POISON_16),
            }
        }
        self.f32.iter().all(|x| x.to_bits() == POISON)
            && self.f16.iter().all(|x| x.to_bits() == POISON_16)
            && self.bf16.iter().all(|x| x.to_bits() == POISON_16)
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    heads: (usize, usize), // query heads, KV heads
    dim: usize,
}

impl Case {
    /// Two owners and a layer that borrows from the first.
    fn spec(&self, budget: std::sync::Arc<MemoryBudget>) -> PoolSpec {
        let layer = |owner| LayerSpec::new(GroupId(0), LayerId(owner), self.heads.1 as u32, self.dim as u32);
        PoolSpec {
            layout: Layout { n_heads: self.heads.0 as u32, layers: vec![layer(0), layer(1), layer(0)] },
            k: Storage::F32,
            v: Storage::F32,
            capacity_cells: vec![64],
            max_step_tokens: 16,
            budget,
            channels: None,
            recent: Recent::default(),
        }
    }

    fn session(&self, backend: &dyn Backend, budget: std::sync::Arc<MemoryBudget>) -> Session {
        let group = GroupSpec { capacity_tokens: 64, visibility: Visibility::FULL, max_step_tokens: 16 };
        let spec = self.spec(budget);
        let cache = Cache::new(vec![kinds::build("cells", &group).unwrap()]);
        let mut session = Session::new(cache, backend.pools(&spec).unwrap(), &spec);
        new(&mut session, &[A, B]);
        session
    }
}

/// Runs a layer over dense f32 rows.
fn attend_dense(step: &mut SessionStep<'_>, case: &Case, layer: u16, rows: &[Vec<f32>; 3]) -> Vec<f32> {
    let (heads, kv_heads) = case.heads;
    let mut out = vec![f32::from_bits(POISON); rows[0].len()];
    let tensor = |rows| Tensor::dense(rows, kv_heads, case.dim);
    step.attend(Attend {
        layer: LayerId(layer),
        q: Tensor::dense(&rows[0], heads, case.dim),
        kv: (layer < 2).then(|| (tensor(&rows[1]), tensor(&rows[2]))),
        out: TensorMut::dense(&mut out, heads, case.dim),
        scale: 0.7,
        softcap: None,
        sinks: None,
    })
    .unwrap();
    out
}

#[test]
fn any_rows_give_what_a_naive_copy_gives() {
    let cpu = Cpu::default();
    for seed in 0..200 {
        let mut random = SplitMix64(seed);
        let heads = random.pick(&[(1, 1), (3, 1), (4, 2), (6, 3), (5, 5)]);
        let case = Case { heads, dim: random.pick(&[1, 5, 16, 40, 64, 80]) };
        let backends: [&dyn Backend; 2] = [&cpu, &Reference];
        let backend = backends[random.index(2)];
        let session = |backend: &dyn Backend| case.session(backend, MemoryBudget::unlimited());
        let (mut rows, mut naive, mut scalar) = (session(backend), session(backend), session(&Reference));
        let (batch, mut start) = (1 + random.index(2), 0);
        for _ in 0..3 {
            let n = 1 + random.below(5);
            let spans = &[Span::chain(A, start, n), Span::chain(B, start, n)][..batch];
            let request = StepRequest { spans };
            let mut steps = [&mut rows, &mut naive, &mut scalar].map(|it| it.step(&request).unwrap());
            for layer in 0..3 {
                let sizes = |heads| [batch, n as usize, heads, case.dim];
                let [q, k, v] =
                    [heads.0, heads.1, heads.1].map(|heads| Owned::filled(&mut random, sizes(heads)));
                let mut out = Owned::strided(&mut random, sizes(heads.0));
                let what =
                    format!("seed {seed}, {}, {case:?}, layer {layer}: {q:?} {k:?} {v:?}", backend.id());
                let call = AttendRows {
                    layer: LayerId(layer),
                    q: q.rows(),
                    kv: (layer < 2).then(|| (k.rows(), Some(v.rows()))),
                    out: out.rows_mut(),
                    scale: 0.7,
                    softcap: None,
                    sinks: None,
                };
                steps[0].attend_rows(call).unwrap_or_else(|error| panic!("{what}: {error}"));
                let dense = [q.dense(), k.dense(), v.dense()];
                let expected = attend_dense(&mut steps[1], &case, layer, &dense);
                let close = attend_dense(&mut steps[2], &case, layer, &dense);
                let found = out.dense();
                for (i, at) in out.places().into_iter().enumerate() {
                    let (expected, close, found) = (expected[i], close[i], found[i]);
                    assert!(out.is_nearest(at, expected), "{what}: {found} instead of {expected} at {i}");
                    assert!((found - close).abs() <= 1e-5 + 0.004 * close.abs(), "{what}: {found}, {close}");
                }
                assert!(
                    out.untouched_between_rows(),
                    "{what}: elements between the rows of out were written"
                );
            }
            steps.into_iter().for_each(|step| step.commit().unwrap());
            start += n;
        }
    }
}

/// The shapes of PyTorch, written out by hand: [batch, heads, tokens, dim] and [tokens, heads, dim].
#[test]
fn the_shapes_of_pytorch() {
    let heads_first = StridedShape::heads_first(2, 3, 5, 8);
    assert_eq!(heads_first, StridedShape { sizes: [2, 5, 3, 8], strides: [120, 8, 40, 1] });
    let tokens_first = StridedShape::tokens_first(5, 3, 8);
    assert_eq!(tokens_first, StridedShape { sizes: [1, 5, 3, 8], strides: [120, 24, 8, 1] });
}

/// A token that sees only itself outputs its value, here halfway between two values of the dtype: the even one is next.
#[test]
fn ties_round_to_even() {
    let case = Case { heads: (1, 1), dim: 4 };
    let shape = StridedShape::tokens_first(1, 1, 4);
    let halfway = |ulp: f32| [1.0 + 0.5 * ulp, 1.0 + 1.5 * ulp, -1.0 - 0.5 * ulp, -1.0 - 2.5 * ulp];
    let even = |ulp: f32| [1.0, 1.0 + 2.0 * ulp, -1.0, -1.0 - 2.0 * ulp];
    let (mut halves, mut brains) = ([f16::NAN; 4], [bf16::NAN; 4]);
    for backend in [&Cpu::default() as &dyn Backend, &Reference] {
        let mut session = case.session(backend, MemoryBudget::unlimited());
        let mut step = session.step(&StepRequest { spans: &[Span::chain(A, 0, 1)] }).unwrap();
        let mut run = |layer, v: &[f32], out: RowsMut<'_>| {
            let (layer, q) = (LayerId(layer), Rows::F32(v, shape));
            let kv = Some((q, Some(q)));
            step.attend_rows(AttendRows { layer, q, kv, out, scale: 1.0, softcap: None, sinks: None })
                .unwrap();
        };
        let (f16_ulp, bf16_ulp) = (2f32.powi(-10), 2f32.powi(-7));
        run(0, &halfway(f16_ulp), RowsMut::F16(&mut halves, shape));
        run(1, &halfway(bf16_ulp), RowsMut::Bf16(&mut brains, shape));
        assert_eq!(halves.map(f16::to_f32), even(f16_ulp), "{}", backend.id());
        assert_eq!(brains.map(bf16::to_f32), even(bf16_ulp), "{}", backend.id());
    }
}

const CASE: Case = Case { heads: (4, 2), dim: 8 };

/// Runs layer 0 of a step of 6 tokens with the rows of `change`. Returns the error, and the output.
fn refused(backend: &dyn Backend, change: &dyn Fn(&mut AttendRows<'_>)) -> (Option<String>, Vec<f32>) {
    let mut session = CASE.session(backend, MemoryBudget::unlimited());
    let mut step = session.step(&StepRequest { spans: &[Span::chain(A, 0, 6)] }).unwrap();
    let (data, mut out) = (vec![0.5; 6 * 4 * 8], vec![f32::from_bits(POISON); 6 * 4 * 8]);
    let shape = StridedShape::tokens_first;
    let kv = Rows::F32(&data[..6 * 2 * 8], shape(6, 2, 8));
    let mut call = AttendRows {
        layer: LayerId(0),
        q: Rows::F32(&data, shape(6, 4, 8)),
        kv: Some((kv, Some(kv))),
        out: RowsMut::F32(&mut out, shape(6, 4, 8)),
        scale: 1.0,
        softcap: None,
        sinks: None,
    };
    change(&mut call);
    let error = step.attend_rows(call).err().map(|error| error.to_string());
    if error.is_some() {
        let dense = [data.clone(), data[..96].to_vec(), data[..96].to_vec()];
        let out = attend_dense(&mut step, &CASE, 0, &dense); // the layer has not run
        assert!(out.iter().all(|x| *x == 0.5), "{error:?}: {out:?}");
    }
    (error, out)
}

#[test]
fn wrong_rows_are_refused_by_name() {
    type Change = fn(&mut AttendRows<'_>);
    fn q(call: &mut AttendRows<'_>, change: fn(&mut StridedShape)) {
        if let Rows::F32(_, shape) = &mut call.q {
            change(shape);
        }
    }
    fn out(call: &mut AttendRows<'_>, change: fn(&mut StridedShape)) {
        if let RowsMut::F32(_, shape) = &mut call.out {
            change(shape);
        }
    }
    let changes: [(Change, &str); 15] = [
        (
            |call| q(call, |shape| shape.sizes[1] = 5),
            "q: [batch, tokens, heads, elements] is [1, 5, 4, 8], expected [6, 4, 8]",
        ),
        (|call| q(call, |shape| shape.sizes[0] = 2), "q: [batch, tokens, heads, elements] is [2, 6, 4, 8]"),
        (|call| q(call, |shape| shape.sizes[0] = usize::MAX), "expected [6, 4, 8]"),
        (|call| q(call, |shape| shape.sizes[3] = 4), "is [1, 6, 4, 4], expected [6, 4, 8]"),
        (|call| q(call, |shape| shape.strides[3] = 2), "q: the elements of a row are 2 apart, expected 1"),
        (|call| q(call, |shape| shape.strides[1] = 33), "q: 192 elements cannot hold the shape [1, 6, 4, 8]"),
        (
            |call| {
                if let Rows::F32(data, _) = &mut call.q {
                    *data = &data[1..];
                }
            },
            "q: 191 elements cannot hold the shape [1, 6, 4, 8]",
        ),
        (|call| q(call, |shape| shape.strides[1] = usize::MAX), "q: 192 elements cannot hold the shape"),
        (|call| call.kv = call.kv.map(|(k, _)| (call.q, Some(k))), "k: [batch, tokens, heads, elements] is"),
        (|call| call.kv = call.kv.map(|(k, _)| (k, Some(call.q))), "v: [batch, tokens, heads, elements] is"),
        (|call| call.kv = call.kv.map(|(k, _)| (k, None)), "layer 0 stores V, but the call has none"),
        (|call| call.kv = None, "layer 0 is out of order"),
        (|call| call.layer = LayerId(3), "layer 3 does not exist"),
        (
            |call| out(call, |shape| shape.strides[2] = 7),
            "out: rows of [batch, tokens, heads, elements] [1, 6, 4, 8] overlap at the strides [192, 32, 7, 1]",
        ),
        (|call| call.sinks = Some(&[0.0; 3]), "sinks"),
    ];
    for backend in [&Cpu::default() as &dyn Backend, &Reference] {
        for (change, words) in changes {
            let (error, out) = refused(backend, &change);
            assert!(error.as_ref().is_some_and(|error| error.contains(words)), "{error:?}, expected {words}");
            assert!(out.iter().all(|x| x.to_bits() == POISON), "{words}: {out:?}");
        }
        // Rows that are only read may overlap.
        let expanded = refused(backend, &|call| q(call, |shape| shape.strides = [0, 0, 0, 1]));
        assert_eq!(expanded.0, None);
        assert!(expanded.1.iter().all(|x| *x == 0.5));
    }
}

/// f32 rows take no scratch. Each argument that is converted takes that of the largest step, once; if the budget refuses
/// it, nothing has changed.
#[test]
fn scratch_is_reserved_when_rows_are_converted() {
    for backend in [&Cpu::default() as &dyn Backend, &Reference] {
        let budget = MemoryBudget::new(1 << 30);
        let mut session = CASE.session(backend, budget.clone());
        let mut step = session.step(&StepRequest { spans: &[Span::chain(A, 0, 2)] }).unwrap();
        let scratch = || budget.usage().of(Purpose::Scratch);
        let before = scratch();
        let [q_shape, kv_shape] = [4, 2].map(|heads| StridedShape::heads_first(1, heads, 2, 8));
        let (data, halves) = (vec![0.5f32; 64], vec![f16::from_f32(0.5); 64]);
        let mut out = vec![f16::from_bits(POISON_16); 64];
        let mut run = |layer, q, out: RowsMut<'_>| {
            let kv = (layer < 2).then_some(Rows::F32(&data[..32], kv_shape)).map(|k| (k, Some(k)));
            let layer = LayerId(layer);
            step.attend_rows(AttendRows { layer, q, kv, out, scale: 1.0, softcap: None, sinks: None })
        };
        run(0, Rows::F32(&data, q_shape), RowsMut::F32(&mut [0.0; 64], q_shape)).unwrap();
        assert_eq!(scratch(), before, "{}", backend.id());
        run(1, Rows::F16(&halves, q_shape), RowsMut::F32(&mut [0.0; 64], q_shape)).unwrap();
        assert_eq!(scratch(), before + 16 * 4 * 8 * 4, "{}", backend.id());

        let rest = budget.reserve(Purpose::Weights, budget.free()).unwrap();
        let refused = run(2, Rows::F16(&halves, q_shape), RowsMut::F16(&mut out, q_shape));
        assert!(matches!(refused, Err(DeviceError::OutOfBudget(_))), "{refused:?}");
        assert_eq!(scratch(), before + 16 * 4 * 8 * 4);
        assert!(out.iter().all(|x| x.to_bits() == POISON_16));
        drop(rest);
        run(2, Rows::F16(&halves, q_shape), RowsMut::F16(&mut out, q_shape)).unwrap();
        assert_eq!(scratch(), before + 2 * 16 * 4 * 8 * 4);
        assert!(out.iter().all(|x| x.to_f32() == 0.5));
        step.commit().unwrap();
        drop(session);
        assert_eq!(budget.usage(), Usage::default(), "{}", backend.id());
    }
}
