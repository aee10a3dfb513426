//! The MLP of a layer: one gated MLP, or a mixture of experts with a router.
//!
//! ```text
//! dense      y = (f(h·Wgate) * (h·Wup))·Wdown
//! experts    p = softmax(h·Wrouter);  y = Σ pᵢ · expertᵢ(h)  over the likeliest few
//! ```
//! Only experts that a token of the batch is routed to are read, each once for all its tokens. The outputs of a token's
//! experts are added in order of expert number, whatever else is in the batch.
use crate::config::Experts;
use crate::weights::Linear;
use kvist_cpu::linear::{Input, Inputs};
use kvist_cpu::steps::Gate;
use kvist_cpu::{Compute, steps};

#[derive(Debug)]
pub(super) enum Mlp {
    Dense(Gated),
    Routed(Routed),
}

/// A gated MLP (Shazeer, 2020).
#[derive(Debug)]
pub(super) struct Gated {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

/// A mixture of experts.
#[derive(Debug)]
pub(super) struct Routed {
    pub router: Linear, // [n experts, hidden]
    pub experts: Vec<Gated>,
    pub how: Experts,
}

/// The buffers of one pass, reused.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    wide: Wide,
    wide_inputs: Inputs,
    odds: Vec<f32>,     // [tokens, n experts]
    routes: Vec<Route>, // [tokens × used], by expert
    order: Vec<u32>,    // [n experts]
    rows: Vec<f32>,     // [tokens of an expert, hidden]
    row_inputs: Inputs,
    answer: Vec<f32>,
}

/// Buffers as wide as the MLP.
#[derive(Debug, Default)]
struct Wide {
    gate: Vec<f32>, // [tokens, width]
    up: Vec<f32>,
}

/// Routes a token to an expert, whose output is multiplied by the weight.
#[derive(Clone, Copy, Debug)]
struct Route {
    expert: u32,
    token: u32,
    weight: f32,
}

impl Buffers {
    /// Bytes for `n` tokens. `None` on overflow.
    pub fn bytes(n: usize, hidden: usize, dense_width: usize, experts: Option<&Experts>) -> Option<usize> {
        let width = experts.map_or(0, |experts| experts.width).max(dense_width);
        let mut floats = width.checked_mul(2)?;
        let mut routes = 0;
        if let Some(experts) = experts {
            floats = floats.checked_add(experts.n)?.checked_add(hidden.checked_mul(2)?)?;
            routes = experts.used;
        }
        let per_token = floats.checked_mul(size_of::<f32>())?;
        let per_token = per_token.checked_add(routes.checked_mul(size_of::<Route>())?)?;
        // A single MLP needs only the converted inputs that the whole pass has.
        let forms = match experts {
            Some(experts) => Inputs::bytes(n, hidden)?.checked_add(Inputs::bytes(n, experts.width)?)?,
            None => 0,
        };
        n.checked_mul(per_token)?.checked_add(forms)
    }
}

impl Mlp {
    /// `x: [n, hidden]`, `out` becomes `[n, hidden]`.
    pub fn forward(
        &self,
        compute: &Compute,
        f: Gate,
        x: &[f32],
        inputs: &mut Inputs,
        buffers: &mut Buffers,
        out: &mut Vec<f32>,
    ) {
        match self {
            Mlp::Dense(mlp) => {
                mlp.widen(compute, f, &mut inputs.of(x, mlp.gate.inputs()), &mut buffers.wide);
                mlp.narrow(compute, inputs, &buffers.wide, out);
            }
            Mlp::Routed(routed) => routed.forward(compute, f, x, inputs, buffers, out),
        }
    }
}

impl Gated {
    fn widen(&self, compute: &Compute, f: Gate, x: &mut Input<'_>, wide: &mut Wide) {
        self.gate.forward(compute, x, &mut wide.gate);
        self.up.forward(compute, x, &mut wide.up);
        steps::gated(compute, f, &mut wide.gate, &wide.up);
    }
    fn narrow(&self, compute: &Compute, inputs: &mut Inputs, wide: &Wide, out: &mut Vec<f32>) {
        self.down.forward(compute, &mut inputs.of(&wide.gate, self.down.inputs()), out);
    }
}

impl Routed {
    fn forward(
        &self,
        compute: &Compute,
        f: Gate,
        x: &[f32],
        inputs: &mut Inputs,
        buffers: &mut Buffers,
        out: &mut Vec<f32>,
    ) {
        let hidden = self.router.inputs();
        let Buffers { wide, wide_inputs, odds, routes, order, rows, row_inputs, answer } = buffers;
        let mut whole = inputs.of(x, hidden);
        self.router.forward(compute, &mut whole, odds);
        self.how.route(odds, order, routes);
        out.clear();
        out.resize(x.len(), 0.0);
        let alone = x.len() == hidden;
        for run in routes.chunk_by(|a, b| a.expert == b.expert) {
            let expert = &self.experts[run[0].expert as usize];
            if alone {
                // With a single token, all experts share its converted input.
                expert.widen(compute, f, &mut whole, wide);
            } else {
                rows.clear();
                for route in run {
                    let first = route.token as usize * hidden;
                    rows.extend_from_slice(&x[first..first + hidden]);
                }
                expert.widen(compute, f, &mut row_inputs.of(rows, hidden), wide);
            }
            expert.narrow(compute, wide_inputs, wide, answer);
            for (route, answer) in run.iter().zip(answer.chunks_exact(hidden)) {
                let first = route.token as usize * hidden;
                for (out, y) in out[first..first + hidden].iter_mut().zip(answer) {
                    *out += route.weight * y;
                }
            }
        }
    }
}

impl Experts {
    /// Selects the experts of each token from the router's output, sorted by expert.
    fn route(&self, odds: &mut [f32], order: &mut Vec<u32>, routes: &mut Vec<Route>) {
        routes.clear();
        for (token, odds) in odds.chunks_exact_mut(self.n).enumerate() {
            let max = odds.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for odd in odds.iter_mut() {
                *odd = (*odd - max).exp();
                sum += *odd;
            }
            order.clear();
            order.extend(0..self.n as u32);
            let likelier = |a: &u32, b: &u32| odds[*b as usize].total_cmp(&odds[*a as usize]).then(a.cmp(b));
            if self.used < self.n {
                order.select_nth_unstable_by(self.used - 1, likelier);
                order.truncate(self.used);
            }
            order.sort_unstable();
            if self.renormalise {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_goes_to_its_likeliest() {
        let (ln2, ln3) = (2f32.ln(), 3f32.ln());
        let odds = [0.0, ln3, ln2, ln2, ln2, 0.0, ln2, ln3];
        for renormalise in [false, true] {
            let experts = Experts { n: 4, used: 2, width: 8, renormalise, bias: false };
            let mut routes = Vec::new();
            experts.route(&mut odds.clone(), &mut Vec::new(), &mut routes);
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
        let experts = Experts { n: 2, used: 2, width: 8, renormalise: true, bias: false };
        let mut routes = Vec::new();
        experts.route(&mut [f32::NAN, 0.0], &mut Vec::new(), &mut routes);
        assert_eq!(routes.len(), 2, "what is not a number is still a route");
    }
}
