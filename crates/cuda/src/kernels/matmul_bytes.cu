// A linear layer for one token with weights of encodings in blocks (see product.cu and units.cu), in sums of any order. The first
// weights are loaded before the kernel waits for the one that writes x.

extern "C" __global__ void __launch_bounds__(256, 3) matmul(
    const u32* __restrict__ w,
    const float* __restrict__ x,      // [tokens, inputs]
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const float* __restrict__ routes, // [tokens, experts], 0: not routed
    Args args) {
    u32 lane = threadIdx.x % 32u;
    u32 token = blockIdx.y;
    u32 first_row = blockIdx.x * ROWS + threadIdx.x / 32u * EACH;
    Row rows[EACH];
    // Rows behind the last one are computed like it, and not written.
#pragma unroll
    for (u32 r = 0u; r < EACH; r++) {
        rows[r] = Row{w, args.form, min(first_row + r, args.outputs - 1u) * args.form.quads};
    }
    Raw raw[DEPTH][EACH];
    if (!ROUTED) { fetch_first(raw, rows); } // no kernel writes weights
    after_the_kernel_before();
    if (ROUTED) {
        if (!any_routed(routes, args, token, 1u)) { return; } // of the whole block
        fetch_first(raw, rows);
    }
    float total[EACH];
    add_units(total, raw, rows, x + token * args.inputs);
    if (lane % 16u == 0u) { put(args, bias, routes, out, first_row + lane / 16u, token, total[0]); }
}
