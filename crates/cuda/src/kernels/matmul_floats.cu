// A linear layer for a few tokens with weights in f32, f16 or bf16 (see product.cu), in sums of any order: a block has ROWS
// output rows, and its threads go through them side by side, 16 bytes of each row at a time. An input that was loaded is used
// for all of these rows.

#define THREADS (32u * WARPS)
#define UNIT (ENCODING == F32 ? 1u : 2u) // quads of 16 bytes
#define DEPTH (TOKENS > 4u ? 1u : 2u)    // loads of a row that are under way
#define SUMS (ROWS * TOKENS)

// Quads of a row from UNIT * unit on; 0 behind its end.
__device__ __forceinline__ uint4 load_unit(const u32* __restrict__ w, Form form, u32 row, u32 unit) {
    u32 word = (row * form.quads + UNIT * unit) * (4u / UNIT);
    if (UNIT == 1u || form.quads % 2u == 0u) { return load4(w, word); }
    // Every other row begins within 16 bytes.
    uint2 low = load2(w, word);
    uint2 high = 2u * unit + 1u < form.quads ? load2(w, word + 2u) : make_uint2(0u, 0u);
    return make_uint4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ float4 quad_of(uint4 unit, u32 i) {
    u32 a = i == 0u ? unit.x : unit.z, b = i == 0u ? unit.y : unit.w;
    if (ENCODING == F32) {
        return make_float4(
            __uint_as_float(unit.x), __uint_as_float(unit.y), __uint_as_float(unit.z), __uint_as_float(unit.w));
    }
    if (ENCODING == F16) {
        float2 low = unpair(a), high = unpair(b);
        return make_float4(low.x, low.y, high.x, high.y);
    }
    return make_float4(
        __uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u), __uint_as_float(b << 16),
        __uint_as_float(b & 0xffff0000u));
}

extern "C" __global__ void __launch_bounds__(256, 2) matmul(
    const u32* __restrict__ w,
    const float* __restrict__ x,      // [tokens, inputs]
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const u32* __restrict__ routes,   // as routes.cu says
    Args args) {
    __shared__ float sums[WARPS * SUMS];
    u32 lane = threadIdx.x % 32u;
    u32 first_row = blockIdx.x * ROWS;
    u32 first_token = blockIdx.y * TOKENS;
    Work work = work_of(routes, args, ROUTED ? routes[first_token] : 0u);
    if (ROUTED && first_row >= work.outputs) { return; } // the whole block
    u32 n = min(TOKENS, args.tokens - first_token);
    const float* inputs = x + work.inputs(args, first_token) * args.inputs;
    u32 quads = args.form.quads;
    u32 units = (quads + UNIT - 1u) / UNIT;
    float acc[SUMS]; // [rows, tokens]
#pragma unroll
    for (u32 i = 0u; i < SUMS; i++) { acc[i] = 0.0f; }
    for (u32 first = threadIdx.x; first < units; first += DEPTH * THREADS) {
        uint4 loaded[DEPTH][ROWS];
#pragma unroll
        for (u32 d = 0u; d < DEPTH; d++) {
            u32 unit = first + d * THREADS;
#pragma unroll
            for (u32 r = 0u; r < ROWS; r++) {
                // Rows behind the last one are computed like it, and not written.
                u32 row = work.before + min(first_row + r, work.outputs - 1u);
                loaded[d][r] = unit < units ? load_unit(w, args.form, row, unit) : make_uint4(0u, 0u, 0u, 0u);
            }
        }
#pragma unroll
        for (u32 d = 0u; d < DEPTH; d++) {
#pragma unroll
            for (u32 i = 0u; i < UNIT; i++) {
                u32 c = (first + d * THREADS) * UNIT + i;
                if (c >= quads) { continue; }
                float4 weights[ROWS];
#pragma unroll
                for (u32 r = 0u; r < ROWS; r++) { weights[r] = quad_of(loaded[d][r], i); }
#pragma unroll
                for (u32 t = 0u; t < TOKENS; t++) {
                    if (t > 0u && t >= n) { continue; }
                    float4 value = inputs4(inputs + t * args.inputs, args.inputs, c);
#pragma unroll
                    for (u32 r = 0u; r < ROWS; r++) {
                        acc[r * TOKENS + t] = add_product(acc[r * TOKENS + t], weights[r], value);
                    }
                }
            }
        }
    }
    add_up<SUMS, 16u>(acc, lane);
    if (lane % (32u / SUMS) == 0u) { sums[threadIdx.x / 32u * SUMS + lane / (32u / SUMS)] = acc[0]; }
    __syncthreads();
    if (threadIdx.x < SUMS) {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0u; i < WARPS; i++) { sum += sums[i * SUMS + threadIdx.x]; }
        put(args, work, bias, out, first_row + threadIdx.x / TOKENS, first_token + threadIdx.x % TOKENS, sum);
    }
}
