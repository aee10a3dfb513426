//! A mixture of experts: a router, and gated MLPs of which each token uses a few.
//!
//! ```text
//! p = softmax(x·Wrouter);  y = Σ pᵢ · expertᵢ(x)  over the likeliest few;  expert(x) = (f(x·Wgate) * (x·Wup))·Wdown
//! ```
//! Only experts that a token of the batch is routed to are read, each once for all its tokens. The outputs of a token's
//! experts are added in order of expert number, whatever else is in the batch.
use crate::layer::Linear;
use crate::linear::{Input, Inputs};
use crate::{Compute, Cpu, steps};
use kvist_device::{Activation, Experts, ModelShape, Routing};

/// The buffers of a pass, reused.
#[derive(Debug, Default)]
pub struct Scratch {
    gate: Vec<f32>, // [tokens of an expert, width]
    up: Vec<f32>,
    wide_inputs: Inputs,
    odds: Vec<f32>,     // [tokens, n experts]
    routes: Vec<Route>, // [tokens × used], by expert
    order: Vec<u32>,    // [n experts]
    rows: Vec<f32>,     // [tokens of an expert, hidden]
    row_inputs: Inputs,
    output: Vec<f32>, // [tokens of an expert, hidden]
}

/// Routes a token to an expert, whose output is multiplied by the weight.
#[derive(Clone, Copy, Debug)]
struct Route {
    expert: u32,
    token: u32,
    weight: f32,
}

impl Scratch {
    /// Bytes for `n` tokens. `None` on overflow.
    pub fn bytes(compute: &Compute, n: usize, shape: &ModelShape) -> Option<usize> {
        let Some(routing) = shape.routing else { return Some(0) };
        let floats = routing.width.checked_mul(2)?.checked_add(routing.n_experts)?;
        let floats = floats.checked_add(shape.hidden.checked_mul(2)?)?;
        let routes = routing.used.checked_mul(size_of::<Route>())?;
        let per_token = floats.checked_mul(size_of::<f32>())?.checked_add(routes)?;
        let inputs = |width| Inputs::bytes(compute, n, width);
        let inputs = inputs(shape.hidden)?.checked_add(inputs(routing.width)?)?;
        let order = routing.n_experts.checked_mul(size_of::<u32>())?;
        n.checked_mul(per_token)?.checked_add(order)?.checked_add(inputs)
    }
}

/// Empties `all` and makes room for `n` elements. The plan counts no more than that: a vector that grows by itself doubles.
fn begin<T>(all: &mut Vec<T>, n: usize) {
    all.clear();
    all.reserve_exact(n);
}

/// `out = layer(x: [n, x], widths)`, resized.
fn into(compute: &Compute, layer: &Linear, x: &mut Input<'_>, out: &mut Vec<f32>) {
    let len = x.n() * layer.outputs();
    out.reserve_exact(len.saturating_sub(out.len()));
    out.resize(len, 0.0);
    layer.multiply(compute, x, out);
}

/// `out: [n, hidden]` becomes the sum of the experts' outputs for `x: [n, hidden]`.
pub fn run(
    compute: &Compute,
    layer: &Experts<Cpu>,
    activation: Activation,
    x: &[f32],
    inputs: &mut Inputs,
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let hidden = layer.router.inputs();
    let Scratch { gate, up, wide_inputs, odds, routes, order, rows, row_inputs, output } = scratch;
    let mut widen = |expert: usize, x: &mut Input<'_>, gate: &mut Vec<f32>| {
        into(compute, &layer.gate[expert], x, gate);
        into(compute, &layer.up[expert], x, up);
        steps::gated(compute, activation, gate, up);
    };
    let mut whole = inputs.of(x, hidden);
    into(compute, &layer.router, &mut whole, odds);
    route(&layer.routing, odds, order, routes);
    out.fill(0.0);
    let alone = x.len() == hidden;
    for run in routes.chunk_by(|a, b| a.expert == b.expert) {
        let expert = run[0].expert as usize;
        if alone {
            // With a single token, all experts share its converted input.
            widen(expert, &mut whole, gate);
        } else {
            begin(rows, run.len() * hidden);
            for route in run {
                let first = route.token as usize * hidden;
                rows.extend_from_slice(&x[first..first + hidden]);
            }
            widen(expert, &mut row_inputs.of(rows, hidden), gate);
        }
        let down = &layer.down[expert];
        into(compute, down, &mut wide_inputs.of(gate, down.inputs()), output);
        for (route, output) in run.iter().zip(output.chunks_exact(hidden)) {
            let first = route.token as usize * hidden;
            for (out, y) in out[first..first + hidden].iter_mut().zip(output) {
                *out += route.weight * y;
            }
        }
    }
}

/// Selects the experts of each token from the router's output, sorted by expert.
fn route(routing: &Routing, odds: &mut [f32], order: &mut Vec<u32>, routes: &mut Vec<Route>) {
    begin(routes, odds.len() / routing.n_experts * routing.used);
    for (token, odds) in odds.chunks_exact_mut(routing.n_experts).enumerate() {
        let max = odds.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for odd in odds.iter_mut() {
            *odd = (*odd - max).exp();
            sum += *odd;
        }
        begin(order, routing.n_experts);
        order.extend(0..routing.n_experts as u32);
        let likelier = |a: &u32, b: &u32| odds[*b as usize].total_cmp(&odds[*a as usize]).then(a.cmp(b));
        if routing.used < routing.n_experts {
            order.select_nth_unstable_by(routing.used - 1, likelier);
            order.truncate(routing.used);
        }
        order.sort_unstable();
        if routing.renormalise {
            sum = order.iter().map(|expert| odds[*expert as usize]).sum();
        }
        routes.extend(order.iter().map(|expert| Route {
            expert: *expert,
            token: token as u32,
            weight: odds[*expert as usize] / sum,
        }));
    }
    routes.sort_unstable_by_key(|route| (route.expert, route.token));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Isa;
    use crate::linear::Matrix;
    use kvist_device::weights::Encoding;

    /// In batches that grow, all of whose tokens use all experts.
    #[test]
    fn buffers_are_as_large_as_planned() {
        let (hidden, n_experts, width, most) = (32, 3, 64, 23);
        let routing = Routing { n_experts, used: n_experts, width, renormalise: true };
        let shape = ModelShape {
            hidden,
            n_heads: 1,
            n_kv_heads: 1,
            head_dim: hidden,
            vocab: 1,
            intermediate: 0,
            routing: Some(routing),
            rope_pairs: Vec::new(),
            features: 0,
        };
        let compute = Compute::new(Isa::best(), 1);
        let linear = |outputs: usize, inputs: usize| {
            let bytes = 0.5f32.to_le_bytes().repeat(outputs * inputs);
            let weight = Matrix::pack(&compute, Encoding::F32, outputs, inputs, &bytes).unwrap();
            Linear { weight, scale: 1.0, bias: None }
        };
        let stack = |outputs, inputs| (0..n_experts).map(|_| linear(outputs, inputs)).collect();
        let layer = Experts::<Cpu> {
            router: linear(n_experts, hidden),
            gate: stack(width, hidden),
            up: stack(width, hidden),
            down: stack(hidden, width),
            routing,
        };
        let (mut scratch, mut inputs) = (Scratch::default(), Inputs::default());
        for n in [1, 2, 13, 14, most] {
            let (x, mut out) = (vec![0.5; n * hidden], vec![0.0; n * hidden]);
            run(&compute, &layer, Activation::Silu, &x, &mut inputs, &mut scratch, &mut out);
        }
        let Scratch { gate, up, odds, routes, order, rows, output, .. } = &scratch;
        let floats = [gate, up, odds, rows, output].map(Vec::capacity).iter().sum::<usize>();
        let bytes = size_of::<Route>() * routes.capacity() + 4 * (floats + order.capacity());
        let inputs = [hidden, width].map(|width| Inputs::bytes(&compute, most, width).unwrap());
        let planned = Scratch::bytes(&compute, most, &shape).unwrap() - inputs.iter().sum::<usize>();
        assert_eq!(bytes, planned);
    }

    #[test]
    fn each_token_goes_to_its_likeliest() {
        let (ln2, ln3) = (2f32.ln(), 3f32.ln());
        let odds = [0.0, ln3, ln2, ln2, ln2, 0.0, ln2, ln3];
        for renormalise in [false, true] {
            let routing = Routing { n_experts: 4, used: 2, width: 8, renormalise };
            let mut routes = Vec::new();
            route(&routing, &mut odds.clone(), &mut Vec::new(), &mut routes);
            let found: Vec<_> = routes.iter().map(|r| (r.expert, r.token, r.weight)).collect();
            // Among equals the first is chosen.
            let sum = if renormalise { 5.0 } else { 8.0 };
            let expected = [(0, 1, 2.0), (1, 0, 3.0), (2, 0, 2.0), (3, 1, 3.0)];
            assert_eq!(found.len(), 4);
            for (found, expected) in found.iter().zip(expected) {
                assert_eq!((found.0, found.1), (expected.0, expected.1));
                assert!((found.2 - expected.2 / sum).abs() < 1e-6, "{found:?} {expected:?}");
            }
        }
        let routing = Routing { n_experts: 2, used: 2, width: 8, renormalise: true };
        let mut routes = Vec::new();
        route(&routing, &mut [f32::NAN, 0.0], &mut Vec::new(), &mut routes);
        assert_eq!(routes.len(), 2, "what is not a number is still a route");
    }
}
