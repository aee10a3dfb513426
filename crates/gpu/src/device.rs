//! The device: a decoder's operations, recorded into one step, which a driver may submit in parts.
//!
//! `begin` uploads what depends on the step: tokens, angles, wanted rows, the plan. Operations record dispatches in one
//! compute pass. `submit` ends it, appends copies of the results to a buffer that the host can read, and submits.
//! `wait` reads that buffer: logits of rows that ask for them or for a sample, otherwise only tokens.
use crate::GpuDevice;
use crate::driver::{Args, Driver, Recorder};
use crate::kernels::{Kernel, NORM_ROWS, RowsOp};
use crate::linear::{Halves, Product, Routes, copy_rows, groups, tile_of};
use crate::pools::{DeviceRows, GpuPools};
use crate::rotation::Rotation;
use crate::several::{self, Several, numbers, routed_together, together};
use crate::shared::bytes_of;
use crate::stream::{ANSWER, Buffer, Stream, f32s, read_rows};
use crate::weights::{self, Linear};
use kvist_cache::StepPlan;
use kvist_device::weights::{FileTensor, WeightFormat};
use kvist_device::*;
use std::sync::Arc;

/// A norm's weights, or attention sinks.
#[derive(Debug)]
pub struct Vector<D: Driver> {
    values: D::Buffer,
    len: u32,
}

impl<D: Driver> GpuDevice<D> {
    fn norm(&self, s: &mut Stream<D>, x: Option<&Buffer<D>>, norm: Norm<'_, Self>, out: &Buffer<D>) {
        s.rotate_if_of(&*self.gpu, [x.unwrap_or(out), out]);
        let Some(data) = out.get() else { return };
        let from = x.and_then(Buffer::get);
        let width = norm.weight.len.max(1);
        let rows = (u64::from(s.n(out.rows)) * u64::from(out.width) / u64::from(width)) as u32;
        let args = Args::new(&[width, rows]).f32(norm.eps);
        let groups = rows.div_ceil(self.gpu.norm_rows(width));
        let groups = [groups.min(NORM_ROWS), groups.div_ceil(NORM_ROWS), 1];
        let kernel = Kernel::Norm { in_place: x.is_none() };
        self.gpu.record(
            &mut s.recorder,
            &kernel,
            &[Some(&norm.weight.values), Some(data), from],
            args,
            groups,
        );
    }

    /// `gate = activation(gate, up)` over so many elements.
    fn gate(
        &self,
        recorder: &mut D::Recorder,
        activation: Activation,
        gate: &D::Buffer,
        up: &D::Buffer,
        elements: u64,
    ) {
        let (number, limit) = numbers(activation);
        if let Some(groups) = groups(elements, self.gpu.elements_at_once()) {
            let args = Args::new(&[elements as u32, number]).f32(limit);
            self.gpu.record(recorder, &Kernel::Gated, &[Some(up), Some(gate)], args, groups);
        }
    }
}

impl<D: Driver> Device for GpuDevice<D> {
    type Linear = Linear<D>;
    /// As one matrix: the layers' rows one behind the other.
    type Stack = Linear<D>;
    type Vector = Vector<D>;
    type Buffer = Buffer<D>;
    type Stream = Stream<D>;
    type Pools = GpuPools<D>;

    fn linear(
        &self,
        tensor: FileTensor<'_>,
        format: WeightFormat,
        bias: Option<Vec<f32>>,
    ) -> Result<Linear<D>, DeviceError> {
        let (shape, factor, name) = ((tensor.n_rows(), tensor.row_len()), tensor.factor, tensor.name);
        let encoding = tensor.encoding.resident(format, shape.1);
        Linear::new(&*self.gpu, name, encoding, shape, &tensor.encoded(encoding)?, factor, bias)
    }
    fn stack<'t, E: From<DeviceError>>(
        &self,
        layers: impl ExactSizeIterator<Item = Result<ExpertTensor<'t>, E>>,
        format: WeightFormat,
    ) -> Result<Linear<D>, E> {
        weights::stack(&*self.gpu, layers, format)
    }
    fn vector(&self, values: Vec<f32>) -> Result<Vector<D>, DeviceError> {
        Ok(Vector { values: weights::vector(&*self.gpu, &values)?, len: values.len() as u32 })
    }

    fn buffer(&self, rows: RowsOf, width: usize, limits: &StepLimits) -> Result<Buffer<D>, DeviceError> {
        let overflow = || DeviceError::OutOfMemory { what: "activations", bytes: u64::MAX };
        let bytes = f32s(rows.max(limits), width).ok_or_else(overflow)?;
        let data = (width > 0).then(|| self.gpu.buffer("activations", bytes)).transpose()?.map(Arc::new);
        Ok(Buffer { rows, width: u32::try_from(width).map_err(|_| overflow())?, data })
    }

    fn stream(
        &self,
        shape: &ModelShape,
        ropes: &[RopeTable],
        limits: &StepLimits,
    ) -> Result<Stream<D>, DeviceError> {
        Stream::new(&*self.gpu, shape, ropes, limits)
    }

    fn kv_pools(&self, backend: &dyn Backend, spec: &PoolSpec) -> Result<GpuPools<D>, DeviceError> {
        match backend.id() == Backend::id(self) {
            true => GpuPools::new(&self.gpu, spec),
            false => Err(DeviceError::Unsupported(format!(
                "the device `{}` cannot attend over K and V in `{}`: use --backend {}",
                D::NAME,
                backend.id(),
                D::NAME
            ))),
        }
    }

    fn begin(
        &self,
        s: &mut Stream<D>,
        pools: &mut GpuPools<D>,
        plan: &StepPlan,
        inputs: &StepInputs<'_>,
    ) -> Result<(), DeviceError> {
        inputs.check(plan, &s.limits)?;
        s.step = None;
        s.failed = None;
        s.recorder.restart();
        s.rotations.clear();
        pools.begin(plan)?;
        s.n_tokens = plan.n_tokens();
        if !inputs.tokens.is_empty() {
            self.gpu.write(&s.tokens, 0, &bytes_of(inputs.tokens));
        }
        plan.positions(&mut s.positions);
        s.upload_angles(&*self.gpu);
        s.taps.begin(pools.budget());
        s.output.taps.resize_with(inputs.taps.len(), Vec::new);
        s.want_rows(&*self.gpu, inputs.rows);
        s.step = Some(plan.id());
        Ok(())
    }

    fn want_rows(&self, s: &mut Stream<D>, rows: &[WantedRow]) {
        s.want_rows(&*self.gpu, rows);
    }

    fn upload(&self, s: &mut Stream<D>, rows: &[f32], out: &mut Buffer<D>) {
        s.rotate(&*self.gpu);
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        if let Some(out) = out.get().filter(|_| !bytes.is_empty()) {
            self.gpu.write(out, 0, &bytes);
        }
    }

    fn embed(&self, s: &mut Stream<D>, table: &Linear<D>, scale: f32, out: &mut Buffer<D>) {
        s.rotate(&*self.gpu);
        let Some(out) = out.get() else { return };
        for part in &table.parts {
            let args = Args::new(&[part.layout.quads, part.layout.b, part.layout.s])
                .u32(part.first)
                .u32(part.rows)
                .u32(table.inputs)
                .f32(scale);
            let kernel = Kernel::Embed { encoding: table.encoding };
            let groups = [part.layout.quads.div_ceil(64), s.n_tokens, 1];
            self.gpu.record(
                &mut s.recorder,
                &kernel,
                &[Some(&part.buffer), Some(&s.tokens), Some(out)],
                args,
                groups,
            );
        }
    }

    fn rms_norm(&self, s: &mut Stream<D>, x: &Buffer<D>, norm: Norm<'_, Self>, out: &mut Buffer<D>) {
        self.norm(s, Some(x), norm, out);
    }
    fn norm_in_place(&self, s: &mut Stream<D>, x: &mut Buffer<D>, norm: Norm<'_, Self>) {
        self.norm(s, None, norm, x);
    }

    fn matmul(&self, s: &mut Stream<D>, x: &Buffer<D>, outs: &mut [(&Linear<D>, &mut Buffer<D>)]) {
        s.rotate(&*self.gpu);
        let n = s.n(x.rows);
        let Some(x) = x.get() else { return };
        let layers: Vec<&Linear<D>> = outs.iter().map(|(layer, _)| *layer).collect();
        let halves = Halves::write(s.halves[0].as_ref(), &*self.gpu, &mut s.recorder, (x, n), &layers, None);
        let outs: Vec<_> = outs.iter().filter_map(|(layer, out)| Some((*layer, out.get()?))).collect();
        let runs = outs.chunk_by(|a, b| together(&*self.gpu, n, a.0, b.0));
        for run in runs.flat_map(|run| run.chunks(several::MOST)) {
            if let [(layer, out)] = *run {
                let product = Product { x, layer, out, n, cap: None, routes: None, added: false, halves };
                product.record(&*self.gpu, &mut s.recorder);
            } else {
                Several { x, norm: None, layers: run, activation: None, routes: None }
                    .record(&*self.gpu, &mut s.recorder);
            }
        }
    }

    /// For one token in one launch, if the driver has that and the norm is narrow.
    fn norm_matmul(
        &self,
        s: &mut Stream<D>,
        x: &Buffer<D>,
        norm: Norm<'_, Self>,
        h: &mut Buffer<D>,
        outs: &mut [(&Linear<D>, &mut Buffer<D>)],
    ) {
        s.rotate(&*self.gpu);
        let layers: Vec<_> = outs.iter().filter_map(|(layer, out)| Some((*layer, out.get()?))).collect();
        let is_one = layers.len() == outs.len() && (2..=several::MOST).contains(&layers.len());
        let alike =
            |pair: &[(&Linear<D>, &D::Buffer)]| together(&*self.gpu, s.n(x.rows), pair[0].0, pair[1].0);
        let takes_norm = layers.iter().all(|(layer, _)| layer.inputs <= self.gpu.max_normed_inputs());
        if let (true, Some(x)) = (is_one && takes_norm && layers.windows(2).all(alike), x.get()) {
            let norm = Some((&norm.weight.values, norm.eps));
            return Several { x, norm, layers: &layers, activation: None, routes: None }
                .record(&*self.gpu, &mut s.recorder);
        }
        drop(layers);
        self.rms_norm(s, x, norm, h);
        self.matmul(s, h, outs);
    }

    /// For one token the layers and the activation in one launch, if the driver has that, and the norm too if it is narrow.
    fn norm_gated(
        &self,
        s: &mut Stream<D>,
        x: &Buffer<D>,
        norm: Norm<'_, Self>,
        h: &mut Buffer<D>,
        activation: Activation,
        [gate, up]: [(&Linear<D>, &mut Buffer<D>); 2],
    ) {
        s.rotate(&*self.gpu);
        let pairs = gate.0.outputs == up.0.outputs && together(&*self.gpu, s.n(x.rows), gate.0, up.0);
        let (x, norm) = match pairs && gate.0.inputs <= self.gpu.max_normed_inputs() {
            true => (x, Some((&norm.weight.values, norm.eps))),
            false => {
                self.rms_norm(s, x, norm, h);
                (&*h, None)
            }
        };
        if pairs {
            let (Some(x), Some(out), Some(unused)) = (x.get(), gate.1.get(), up.1.get()) else { return };
            let layers = &[(gate.0, out), (up.0, unused)];
            let several = Several { x, norm, layers, activation: Some(activation), routes: None };
            return several.record(&*self.gpu, &mut s.recorder);
        }
        self.matmul(s, h, &mut [(gate.0, &mut *gate.1), (up.0, &mut *up.1)]);
        self.gated(s, activation, gate.1, up.1);
    }

    /// Without a norm the kernel adds its results to the residual stream by itself.
    fn matmul_add(
        &self,
        s: &mut Stream<D>,
        x: &Buffer<D>,
        layer: &Linear<D>,
        norm: Option<Norm<'_, Self>>,
        projected: &mut Buffer<D>,
        sum: &mut Buffer<D>,
    ) {
        s.rotate(&*self.gpu);
        if let Some(norm) = norm {
            self.matmul(s, x, &mut [(layer, projected)]);
            self.norm_in_place(s, projected, norm);
            return self.add(s, sum, projected);
        }
        let (n, gpu) = (s.n(x.rows), &*self.gpu);
        let (Some(x), Some(out)) = (x.get(), sum.get()) else { return };
        let halves = Halves::write(s.halves[0].as_ref(), gpu, &mut s.recorder, (x, n), &[layer], None);
        let product = Product { x, layer, out, n, cap: None, routes: None, added: true, halves };
        product.record(gpu, &mut s.recorder);
    }

    fn rope(&self, s: &mut Stream<D>, x: &mut Buffer<D>, head_dim: usize, rope: usize) {
        s.rotate_if_of(&*self.gpu, [x, x]);
        let rotation = Rotation::new(s, x, head_dim as u32, rope);
        s.rotations.extend(rotation);
    }

    fn gated(&self, s: &mut Stream<D>, activation: Activation, gate: &mut Buffer<D>, up: &Buffer<D>) {
        s.rotate(&*self.gpu);
        let elements = u64::from(s.n(gate.rows)) * u64::from(gate.width);
        if let (Some(gate), Some(up)) = (gate.get(), up.get()) {
            self.gate(&mut s.recorder, activation, gate, up, elements);
        }
    }

    /// One launch per layer of all experts, and for few rows one for gate and up: each routed row finds the weights of its expert, and only
    /// those are read.
    fn experts(
        &self,
        s: &mut Stream<D>,
        x: &Buffer<D>,
        layer: &Experts<Self>,
        activation: Activation,
        out: &mut Buffer<D>,
    ) {
        s.rotate(&*self.gpu);
        let n = s.n(x.rows);
        let width = out.width;
        let (Some(x), Some(out)) = (x.get(), out.get()) else { return };
        let Some(rows) = s.experts.as_ref() else {
            return s.fail(DeviceError::Unsupported("experts in a model that was said to have none".into()));
        };
        let (gpu, recorder) = (&*self.gpu, &mut s.recorder);
        let [of_tokens, of_experts] = s.halves.each_ref().map(Option::as_ref);
        let Routing { n_experts, used, renormalise, .. } = layer.routing;
        let (n_experts, used) = (n_experts as u32, used as u32);
        let n_routed = n * used;
        let (router, odds, table) = (&layer.router, &rows.odds, &rows.routes);
        let halves = Halves::write(of_tokens, gpu, recorder, (x, n), &[router], None);
        Product { x, layer: router, out: odds, n, cap: None, routes: None, added: false, halves }
            .record(gpu, recorder);
        let args = Args::new(&[n, n_experts, used, u32::from(renormalise)]);
        gpu.record(recorder, &Kernel::Route, &[Some(odds), Some(table)], args, [n, 1, 1]);
        let of_token = Routes { table, n_experts, used, share: used };
        let of_row = Routes { share: 1, ..of_token };
        let in_tiles =
            |layer: &Linear<D>| tile_of(gpu, layer, n_routed, Some(of_token), gpu.has_halves()).is_some();
        if [&layer.gate, &layer.up, &layer.down].into_iter().any(in_tiles) {
            let args = Args::new(&[n_routed, n_experts]);
            gpu.record(recorder, &Kernel::Sort, &[Some(table)], args, [n_experts, 1, 1]);
        }
        let layers = [(&layer.gate, &rows.gate), (&layer.up, &rows.up)];
        let wanted = layers.map(|(layer, _)| layer);
        let routes = Some(of_token);
        // The router may have written the same rows.
        let halves = halves.or_else(|| Halves::write(of_tokens, gpu, recorder, (x, n), &wanted, routes));
        let by_rows = !wanted.into_iter().any(in_tiles);
        if by_rows && routed_together(gpu, n_routed, &layer.gate, &layer.up) {
            let routes = Some((of_token, n_routed));
            Several { x, norm: None, layers: &layers, activation: Some(activation), routes }
                .record(gpu, recorder);
        } else {
            for (layer, out) in layers {
                Product { x, layer, out, n: n_routed, cap: None, routes, added: false, halves }
                    .record(gpu, recorder);
            }
            let elements = u64::from(n_routed) * u64::from(layer.gate.outputs);
            self.gate(recorder, activation, &rows.gate, &rows.up, elements);
        }
        let (x, layer, routes) = (&rows.gate, &layer.down, Some(of_row));
        let halves = Halves::write(of_experts, gpu, recorder, (x, n_routed), &[layer], routes);
        Product { x, layer, out: &rows.up, n: n_routed, cap: None, routes, added: false, halves }
            .record(gpu, recorder);
        let (args, groups) = (Args::new(&[width, used, n]), [width.div_ceil(64), n, 1]);
        gpu.record(recorder, &Kernel::Combine, &[Some(table), Some(&rows.up), Some(out)], args, groups);
    }

    fn concat(&self, s: &mut Stream<D>, a: &Buffer<D>, b: &Buffer<D>, out: &mut Buffer<D>) {
        s.rotate(&*self.gpu);
        let n = s.n(out.rows);
        let Some(data) = out.get() else { return };
        for (x, column) in [(a, 0), (b, a.width)] {
            let to = (data, out.width, column);
            copy_rows(&*self.gpu, &mut s.recorder, (RowsOp::Copy, None), (x.get(), x.width), to, n);
        }
    }

    fn add(&self, s: &mut Stream<D>, x: &mut Buffer<D>, y: &Buffer<D>) {
        s.rotate(&*self.gpu);
        let elements = u64::from(s.n(x.rows)) * u64::from(x.width);
        if let (Some(x), Some(y), Some(groups)) =
            (x.get(), y.get(), groups(elements, self.gpu.elements_at_once()))
        {
            let args = Args::new(&[elements as u32]);
            self.gpu.record(&mut s.recorder, &Kernel::Add, &[Some(y), Some(x)], args, groups);
        }
    }

    fn attend(
        &self,
        s: &mut Stream<D>,
        pools: &mut GpuPools<D>,
        plan: &StepPlan,
        call: LayerAttention<'_, Self>,
    ) -> Result<(), DeviceError> {
        let missing = || DeviceError::LayerOrder(call.layer);
        let kv = match call.kv {
            Some((k, v)) => Some((k.get().ok_or_else(missing)?, v.get().ok_or_else(missing)?)),
            None => None,
        };
        let together = call.kv.filter(|_| pools.stores_both(call.layer));
        let angles = together.and_then(|(k, _)| s.take_rotation((call.q, k), call.head_dim));
        s.rotate(&*self.gpu);
        let rows = DeviceRows {
            layer: call.layer,
            rotation: angles.map(|angles| (&s.angles, angles)),
            q: call.q.get().ok_or_else(missing)?,
            kv,
            out: call.out.get().ok_or_else(missing)?,
            scale: call.scale,
            softcap: call.softcap,
            sinks: call.sinks.map(|sinks| &sinks.values),
        };
        pools.record(&mut s.recorder, plan, &rows)
    }

    fn tap(&self, s: &mut Stream<D>, i: usize, x: &Buffer<D>) {
        s.rotate(&*self.gpu);
        let n = s.n(x.rows);
        let Some(from) = x.get() else { return };
        match s.taps.write(&*self.gpu, i, (s.limits.max_tokens, x.width)) {
            Ok(tap) => {
                let op = (RowsOp::Copy, None);
                copy_rows(&*self.gpu, &mut s.recorder, op, (Some(from), x.width), (tap, x.width, 0), n);
            }
            Err(error) => s.fail(error),
        }
    }

    fn wanted_rows(&self, s: &mut Stream<D>, x: &Buffer<D>, out: &mut Buffer<D>) {
        s.rotate(&*self.gpu);
        let n = s.n(RowsOf::Wanted);
        let Some(data) = out.get() else { return };
        let op = (RowsOp::Gather, Some(&s.wanted));
        copy_rows(&*self.gpu, &mut s.recorder, op, (x.get(), x.width), (data, x.width, 0), n);
    }

    fn logits(&self, s: &mut Stream<D>, x: &Buffer<D>, head: &Linear<D>, softcap: Option<f32>) {
        s.rotate(&*self.gpu);
        let n = s.n(x.rows);
        if head.outputs != s.vocab {
            let (rows, vocab) = (head.outputs, s.vocab);
            return s.fail(DeviceError::Unsupported(format!(
                "an output layer of {rows} rows for {vocab} tokens"
            )));
        }
        let Some(x) = x.get() else { return };
        let halves = Halves::write(s.halves[0].as_ref(), &*self.gpu, &mut s.recorder, (x, n), &[head], None);
        let out = &s.logits;
        let product = Product { x, layer: head, out, n, cap: softcap, routes: None, added: false, halves };
        product.record(&*self.gpu, &mut s.recorder);
    }

    fn answer_rows(&self, s: &mut Stream<D>) {
        let n = s.n(RowsOf::Wanted);
        if s.top.iter().any(|k| *k > 0) {
            let args = Args::new(&[s.vocab, n, ANSWER]);
            let buffers = [Some(&s.logits), Some(&s.wanted), Some(&s.answers)];
            self.gpu.record(&mut s.recorder, &Kernel::Top, &buffers, args, [n, 1, 1]);
        }
    }

    fn submit(&self, s: &mut Stream<D>) -> Result<Ticket, DeviceError> {
        s.rotate(&*self.gpu);
        if let Some(error) = s.failed.take() {
            s.recorder.restart();
            return Err(error);
        }
        let submission = s.submit(&*self.gpu)?;
        s.submitted = Ticket(s.submitted.0 + 1);
        s.running.push((s.submitted, submission));
        self.gpu.check()?;
        Ok(s.submitted)
    }

    fn is_done(&self, s: &Stream<D>, ticket: Ticket) -> bool {
        // An error shows in `wait`.
        let mut earlier = s.running.iter().filter(|(submitted, _)| *submitted <= ticket);
        earlier.all(|(_, submission)| self.gpu.is_done(submission)) || self.gpu.check().is_err()
    }

    fn wait(&self, s: &mut Stream<D>, ticket: Ticket) -> Result<LayersRan, DeviceError> {
        let step = s.step.filter(|_| ticket == s.submitted).ok_or(DeviceError::StalePlan)?;
        if let Some((_, submission)) = s.running.last() {
            self.gpu.wait(submission)?;
        }
        s.running.clear();
        read_rows(&*self.gpu, s)?;
        s.taps.read(&*self.gpu, s.n_tokens, &mut s.output.taps)?;
        Ok(LayersRan(step))
    }

    fn output(s: &Stream<D>) -> &StepOutput {
        &s.output
    }
    fn output_mut(s: &mut Stream<D>) -> &mut StepOutput {
        &mut s.output
    }
}
