// The third part of attend_mma.cu: queries as operands of tensor cores. The kernel follows.

// The queries of the job's rows, scaled, and as keys are stored if `turned`; then their operands B[elements, rows] in pieces, and
// what scores are multiplied by: the largest element of a row becomes 1 .. 2, so that pieces in f16 neither overflow nor vanish.
template <class KEYS>
__device__ __forceinline__ void load_queries(
    const Job& job, const Args& args, const float* q, u32 first_query_head, bool turned, float* rows, uint4* queries, float* scales) {
    constexpr u32 EACH = ROWS / WARPS; // rows of a warp
    constexpr u32 QUADS = (DIM + 127u) / 128u;
    u32 lane = threadIdx.x % 32u;
    u32 warp = threadIdx.x / 32u;
    float4 x[EACH][QUADS];
    u32 token[EACH];
#pragma unroll
    for (u32 i = 0u; i < EACH; i++) {
        u32 row = job.row0 + min(warp + WARPS * i, job.rows - 1u);
        token[i] = job.plan[args.order + job.first_slot + row / job.per_kv];
    }
#pragma unroll
    for (u32 i = 0u; i < EACH; i++) {
        u32 r = warp + WARPS * i;
        u32 head = first_query_head + (job.row0 + r) % job.per_kv;
        const float4* from = reinterpret_cast<const float4*>(q + (size_t)(token[i] * args.heads + head) * DIM);
#pragma unroll
        for (u32 j = 0u; j < QUADS; j++) {
            u32 at = lane + 32u * j;
            x[i][j] = r < job.rows && at < DIM / 4u ? from[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    if (turned && K_TURN != 0u) {
#pragma unroll
        for (u32 i = 0u; i < EACH; i++) {
#pragma unroll
            for (u32 j = 0u; j < QUADS; j++) {
                u32 at = lane + 32u * j;
                float4* to = reinterpret_cast<float4*>(rows + (warp + WARPS * i) * OUT_STRIDE);
                if (at < DIM / 4u) { to[at] = x[i][j]; }
            }
        }
        __syncthreads();
        turn_rows(rows, OUT_STRIDE, ROWS, K_TURN, K_WIDE);
#pragma unroll
        for (u32 i = 0u; i < EACH; i++) {
#pragma unroll
            for (u32 j = 0u; j < QUADS; j++) {
                u32 at = lane + 32u * j;
                const float4* from = reinterpret_cast<const float4*>(rows + (warp + WARPS * i) * OUT_STRIDE);
                if (at < DIM / 4u) { x[i][j] = from[at]; }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 i = 0u; i < EACH; i++) {
        float most = 0.0f;
#pragma unroll
        for (u32 j = 0u; j < QUADS; j++) {
            float4& v = x[i][j];
            v = make_float4(v.x * args.scale, v.y * args.scale, v.z * args.scale, v.w * args.scale);
            most = fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
        }
        for (u32 lanes = 16u; lanes > 0u; lanes /= 2u) { most = fmaxf(most, __shfl_xor_sync(WARP, most, lanes)); }
        // 2^e with 2^e <= most; far from the ends of f32, and 1 for a row of zeros or of what is not finite.
        u32 exponent = __float_as_uint(most) >> 23;
        bool usual = exponent > 10u && exponent < 245u;
        u32 r = warp + WARPS * i;
        if (lane == 0u) { scales[r] = usual ? __uint_as_float(exponent << 23) : 1.0f; }
        float by = usual ? __uint_as_float((254u - exponent) << 23) : 1.0f;
#pragma unroll
        for (u32 j = 0u; j < QUADS; j++) {
            u32 at = lane + 32u * j;
            float4 v = x[i][j];
            float4* to = reinterpret_cast<float4*>(rows + r * OUT_STRIDE);
            if (at < DIM / 4u) { to[at] = make_float4(v.x * by, v.y * by, v.z * by, v.w * by); }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < TILES * STEPS * 32u; i += THREADS) {
        u32 g = i % 32u / 4u;
        u32 c = i % 4u;
        u32 step = i / 32u % STEPS;
        const float* x = rows + (i / 32u / STEPS * 8u + g) * OUT_STRIDE + 16u * step;
        // Which elements, as Side::keys has them.
        x += 4u * c;
        uint2 high = make_uint2(KEYS::pack(x[0], x[1]), KEYS::pack(x[2], x[3]));
        if (TWO_PIECES) {
            float2 left = KEYS::rest(x[0], x[1], high.x);
            float2 right = KEYS::rest(x[2], x[3], high.y);
            queries[i] = make_uint4(high.x, high.y, KEYS::pack(left.x, left.y), KEYS::pack(right.x, right.y));
        } else {
            reinterpret_cast<uint2*>(queries)[i] = high;
        }
    }
    __syncthreads();
}
