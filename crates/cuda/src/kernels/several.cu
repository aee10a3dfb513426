// Up to three linear layers for one token that share their inputs and the encoding of their weights, as matmul_bytes.cu computes each one,
// with the same bits unless NORMED. Fewer launches, and the blocks of small layers fill the GPU together.
//
//   for each layer i, for each of its outputs o:  out_i[o] = factor_i * (x . W_i[o]) + bias_i[o]
//   GATED, of two layers:  out_0[o] = activation(out_0[o], out_1[o]), and out_1 is not written
//   ROUTED, of two gated layers of all experts:  the same for every routed row, with its expert's layers and the inputs of its token (see
//           product.cu). `w2` are the routes
//   NORMED:  x * norm / sqrt(mean(x^2) + eps) instead of x. Every block adds up the squares by itself, which
//           for few inputs costs less than a launch.

// Of layers that are not there, outputs is 0.
struct SeveralArgs {
    u32 quads;
    u32 biases;     // bit i: layer i has one
    u32 outputs[3]; // GATED: the last one is the activation; ROUTED: the second one is how many routed rows a token has
    u32 b[3];       // as in Form
    u32 s[3];
    float factors[3]; // GATED: the last one is its limit
    float eps;
};
static_assert(sizeof(SeveralArgs) <= 64u, "what a launch passes");

// Item i of three.
template <typename T>
__device__ __forceinline__ T one_of(u32 i, T a, T b, T c) {
    return i == 0u ? a : (i == 1u ? b : c);
}

__device__ __forceinline__ float finished(float sum, float factor, bool has_bias, const float* bias, u32 o) {
    return has_bias ? fmaf(sum, factor, bias[o]) : sum * factor;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) several(
    const u32* __restrict__ w0,
    const u32* __restrict__ w1,
    const u32* __restrict__ w2,
    const float* __restrict__ x,    // [inputs]
    const float* __restrict__ norm, // [inputs]
    const float* __restrict__ bias0,
    const float* __restrict__ bias1,
    const float* __restrict__ bias2,
    float* __restrict__ out0,
    float* __restrict__ out1,
    float* __restrict__ out2,
    SeveralArgs args) {
    __shared__ float sums[SUMS];
    u32 layer = 0u;
    u32 block = blockIdx.x;
    if (!GATED) {
#pragma unroll
        for (u32 i = 0u; i < 2u; i++) {
            u32 blocks = (args.outputs[i] + ROWS - 1u) / ROWS;
            if (layer == i && block >= blocks) {
                block -= blocks;
                layer = i + 1u;
            }
        }
    }
    u32 outputs = one_of(layer, args.outputs[0], args.outputs[1], args.outputs[2]);
    Rows rows;
#pragma unroll
    for (u32 i = 0u; i < SIDES; i++) {
        u32 of = GATED ? i : layer;
        rows.sides[i].w = one_of(of, w0, w1, w2);
        rows.sides[i].form.quads = args.quads;
        rows.sides[i].form.b = one_of(of, args.b[0], args.b[1], args.b[2]);
        rows.sides[i].form.s = one_of(of, args.s[0], args.s[1], args.s[2]);
    }
    u32 first = block * ROWS_OF_SIDE;
    u32 before = 0u; // rows of other experts
    if (ROUTED) {
        after_the_kernel_before(); // which may have written the routes
        before = w2[blockIdx.y] * outputs;
        x += blockIdx.y / args.outputs[1] * (args.quads * 4u);
        out0 += blockIdx.y * outputs;
    }
    rows.first = before + first;
    rows.last = before + outputs - 1u;
    Raw raw[ROWS];
    fetch_units(raw, rows, threadIdx.x, args.quads / UNIT_QUADS); // no kernel writes weights
    if (!ROUTED) { after_the_kernel_before(); }
    add_units(sums, raw, rows, x, norm, args.eps);
    u32 o = first + threadIdx.x;
    if (threadIdx.x >= ROWS_OF_SIDE || o >= outputs) { return; }
    if (GATED) {
        float g = finished(sums[threadIdx.x], args.factors[0], (args.biases & 1u) != 0u, bias0, before + o);
        float u = finished(sums[ROWS_OF_SIDE + threadIdx.x], args.factors[1], (args.biases & 2u) != 0u, bias1, before + o);
        out0[o] = gated_(g, u, args.outputs[2], args.factors[2]);
        return;
    }
    bool has_bias = (args.biases >> layer & 1u) != 0u;
    float factor = one_of(layer, args.factors[0], args.factors[1], args.factors[2]);
    float* out = one_of(layer, out0, out1, out2);
    out[o] = finished(sums[threadIdx.x], factor, has_bias, one_of(layer, bias0, bias1, bias2), o);
}
