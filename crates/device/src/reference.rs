//! The scalar reference: a device and a backend that are simple enough to verify by reading. Weights, activations and
//! stored rows are f32; all sums are f64.
mod attention;

use crate::weights::{Encoding, FileTensor, WeightFormat};
use crate::*;
use kvist_cache::{StepId, StepPlan};

/// The reference, `reference`: a device for models, and a backend for attention.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

/// `[outputs, inputs]` weights.
#[derive(Debug)]
pub struct Linear {
    inputs: usize,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Linear {
    fn multiply(&self, x: &[f32]) -> Vec<f32> {
        let row = |(o, row): (usize, &[f32])| {
            let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[o]));
            (dot(row, x) + bias) as f32
        };
        self.weight.chunks_exact(self.inputs).enumerate().map(row).collect()
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// `[rows, width]`: the rows of the last operation that wrote it.
#[derive(Debug)]
pub struct Buffer {
    width: usize,
    data: Vec<f32>,
}

impl Buffer {
    fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.data.chunks_exact(self.width)
    }
    fn set(&mut self, rows: impl Iterator<Item = Vec<f32>>) {
        self.data = rows.flatten().collect();
    }
}

/// The inputs of the current step.
#[derive(Debug)]
pub struct Stream {
    limits: StepLimits,
    ropes: Vec<RopeTable>,
    step: Option<StepId>,
    tickets: u64,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    output: StepOutput,
}

fn activate(activation: Activation, gate: f32, up: f32) -> f32 {
    let (mut x, mut up) = (f64::from(gate), f64::from(up));
    // All are x × sigmoid(y) × up.
    let y = match activation {
        Activation::Silu => x,
        Activation::Gelu => 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3)),
        Activation::Clamped { limit } => {
            let limit = f64::from(limit);
            (x, up) = (x.min(limit), up.clamp(-limit, limit) + 1.0);
            1.702 * x
        }
    };
    (x / (1.0 + (-y).exp()) * up) as f32
}

fn norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| (f64::from(*x) * scale * f64::from(*w)) as f32).collect()
}

impl Footprint for Reference {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { name: "reference", batch_invariant: true, unified_memory: true }
    }
    fn supports(&self, _: &ModelShape) -> Result<(), DeviceError> {
        Ok(())
    }
    fn returns_attention_mass(&self) -> bool {
        true
    }
    fn weight_bytes(&self, shape: &[usize], _: Encoding, _: WeightFormat) -> Option<u64> {
        let elements = shape.iter().try_fold(1usize, |n, rows| n.checked_mul(*rows))?;
        u64::try_from(elements.checked_mul(4)?).ok()
    }
    fn activation_bytes(&self, shape: &ModelShape, limits: &StepLimits) -> Option<u64> {
        let logits = limits.max_rows.checked_mul(shape.vocab)?;
        u64::try_from(shape.buffer_elements(limits)?.checked_add(logits)?.checked_mul(4)?).ok()
    }
}

impl Device for Reference {
    type Linear = Linear;
    type Stack = Vec<Linear>;
    type Vector = Vec<f32>;
    type Buffer = Buffer;
    type Stream = Stream;
    type Pools = Box<dyn Pools>;

    fn linear(
        &self,
        tensor: FileTensor<'_>,
        _: WeightFormat,
        bias: Option<Vec<f32>>,
    ) -> Result<Linear, DeviceError> {
        Ok(Linear { inputs: tensor.row_len(), weight: tensor.to_f32(), bias })
    }
    fn stack<'t, E: From<DeviceError>>(
        &self,
        layers: impl ExactSizeIterator<Item = Result<ExpertTensor<'t>, E>>,
        format: WeightFormat,
    ) -> Result<Vec<Linear>, E> {
        stack_each(layers, |tensor, bias| self.linear(tensor, format, bias))
    }
    fn vector(&self, values: Vec<f32>) -> Result<Vec<f32>, DeviceError> {
        Ok(values)
    }
    fn buffer(&self, _: RowsOf, width: usize, _: &StepLimits) -> Result<Buffer, DeviceError> {
        Ok(Buffer { width: width.max(1), data: Vec::new() })
    }
    fn stream(
        &self,
        _: &ModelShape,
        ropes: &[RopeTable],
        limits: &StepLimits,
    ) -> Result<Stream, DeviceError> {
        Ok(Stream {
            limits: *limits,
            ropes: ropes.to_vec(),
            step: None,
            tickets: 0,
            tokens: Vec::new(),
            positions: Vec::new(),
            output: StepOutput::default(),
        })
    }
    fn kv_pools(&self, backend: &dyn Backend, spec: &PoolSpec) -> Result<Box<dyn Pools>, DeviceError> {
        backend.pools(spec)
    }

    fn begin(
        &self,
        s: &mut Stream,
        pools: &mut Box<dyn Pools>,
        plan: &StepPlan,
        inputs: &StepInputs<'_>,
    ) -> Result<(), DeviceError> {
        inputs.check(plan, &s.limits)?;
        s.step = None;
        pools.begin(plan)?;
        s.tokens = inputs.tokens.to_vec();
        plan.positions(&mut s.positions);
        s.output.taps = vec![Vec::new(); inputs.taps.len()];
        if let Some(queries) = inputs.mass {
            s.output.mass.begin(plan, queries);
        }
        self.want_rows(s, inputs.rows);
        s.step = Some(plan.id());
        Ok(())
    }
    fn want_rows(&self, s: &mut Stream, rows: &[WantedRow]) {
        s.output.want(rows);
    }

    fn upload(&self, _: &mut Stream, rows: &[f32], out: &mut Buffer) {
        out.data = rows.to_vec();
    }
    fn embed(&self, s: &mut Stream, table: &Linear, scale: f32, out: &mut Buffer) {
        let row = |token: &u32| &table.weight[*token as usize * table.inputs..][..table.inputs];
        out.set(s.tokens.iter().map(|token| row(token).iter().map(|x| x * scale).collect()));
    }
    fn rms_norm(&self, _: &mut Stream, x: &Buffer, by: Norm<'_, Self>, out: &mut Buffer) {
        out.set(x.rows().map(|x| norm(x, by.weight, by.eps)));
    }
    fn norm_in_place(&self, _: &mut Stream, x: &mut Buffer, by: Norm<'_, Self>) {
        let rows = x.data.chunks_exact(by.weight.len()).map(|x| norm(x, by.weight, by.eps));
        x.data = rows.flatten().collect();
    }
    fn matmul(&self, _: &mut Stream, x: &Buffer, outs: &mut [(&Linear, &mut Buffer)]) {
        for (layer, out) in outs {
            out.set(x.rows().map(|x| layer.multiply(x)));
        }
    }
    fn rope(&self, s: &mut Stream, x: &mut Buffer, head_dim: usize, rope: usize) {
        let RopeTable { inverse_frequencies, attention_factor } = &s.ropes[rope];
        let pairs = inverse_frequencies.len();
        for (token, position) in x.data.chunks_exact_mut(x.width).zip(&s.positions) {
            for head in token.chunks_exact_mut(head_dim) {
                for (i, frequency) in inverse_frequencies.iter().enumerate() {
                    // The angle in f32, as transformers computes it.
                    let angle = f64::from(*position as f32 * frequency);
                    let (sin, cos) = angle.sin_cos();
                    let (sin, cos) = (sin * f64::from(*attention_factor), cos * f64::from(*attention_factor));
                    let (low, high) = (f64::from(head[i]), f64::from(head[i + pairs]));
                    head[i] = (low * cos - high * sin) as f32;
                    head[i + pairs] = (high * cos + low * sin) as f32;
                }
            }
        }
    }
    fn gated(&self, _: &mut Stream, activation: Activation, gate: &mut Buffer, up: &Buffer) {
        gate.data.iter_mut().zip(&up.data).for_each(|(gate, up)| *gate = activate(activation, *gate, *up));
    }
    fn experts(
        &self,
        _: &mut Stream,
        x: &Buffer,
        layer: &Experts<Self>,
        activation: Activation,
        out: &mut Buffer,
    ) {
        let Routing { used, renormalise, .. } = layer.routing;
        let one = |x: &[f32]| {
            let odds: Vec<f64> = layer.router.multiply(x).iter().map(|odd| f64::from(*odd).exp()).collect();
            let mut order: Vec<usize> = (0..odds.len()).collect();
            order.sort_by(|a, b| odds[*b].total_cmp(&odds[*a]).then(a.cmp(b)));
            order.truncate(used);
            let of: &mut dyn Iterator<Item = f64> = match renormalise {
                true => &mut order.iter().map(|expert| odds[*expert]),
                false => &mut odds.iter().copied(),
            };
            let sum: f64 = of.sum();
            let mut answer = vec![0f64; out.width];
            for expert in order {
                let (gate, up) = (layer.gate[expert].multiply(x), layer.up[expert].multiply(x));
                let wide: Vec<f32> =
                    gate.iter().zip(up).map(|(gate, up)| activate(activation, *gate, up)).collect();
                let weight = odds[expert] / sum;
                answer
                    .iter_mut()
                    .zip(layer.down[expert].multiply(&wide))
                    .for_each(|(y, x)| *y += weight * f64::from(x));
            }
            answer.iter().map(|y| *y as f32).collect()
        };
        let rows: Vec<Vec<f32>> = x.rows().map(one).collect();
        out.set(rows.into_iter());
    }
    fn concat(&self, _: &mut Stream, a: &Buffer, b: &Buffer, out: &mut Buffer) {
        out.set(a.rows().zip(b.rows()).map(|(a, b)| [a, b].concat()));
    }
    fn add(&self, _: &mut Stream, x: &mut Buffer, y: &Buffer) {
        x.data.iter_mut().zip(&y.data).for_each(|(x, y)| *x += y);
    }
    fn attend(
        &self,
        _: &mut Stream,
        pools: &mut Box<dyn Pools>,
        plan: &StepPlan,
        call: LayerAttention<'_, Self>,
    ) -> Result<(), DeviceError> {
        let (d, heads) = (call.head_dim, call.q.width / call.head_dim);
        call.out.data = vec![f32::NAN; call.q.data.len()];
        pools.attend(
            plan,
            Attend {
                layer: call.layer,
                q: Tensor::dense(&call.q.data, heads, d),
                kv: call.kv.map(|(k, v)| {
                    (Tensor::dense(&k.data, k.width / d, d), Tensor::dense(&v.data, v.width / d, d))
                }),
                out: TensorMut::dense(&mut call.out.data, heads, d),
                scale: call.scale,
                softcap: call.softcap,
                sinks: call.sinks.map(Vec::as_slice),
            },
        )
    }
    fn attention_mass(
        &self,
        s: &mut Stream,
        pools: &mut Box<dyn Pools>,
        plan: &StepPlan,
        call: LayerQueries<'_, Self>,
    ) -> Result<(), DeviceError> {
        let call = MassOf {
            layer: call.layer,
            q: Tensor::dense(&call.q.data, call.q.width / call.head_dim, call.head_dim),
            scale: call.scale,
            softcap: call.softcap,
            sinks: call.sinks.map(Vec::as_slice),
        };
        pools.attention_mass(plan, call, &mut s.output.mass)
    }
    fn tap(&self, s: &mut Stream, i: usize, x: &Buffer) {
        s.output.taps[i].clone_from(&x.data);
    }
    fn wanted_rows(&self, s: &mut Stream, x: &Buffer, out: &mut Buffer) {
        let wanted = s.output.wanted().iter();
        out.set(wanted.map(|wanted| x.data[wanted.row as usize * x.width..][..x.width].to_vec()));
    }
    fn logits(&self, s: &mut Stream, x: &Buffer, head: &Linear, softcap: Option<f32>) {
        let capped = |x: f32| softcap.map_or(x, |cap| cap * (x / cap).tanh());
        let vocab = head.weight.len() / head.inputs;
        let rows = s.output.all_logits(vocab).chunks_exact_mut(vocab).zip(x.rows());
        for (logits, x) in rows {
            logits.iter_mut().zip(head.multiply(x)).for_each(|(logit, y)| *logit = capped(y));
        }
    }

    fn submit(&self, s: &mut Stream) -> Result<Ticket, DeviceError> {
        s.tickets += 1;
        Ok(Ticket(s.tickets))
    }
    fn is_done(&self, _: &Stream, _: Ticket) -> bool {
        true
    }
    fn wait(&self, s: &mut Stream, ticket: Ticket) -> Result<LayersRan, DeviceError> {
        let step = s.step.filter(|_| ticket == Ticket(s.tickets));
        step.map(LayersRan).ok_or(DeviceError::StalePlan)
    }
    fn output(s: &Stream) -> &StepOutput {
        &s.output
    }
    fn output_mut(s: &mut Stream) -> &mut StepOutput {
        &mut s.output
    }
}
