// The gate of an MLP.
//
//   gate = activation(gate, up)      silu: g * sigmoid(g) * u;  gelu (tanh): g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)) * u;
//                                    clamped: g' = min(g, limit), u' = clamp(u, limit): g' * sigmoid(1.702 g') * (u' + 1)

struct Args {
    u32 elements;
    u32 activation; // 0 silu, 1 gelu, 2 clamped
    float limit;
};

extern "C" __global__ void gated(const float* __restrict__ up, float* __restrict__ gate, Args args) {
    u32 i = (blockIdx.y * 65535u + blockIdx.x) * 64u + threadIdx.x;
    if (i >= args.elements) { return; }
    float g = gate[i];
    float u = up[i];
    float y = g;
    if (args.activation == 1u) {
        y = 1.5957691216057308f * (g + 0.044715f * g * g * g);
    } else if (args.activation == 2u) {
        // Comparisons instead of fminf and fmaxf: NaN stays NaN.
        g = g > args.limit ? args.limit : g;
        u = u > args.limit ? args.limit : (u < -args.limit ? -args.limit : u);
        u += 1.0f;
        y = 1.702f * g;
    }
    gate[i] = g * sigmoid(y) * u;
}
