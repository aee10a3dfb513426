// activation(gate, up)      silu: g * sigmoid(g) * u;  gelu (tanh): g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)) * u;
//                          clamped: g' = min(g, limit), u' = clamp(u, limit): g' * sigmoid(1.702 g') * (u' + 1)
//
// `activation`: 0 silu, 1 gelu, 2 clamped
__device__ __forceinline__ float gated_(float g, float u, u32 activation, float limit) {
    float y = g;
    if (activation == 1u) {
        y = 1.5957691216057308f * (g + 0.044715f * g * g * g);
    } else if (activation == 2u) {
        // Comparisons instead of fminf and fmaxf: NaN stays NaN.
        g = g > limit ? limit : g;
        u = u > limit ? limit : (u < -limit ? -limit : u);
        u += 1.0f;
        y = 1.702f * g;
    }
    return g * sigmoid(y) * u;
}
