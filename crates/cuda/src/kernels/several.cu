// Up to three linear layers for one token that share their inputs and the encoding of their weights, as matmul_bytes.cu computes each one,
// with the same bits. Fewer launches, and the blocks of small layers fill the GPU together.
//
//   for each layer i, for each of its outputs o:  out_i[o] = factor_i * (x . W_i[o]) + bias_i[o]
//   GATED, of two layers:  out_0[o] = activation(out_0[o], out_1[o]), and out_1 is not written

// Of layers that are not there, outputs is 0.
struct SeveralArgs {
    u32 quads;
    u32 biases;     // bit i: layer i has one
    u32 outputs[3]; // GATED: the last one is the activation
    u32 b[3];       // as in Form
    u32 s[3];
    float factors[3]; // GATED: the last one is its limit
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

extern "C" __global__ void __launch_bounds__(256, 3) several(
    const u32* __restrict__ w0,
    const u32* __restrict__ w1,
    const u32* __restrict__ w2,
    const float* __restrict__ x, // [inputs]
    const float* __restrict__ bias0,
    const float* __restrict__ bias1,
    const float* __restrict__ bias2,
    float* __restrict__ out0,
    float* __restrict__ out1,
    float* __restrict__ out2,
    SeveralArgs args) {
    u32 lane = threadIdx.x % 32u;
    u32 warp = threadIdx.x / 32u;
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
    // GATED: a warp has the same row of both layers.
    u32 first_row = GATED ? block * WARPS + warp : block * ROWS + warp * EACH;
    Row rows[EACH];
    // Rows behind the last one are computed like it, and not written.
#pragma unroll
    for (u32 r = 0u; r < EACH; r++) {
        u32 of = GATED ? r : layer;
        u32 row = min(first_row + (GATED ? 0u : r), outputs - 1u);
        rows[r].w = one_of(of, w0, w1, w2);
        rows[r].form.quads = args.quads;
        rows[r].form.b = one_of(of, args.b[0], args.b[1], args.b[2]);
        rows[r].form.s = one_of(of, args.s[0], args.s[1], args.s[2]);
        rows[r].before = row * args.quads;
    }
    Raw raw[DEPTH][EACH];
    fetch_first(raw, rows); // no kernel writes weights
    after_the_kernel_before();
    float total[EACH];
    add_units(total, raw, rows, x);
    if (GATED) {
        float up = __shfl_sync(WARP, total[0], 16u);
        if (lane == 0u && first_row < outputs) {
            float g = finished(total[0], args.factors[0], (args.biases & 1u) != 0u, bias0, first_row);
            float u = finished(up, args.factors[1], (args.biases & 2u) != 0u, bias1, first_row);
            out0[first_row] = gated_(g, u, args.outputs[2], args.factors[2]);
        }
        return;
    }
    u32 o = first_row + lane / 16u;
    if (lane % 16u == 0u && o < outputs) {
        bool has_bias = (args.biases >> layer & 1u) != 0u;
        float factor = one_of(layer, args.factors[0], args.factors[1], args.factors[2]);
        float* out = one_of(layer, out0, out1, out2);
        out[o] = finished(total[0], factor, has_bias, one_of(layer, bias0, bias1, bias2), o);
    }
}
