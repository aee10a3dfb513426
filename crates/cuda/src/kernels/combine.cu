// The outputs of each token's experts, weighted and added in order of expert number.
//
//   out[t] = sum over i of weight(t, i) * y[t * used + i]

struct Args {
    u32 width;
    u32 used;
    u32 tokens;
};

extern "C" __global__ void __launch_bounds__(64) combine(
    const u32* __restrict__ routes, // as routes.cu says
    const float* __restrict__ y,    // [tokens * used, width]
    float* __restrict__ out,        // [tokens, width]
    Args args) {
    u32 c = blockIdx.x * 64u + threadIdx.x;
    if (c >= args.width) { return; }
    float sum = 0.0f;
    for (u32 i = 0u; i < args.used; i++) {
        u32 row = blockIdx.y * args.used + i;
        float weight = __uint_as_float(routes[weight_at(args.tokens * args.used, row)]);
        sum = fmaf(weight, y[(size_t)row * args.width + c], sum);
    }
    out[(size_t)blockIdx.y * args.width + c] = sum;
}
