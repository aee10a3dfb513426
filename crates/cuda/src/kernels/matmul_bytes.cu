// A linear layer for one token with weights of encodings in blocks (see product.cu and units.cu), in sums of any order. The first
// weights are loaded before the kernel waits for the one that writes x.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(
    const u32* __restrict__ w,
    const float* __restrict__ x,      // [tokens, inputs]
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const float* __restrict__ routes, // [tokens, experts], 0: not routed
    Args args) {
    __shared__ float sums[SUMS];
    u32 token = blockIdx.y;
    Rows rows;
    rows.sides[0] = Matrix{w, args.form};
    rows.first = blockIdx.x * ROWS;
    rows.last = args.outputs - 1u;
    u32 units = args.form.quads / UNIT_QUADS;
    Raw raw[ROWS];
    if (!ROUTED) { fetch_units(raw, rows, threadIdx.x, units); } // no kernel writes weights
    after_the_kernel_before();
    if (ROUTED) {
        if (!any_routed(routes, args, token, 1u)) { return; } // of the whole block
        fetch_units(raw, rows, threadIdx.x, units);
    }
    add_units(sums, raw, rows, x + token * args.inputs, nullptr, 0.0f);
    if (threadIdx.x < ROWS) { put(args, bias, routes, out, rows.first + threadIdx.x, token, sums[threadIdx.x]); }
}
