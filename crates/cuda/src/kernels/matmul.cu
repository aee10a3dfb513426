// A linear layer for a few tokens (see product.cu): a block has eight output rows, 16 lanes share one. A decoded weight is
// used for TOKENS tokens.

extern "C" __global__ void __launch_bounds__(128) matmul(
    const u32* __restrict__ w,
    const float* __restrict__ x,      // [tokens, inputs]
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const u32* __restrict__ routes,   // as routes.cu says
    Args args) {
    u32 lane = threadIdx.x % LANES;
    u32 row = blockIdx.x * OUTPUTS + threadIdx.x / LANES;
    u32 first_token = blockIdx.y * TOKENS;
    Work work = work_of(routes, args, ROUTED ? routes[first_token] : 0u);
    bool used = row < work.outputs;
    float acc[TOKENS];
    const float* rows[TOKENS];
#pragma unroll
    for (u32 t = 0u; t < TOKENS; t++) {
        acc[t] = 0.0f;
        rows[t] = x + work.inputs(args, first_token + t) * args.inputs;
    }
    u32 quads = used ? args.form.quads : 0u;
#pragma unroll 4
    for (u32 c = lane; c < quads; c += LANES) {
        float4 weights = weights4(w, args.form, work.before + row, c);
#pragma unroll
        for (u32 t = 0u; t < TOKENS; t++) { acc[t] = add_product(acc[t], weights, inputs4(rows[t], args.inputs, c)); }
    }
    add_lanes<TOKENS>(acc, lane);
    if (lane % (LANES / TOKENS) == 0u) {
        put(args, work, bias, out, row, first_token + lane / (LANES / TOKENS), acc[0]);
    }
}
