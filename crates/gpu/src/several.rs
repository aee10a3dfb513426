//! Linear layers of one token that share their inputs, in one launch.
use crate::driver::{Args, Driver};
use crate::kernels::{Kernel, MAX_GROUPS};
use crate::linear::Routes;
use crate::weights::{Linear, Part};
use kvist_device::Activation;

/// Layers of a launch of [`Kernel::Several`].
pub const MOST: usize = 3;

/// The number of an activation in the kernels, and its limit.
pub fn numbers(activation: Activation) -> (u32, f32) {
    match activation {
        Activation::Silu => (0, 0.0),
        Activation::Gelu => (1, 0.0),
        Activation::Clamped { limit } => (2, limit),
    }
}

/// Whether a driver computes both layers in one launch, for so many tokens.
pub fn together<D: Driver>(gpu: &D, n: u32, a: &Linear<D>, b: &Linear<D>) -> bool {
    n == 1 && alike(gpu, a, b)
}

/// Whether a driver computes gate and up layers of all experts in one launch, for `n` routed rows.
pub fn routed_together<D: Driver>(gpu: &D, n: u32, gate: &Linear<D>, up: &Linear<D>) -> bool {
    n <= MAX_GROUPS && gate.outputs == up.outputs && alike(gpu, gate, up)
}

fn alike<D: Driver>(gpu: &D, a: &Linear<D>, b: &Linear<D>) -> bool {
    let of_one_part = |layer: &Linear<D>| layer.parts.len() == 1;
    // Rows of floats whose loads of 16 bytes are whole; those of other encodings always are.
    let of_whole_loads = a.inputs.is_multiple_of(8);
    of_whole_loads
        && a.encoding == b.encoding
        && a.inputs == b.inputs
        && of_one_part(a)
        && of_one_part(b)
        && gpu.has_several(a.encoding)
}

/// Two or three layers over one row of `x`, of which each is `together` with the others.
pub struct Several<'a, D: Driver> {
    pub x: &'a D::Buffer,
    /// Weights of a norm that `x` goes through before, and what its mean square is increased by.
    pub norm: Option<(&'a D::Buffer, f32)>,
    pub layers: &'a [(&'a Linear<D>, &'a D::Buffer)],
    /// Of two layers with as many outputs: the first one's outputs become `activation(first, second)`, and the second one's are not
    /// written.
    pub activation: Option<Activation>,
    /// With an activation and without a norm: so many routed rows, and the layers are those of all experts.
    pub routes: Option<(Routes<'a, D>, u32)>,
}

impl<D: Driver> Several<'_, D> {
    pub fn record(&self, gpu: &D, recorder: &mut D::Recorder) {
        let Several { x, norm, layers, activation, routes } = *self;
        debug_assert!(routes.is_none() || activation.is_some() && norm.is_none());
        let Some((first, _)) = layers.first() else { return };
        let (encoding, gated) = (first.encoding, activation.is_some());
        let kernel = Kernel::Several { encoding, gated, normed: norm.is_some(), routed: routes.is_some() };
        let layer = |i: usize| layers.get(i).map(|(layer, _)| *layer);
        let part = |i: usize| -> Option<&Part<D>> { layer(i)?.parts.first() };
        let bias = |i: usize| layer(i)?.bias.as_ref();
        let out = |i: usize| layers.get(i).map(|(_, out)| *out);
        let (number, limit) = activation.map_or((0, 0.0), numbers);
        let biases = (0..MOST).fold(0, |bits, i| bits | u32::from(bias(i).is_some()) << i);
        let mut args = Args::new(&[part(0).map_or(0, |part| part.layout.quads), biases]);
        let outputs = [0, 1, 2].map(|i| layer(i).map_or(0, |layer| layer.outputs));
        let last = if activation.is_some() { number } else { outputs[2] };
        // The second of two gated layers has as many outputs as the first.
        let second = routes.map_or(outputs[1], |(routes, _)| routes.share);
        args = args.u32(outputs[0]).u32(second).u32(last);
        args = (0..MOST).fold(args, |args, i| args.u32(part(i).map_or(0, |part| part.layout.b)));
        args = (0..MOST).fold(args, |args, i| args.u32(part(i).map_or(0, |part| part.layout.s)));
        let factor = |i: usize| layer(i).map_or(limit, |layer| layer.factor);
        args = args.f32(factor(0)).f32(factor(1)).f32(factor(2)).f32(norm.map_or(0.0, |norm| norm.1));
        let buffers = [
            part(0).map(|part| &part.buffer),
            part(1).map(|part| &part.buffer),
            part(2).map(|part| &part.buffer).or(routes.map(|(routes, _)| routes.table)),
            Some(x),
            norm.map(|norm| norm.0),
            bias(0),
            bias(1),
            bias(2),
            out(0),
            out(1),
            out(2),
        ];
        let (rows, _) = gpu.product_tile(&kernel);
        let groups = match activation {
            Some(_) => (2 * outputs[0]).div_ceil(rows),
            None => outputs.map(|outputs| outputs.div_ceil(rows)).iter().sum(),
        };
        gpu.record(recorder, &kernel, &buffers, args, [groups, routes.map_or(1, |(_, n)| n), 1]);
    }
}
