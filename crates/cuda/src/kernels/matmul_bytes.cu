// A linear layer for one token with weights of encodings in blocks (see product.cu and units.cu), in sums of any order. The first
// weights are loaded before the kernel waits for the one that writes x.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(
    const u32* __restrict__ w,
    const float* __restrict__ x,      // [tokens, inputs]
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const u32* __restrict__ routes,   // as routes.cu says
    Args args) {
    __shared__ float sums[SUMS];
    u32 token = blockIdx.y;
    Rows rows;
    rows.sides[0] = Matrix{w, args.form};
    u32 first = blockIdx.x * ROWS;
    u32 units = args.form.quads / UNIT_QUADS;
    Raw raw[ROWS];
    if (ROUTED) { after_the_kernel_before(); } // which may have written the routes
    Work work = work_of(routes, args, ROUTED ? routes[token] : 0u);
    if (ROUTED && first >= work.outputs) { return; } // the whole block
    rows.first = work.before + first;
    rows.last = work.before + work.outputs - 1u;
    fetch_units(raw, rows, threadIdx.x, units); // no kernel writes weights
    if (!ROUTED) { after_the_kernel_before(); }
    add_units(sums, raw, rows, x + work.inputs(args, token) * args.inputs, nullptr, 0.0f);
    if (threadIdx.x < ROWS) { put(args, work, bias, out, first + threadIdx.x, token, sums[threadIdx.x]); }
}
