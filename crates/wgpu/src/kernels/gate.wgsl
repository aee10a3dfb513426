// The activation of an MLP.
//
//   silu: g * sigmoid(g) * u;  gelu (tanh): g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)) * u;
//   clamped: g' = min(g, limit), u' = clamp(u, limit): g' * sigmoid(1.702 g') * (u' + 1)

fn gated_(gate: f32, up: f32, activation: u32, limit: f32) -> f32 {
    var g = gate;
    var u = up;
    var y = g;
    if (activation == 1u) {
        y = 1.5957691216057308 * (g + 0.044715 * g * g * g);
    } else if (activation == 2u) {
        g = min(g, limit);
        u = clamp(u, -limit, limit) + 1.0;
        y = 1.702 * g;
    }
    return g * sigmoid(y) * u;
}
