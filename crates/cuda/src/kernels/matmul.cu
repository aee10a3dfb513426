// A linear layer for a few tokens (see product.cu): a block has eight output rows, 16 lanes share one. A decoded weight is
// used for TOKENS tokens.

extern "C" __global__ void __launch_bounds__(128) matmul(
    const u32* __restrict__ w,
    const float* __restrict__ x,      // [tokens, inputs]
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const float* __restrict__ routes, // [tokens, experts], 0: not routed
    Args args) {
    u32 lane = threadIdx.x % LANES;
    u32 row = blockIdx.x * OUTPUTS + threadIdx.x / LANES;
    u32 first_token = blockIdx.y * TOKENS;
    bool used = row < args.outputs;
    if (ROUTED) { used = used && any_routed(routes, args, first_token, TOKENS); }
    float acc[TOKENS];
    const float* rows[TOKENS];
#pragma unroll
    for (u32 t = 0u; t < TOKENS; t++) {
        acc[t] = 0.0f;
        rows[t] = x + min(first_token + t, args.tokens - 1u) * args.inputs;
    }
    u32 quads = used ? args.form.quads : 0u;
#pragma unroll 4
    for (u32 c = lane; c < quads; c += LANES) {
        float4 weights = weights4(w, args.form, row, c);
#pragma unroll
        for (u32 t = 0u; t < TOKENS; t++) { acc[t] = add_product(acc[t], weights, inputs4(rows[t], args.inputs, c)); }
    }
    add_lanes<TOKENS>(acc, lane);
    if (lane % (LANES / TOKENS) == 0u) {
        put(args, bias, routes, out, row, first_token + lane / (LANES / TOKENS), acc[0]);
    }
}
