//! The CPU as a device: it computes each operation when the decoder asks for it, so a submission is done at once.
use crate::arch::arena;
use crate::experts;
use crate::layer::Linear;
use crate::linear::{Inputs, Matrix};
use crate::{Cpu, steps};
use kvist_cache::{StepId, StepPlan};
use kvist_device::weights::{Encoding, FileTensor, WeightFormat};
use kvist_device::*;

/// Activations: rows of the largest step, of which the first ones are in use.
#[derive(Debug)]
pub struct Buffer {
    data: Vec<f32>, // [rows, width]
    width: usize,
    rows: RowsOf,
}

/// Cosines and sines of a step's positions for one rotary embedding: computed once and used by every layer.
#[derive(Debug)]
struct Angles {
    table: RopeTable,
    cos: Vec<f32>, // [n_tokens, pairs]
    sin: Vec<f32>,
}

impl Angles {
    /// Uses f32 throughout, as transformers does.
    fn compute(&mut self, positions: &[u32]) {
        self.cos.clear();
        self.sin.clear();
        for &position in positions {
            for frequency in &self.table.inverse_frequencies {
                let (sin, cos) = (position as f32 * frequency).sin_cos();
                self.cos.push(cos * self.table.attention_factor);
                self.sin.push(sin * self.table.attention_factor);
            }
        }
    }
}

/// The inputs of the current step, scratch memory, and the output.
#[derive(Debug)]
pub struct Stream {
    limits: StepLimits,
    step: Option<StepId>,
    tickets: u64,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    angles: Vec<Angles>, // one per rotary embedding
    inputs: Inputs,      // the input of a linear layer, converted for its kernel
    experts: experts::Scratch,
    output: StepOutput,
    samplers: Vec<HostSampler>, // one per thread
}

impl Stream {
    fn n(&self, rows: RowsOf) -> usize {
        match rows {
            RowsOf::Tokens => self.tokens.len(),
            RowsOf::Wanted => self.output.wanted().len(),
        }
    }
    /// The rows of `buffer` that this step uses.
    fn used<'b>(&self, buffer: &'b Buffer) -> &'b [f32] {
        &buffer.data[..self.n(buffer.rows) * buffer.width]
    }
    fn used_mut<'b>(&self, buffer: &'b mut Buffer) -> &'b mut [f32] {
        let used = self.n(buffer.rows) * buffer.width;
        &mut buffer.data[..used]
    }
}

/// The encoding in memory of a tensor with rows of `row` elements.
fn resident(stored: Encoding, format: WeightFormat, row: usize) -> Encoding {
    match stored.resident(format, row) {
        // bf16 is stored in pairs of inputs.
        Encoding::BF16 if !row.is_multiple_of(2) => Encoding::F32,
        encoding => encoding,
    }
}

impl Footprint for Cpu {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { name: "cpu", batch_invariant: self.compute.deterministic, unified_memory: true }
    }

    fn supports(&self, _: &ModelShape) -> Result<(), DeviceError> {
        Ok(())
    }

    fn returns_attention_mass(&self) -> bool {
        true
    }

    fn numerics(&self) -> String {
        let crate::Compute { isa, deterministic, .. } = &self.compute;
        let tiles = self.compute.exact_pairs().is_some();
        let fast = if self.compute.fast_pairs().is_some() || self.compute.fast_bytes() {
            ", fast prefill"
        } else {
            ""
        };
        let kernels = crate::NUMERICS;
        format!("cpu {isa}, kernels {kernels}, deterministic {deterministic}, tile attention {tiles}{fast}")
    }

    fn weight_bytes(&self, shape: &[usize], stored: Encoding, format: WeightFormat) -> Option<u64> {
        let (inputs, rows) = shape.split_last()?;
        let outputs = rows.iter().try_fold(1usize, |n, rows| n.checked_mul(*rows))?;
        Matrix::resident_bytes(resident(stored, format, *inputs), outputs, *inputs)
    }

    fn all_weight_bytes(&self, weights: u64) -> u64 {
        weights.saturating_add(arena::unused(weights))
    }

    fn activation_bytes(&self, shape: &ModelShape, limits: &StepLimits) -> Option<u64> {
        let n = limits.max_tokens;
        let angles = 2 * shape.rope_pairs.iter().sum::<usize>();
        let floats = shape.buffer_elements(limits)?.checked_add(angles.checked_mul(n)?)?;
        let floats = floats.checked_add(limits.max_rows.checked_mul(shape.vocab)?)?;
        // The widest layer's input again, in every converted format.
        let widest = shape.buffers().iter().map(|(_, width)| *width).max()?;
        let inputs = Inputs::bytes(&self.compute, n.max(limits.max_rows), widest)?;
        let experts = experts::Scratch::bytes(&self.compute, n, shape)?;
        let samplers = HostSampler::bytes(shape.vocab)?.checked_mul(self.compute.threads.n())?;
        let rest = inputs.checked_add(experts)?.checked_add(samplers)?;
        u64::try_from(floats.checked_mul(size_of::<f32>())?.checked_add(rest)?).ok()
    }
}

impl Device for Cpu {
    type Linear = Linear;
    type Stack = Vec<Linear>;
    type Vector = Vec<f32>;
    type Buffer = Buffer;
    type Stream = Stream;
    /// Pools of any host backend, so that a model can also run over the reference's attention.
    type Pools = Box<dyn Pools>;

    fn linear(
        &self,
        tensor: FileTensor<'_>,
        format: WeightFormat,
        bias: Option<Vec<f32>>,
    ) -> Result<Linear, DeviceError> {
        let (outputs, inputs, scale) = (tensor.n_rows(), tensor.row_len(), tensor.factor);
        let (name, encoding) = (tensor.name, resident(tensor.encoding, format, inputs));
        let bytes = tensor.encoded(encoding)?;
        let weight = Matrix::pack(&self.compute, encoding, outputs, inputs, &bytes)
            .map_err(|error| DeviceError::Weights { name: name.into(), what: error.to_string() })?;
        Ok(Linear { weight, scale, bias })
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

    fn buffer(&self, rows: RowsOf, width: usize, limits: &StepLimits) -> Result<Buffer, DeviceError> {
        Ok(Buffer { data: vec![0.0; rows.max(limits) * width], width, rows })
    }

    fn stream(
        &self,
        shape: &ModelShape,
        ropes: &[RopeTable],
        limits: &StepLimits,
    ) -> Result<Stream, DeviceError> {
        let angles = |table: &RopeTable| {
            let n = limits.max_tokens * table.inverse_frequencies.len();
            Angles { table: table.clone(), cos: Vec::with_capacity(n), sin: Vec::with_capacity(n) }
        };
        Ok(Stream {
            limits: *limits,
            step: None,
            tickets: 0,
            tokens: Vec::with_capacity(limits.max_tokens),
            positions: Vec::with_capacity(limits.max_tokens),
            angles: ropes.iter().map(angles).collect(),
            inputs: Inputs::default(),
            experts: experts::Scratch::default(),
            output: StepOutput::with_capacity(limits.max_rows, shape.vocab),
            samplers: (0..self.compute.threads.n())
                .map(|_| HostSampler::with_capacity(shape.vocab))
                .collect(),
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
        s.tokens.clear();
        s.tokens.extend_from_slice(inputs.tokens);
        plan.positions(&mut s.positions);
        s.angles.iter_mut().for_each(|angles| angles.compute(&s.positions));
        s.output.taps.resize_with(inputs.taps.len(), Vec::new);
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

    fn upload(&self, s: &mut Stream, rows: &[f32], out: &mut Buffer) {
        s.used_mut(out).copy_from_slice(rows);
    }

    fn embed(&self, s: &mut Stream, table: &Linear, scale: f32, out: &mut Buffer) {
        let out = s.used_mut(out);
        for (token, row) in s.tokens.iter().zip(out.chunks_exact_mut(table.inputs())) {
            table.weight.row(*token as usize, row);
        }
        if scale != 1.0 {
            steps::scale(&self.compute, out, scale);
        }
    }

    fn rms_norm(&self, s: &mut Stream, x: &Buffer, norm: Norm<'_, Self>, out: &mut Buffer) {
        steps::rms_norm(&self.compute, s.used(x), norm.weight, norm.eps, s.used_mut(out));
    }

    fn norm_in_place(&self, s: &mut Stream, x: &mut Buffer, norm: Norm<'_, Self>) {
        steps::rms_norm_in_place(&self.compute, s.used_mut(x), norm.weight, norm.eps);
    }

    fn matmul(&self, s: &mut Stream, x: &Buffer, outs: &mut [(&Linear, &mut Buffer)]) {
        let n = s.n(x.rows);
        // The layers share the conversions of their input.
        let mut input = s.inputs.of(&x.data[..n * x.width], x.width);
        for (layer, out) in outs {
            layer.multiply(&self.compute, &mut input, &mut out.data[..n * layer.outputs()]);
        }
    }

    fn rope(&self, s: &mut Stream, x: &mut Buffer, head_dim: usize, rope: usize) {
        let heads = x.width / head_dim;
        let Angles { table, cos, sin } = &s.angles[rope];
        let pairs = table.inverse_frequencies.len();
        steps::rotate_pairs(&self.compute, s.used_mut(x), heads, head_dim, cos, sin, pairs);
    }

    fn gated(&self, s: &mut Stream, activation: Activation, gate: &mut Buffer, up: &Buffer) {
        steps::gated(&self.compute, activation, s.used_mut(gate), s.used(up));
    }

    fn experts(
        &self,
        s: &mut Stream,
        x: &Buffer,
        layer: &Experts<Self>,
        activation: Activation,
        out: &mut Buffer,
    ) {
        let (x, out) = (s.used(x), s.used_mut(out));
        experts::run(&self.compute, layer, activation, x, &mut s.inputs, &mut s.experts, out);
    }

    fn concat(&self, s: &mut Stream, a: &Buffer, b: &Buffer, out: &mut Buffer) {
        let rows = s.used(a).chunks_exact(a.width).zip(s.used(b).chunks_exact(b.width));
        for ((a, b), out) in rows.zip(out.data.chunks_exact_mut(a.width + b.width)) {
            let (left, right) = out.split_at_mut(a.len());
            left.copy_from_slice(a);
            right.copy_from_slice(b);
        }
    }

    fn add(&self, s: &mut Stream, x: &mut Buffer, y: &Buffer) {
        steps::add(&self.compute, s.used_mut(x), s.used(y));
    }

    fn attend(
        &self,
        s: &mut Stream,
        pools: &mut Box<dyn Pools>,
        plan: &StepPlan,
        call: LayerAttention<'_, Self>,
    ) -> Result<(), DeviceError> {
        let (q, heads, d) = (s.used(call.q), call.q.width / call.head_dim, call.head_dim);
        let kv = call.kv.map(|(k, v)| (k.width / d, s.used(k), s.used(v)));
        pools.attend(
            plan,
            Attend {
                layer: call.layer,
                q: Tensor::dense(q, heads, d),
                kv: kv.map(|(heads, k, v)| (Tensor::dense(k, heads, d), Tensor::dense(v, heads, d))),
                out: TensorMut::dense(s.used_mut(call.out), heads, d),
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
        let (heads, d) = (call.q.width / call.head_dim, call.head_dim);
        let mut mass = std::mem::take(&mut s.output.mass);
        let call = MassOf {
            layer: call.layer,
            q: Tensor::dense(s.used(call.q), heads, d),
            scale: call.scale,
            softcap: call.softcap,
            sinks: call.sinks.map(Vec::as_slice),
        };
        let added = pools.attention_mass(plan, call, &mut mass);
        s.output.mass = mass;
        added
    }

    fn tap(&self, s: &mut Stream, i: usize, x: &Buffer) {
        let used = s.n(x.rows) * x.width;
        let tap = &mut s.output.taps[i];
        tap.clear();
        tap.extend_from_slice(&x.data[..used]);
    }

    fn wanted_rows(&self, s: &mut Stream, x: &Buffer, out: &mut Buffer) {
        for (wanted, out) in s.output.wanted().iter().zip(out.data.chunks_exact_mut(x.width)) {
            out.copy_from_slice(&x.data[wanted.row as usize * x.width..][..x.width]);
        }
    }

    fn logits(&self, s: &mut Stream, x: &Buffer, head: &Linear, softcap: Option<f32>) {
        let n = s.n(x.rows);
        let logits = s.output.all_logits(head.outputs());
        head.multiply(&self.compute, &mut s.inputs.of(&x.data[..n * x.width], x.width), logits);
        if let Some(cap) = softcap {
            steps::softcap(&self.compute, logits, cap);
        }
    }

    fn answer_rows(&self, s: &mut Stream) {
        let Stream { output, samplers, .. } = s;
        output.answer_rows_on(|drawn, draw| {
            self.compute
                .threads
                .parts(drawn, 1, samplers, |row, drawn, sampler| draw(row, &mut drawn[0], sampler));
        });
    }

    fn submit(&self, s: &mut Stream) -> Result<Ticket, DeviceError> {
        s.tickets += 1;
        Ok(Ticket(s.tickets))
    }
    fn is_done(&self, _: &Stream, _: Ticket) -> bool {
        true
    }
    fn wait(&self, s: &mut Stream, ticket: Ticket) -> Result<LayersRan, DeviceError> {
        match s.step {
            Some(step) if ticket == Ticket(s.tickets) => Ok(LayersRan(step)),
            _ => Err(DeviceError::StalePlan),
        }
    }
    fn output(s: &Stream) -> &StepOutput {
        &s.output
    }
    fn output_mut(s: &mut Stream) -> &mut StepOutput {
        &mut s.output
    }
}
