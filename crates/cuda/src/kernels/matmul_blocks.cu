// A linear layer for a few tokens with weights of encodings in blocks (see product.cu and segments.cu), in sums of any order, on
// tensor cores. A block has ROWS = 16 output rows. Its warps share their inputs: warp i has the tiles i, i + WARPS, ... of all rows.
//
// A tensor core multiplies f16 alone. An input x is scaled by a power of two that its tile shares, so that it is below 2^14, and
// split into two f16, high + low: 22 bits, nearly those of f32. Codes are f16 exactly, and products and sums are f32. A scale of
// weights is for what one lane t has decoded, while a tensor core adds up what the lanes 0 .. 3 of a row have. So they get
// columns of their own: column 2t has high, and 2t + 1 low, where the other lanes have 0. In turn, lane t receives just
// these two columns.

#define THREADS (32u * WARPS)
// Words of shared memory for a token's tile: eight times two quads of each (t, high or low), with a gap; the segments' sums.
#define PAIR_WORDS 36u
#define SUM_WORDS (8u * PAIR_WORDS)
#define TOKEN_WORDS (SUM_WORDS + 16u)
#define AT_ONCE (TOKENS > 1u ? 2u : 1u) // tokens whose inputs are loaded together

// The inputs 4 lane .. 4 lane + 3 of both halves of a tile.
struct Inputs {
    float4 half[2];
};

__device__ __forceinline__ Inputs load_inputs(const float* __restrict__ row, u32 quads, u32 tile, u32 lane) {
    Inputs loaded;
#pragma unroll
    for (u32 i = 0u; i < 2u; i++) {
        u32 quad = tile * 64u + 32u * i + lane;
        float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        loaded.half[i] = quad < quads ? reinterpret_cast<const float4*>(row)[quad] : none;
    }
    return loaded;
}

__device__ __forceinline__ float largest(float4 x) {
    return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
}

// Splits a token's tile to shared memory. Returns the power of two that it was divided by.
__device__ __forceinline__ float split_inputs(u32* to, const Inputs& x, u32 lane) {
    float most = fmaxf(largest(x.half[0]), largest(x.half[1]));
    // Exponents of positive numbers have the order of their bits. 14: both powers are normal.
    u32 exponent = max(__reduce_max_sync(WARP, __float_as_uint(most)) >> 23, 14u);
    float scale = __uint_as_float((267u - exponent) << 23);
#pragma unroll
    for (u32 i = 0u; i < 2u; i++) {
        float4 value = x.half[i];
        float4 y = make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale);
        uint2 high = make_uint2(pair(y.x, y.z), pair(y.y, y.w));
        float2 even = unpair(high.x), odd = unpair(high.y);
        uint2 low = make_uint2(pair(y.x - even.x, y.z - even.y), pair(y.y - odd.x, y.w - odd.y));
        u32 quad = 32u * i + lane;
        uint2 place = place_of(quad / 4u); // t, k
        u32* at = to + (2u * place.y + quad % 4u / 2u) * PAIR_WORDS + place.x * 8u + quad % 2u * 2u;
        *reinterpret_cast<uint2*>(at) = high;
        *reinterpret_cast<uint2*>(at + 4u) = low;
        if (HAS_OFFSET) {
            float sum = (value.x + value.y) + (value.z + value.w);
            sum += __shfl_xor_sync(WARP, sum, 1u);
            sum += __shfl_xor_sync(WARP, sum, 2u);
            if (lane % 4u == 0u) { to[SUM_WORDS + place.x * 4u + place.y] = __float_as_uint(sum); }
        }
    }
    return __uint_as_float((exponent - 13u) << 23);
}

extern "C" __global__ void __launch_bounds__(256, 2) matmul(
    const u32* __restrict__ w,
    const float* __restrict__ x,      // [tokens, inputs]
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const float* __restrict__ routes, // [tokens, experts], 0: not routed
    Args args) {
    DYNAMIC_SHARED(shared);
    __shared__ float sums[WARPS * ROWS * TOKENS];
    u32 lane = threadIdx.x % 32u;
    u32 warp = threadIdx.x / 32u;
    u32 t = lane % 4u;
    u32 g = lane / 4u;
    u32 first_row = blockIdx.x * ROWS;
    u32 first_token = blockIdx.y * TOKENS;
    if (ROUTED && !any_routed(routes, args, first_token, TOKENS)) { return; } // of the whole block
    u32 n = min(TOKENS, args.tokens - first_token);
    Form form = args.form;
    u32 tiles = (form.quads + 63u) / 64u;
    // Rows behind the last one are computed like it, and not written.
    u32 rows[2] = {min(first_row + g, args.outputs - 1u), min(first_row + g + 8u, args.outputs - 1u)};
    Raw raw[DEPTH][2];
#pragma unroll
    for (u32 d = 0u; d < DEPTH; d++) {
        u32 tile = warp + d * WARPS;
        if (tile >= tiles) { continue; }
#pragma unroll
        for (u32 k = 0u; k < 4u; k++) {
            fetch(raw[d][0], w, form, rows[0], tile, k, t);
            fetch(raw[d][1], w, form, rows[1], tile, k, t);
        }
    }
    u32* split = reinterpret_cast<u32*>(shared) + warp * TOKENS * TOKEN_WORDS;
    bool mine = g / 2u == t; // whether column g is this lane's
    uint4 columns[2] = {make_uint4(0u, 0u, 0u, 0u), make_uint4(0u, 0u, 0u, 0u)};
    float acc[2u * TOKENS]; // [rows, tokens]
#pragma unroll
    for (u32 i = 0u; i < 2u * TOKENS; i++) { acc[i] = 0.0f; }
    for (u32 first = warp; first < tiles; first += DEPTH * WARPS) {
#pragma unroll
        for (u32 d = 0u; d < DEPTH; d++) {
            u32 tile = first + d * WARPS;
            if (tile >= tiles) { continue; } // of the whole warp
            float powers[TOKENS];
            float part[2u * TOKENS];
#pragma unroll
            for (u32 i = 0u; i < TOKENS; i += AT_ONCE) {
                if (i > 0u && i >= n) { continue; }
                Inputs loaded[AT_ONCE];
#pragma unroll
                for (u32 j = 0u; j < AT_ONCE; j++) {
                    const float* row = x + min(first_token + i + j, args.tokens - 1u) * args.inputs;
                    loaded[j] = load_inputs(row, form.quads, tile, lane);
                }
#pragma unroll
                for (u32 j = 0u; j < AT_ONCE; j++) {
                    powers[i + j] = split_inputs(split + (i + j) * TOKEN_WORDS, loaded[j], lane);
                    part[i + j] = part[TOKENS + i + j] = 0.0f;
                }
            }
            __syncwarp();
            u32 next = tile + DEPTH * WARPS;
#pragma unroll
            for (u32 k = 0u; k < 4u; k++) {
                Segment a = decode(raw[d][0], k, t);
                Segment b = decode(raw[d][1], k, t);
                if (next < tiles) {
                    fetch(raw[d][0], w, form, rows[0], next, k, t);
                    fetch(raw[d][1], w, form, rows[1], next, k, t);
                }
#pragma unroll
                for (u32 i = 0u; i < TOKENS; i++) {
                    if (i > 0u && i >= n) { continue; }
                    const u32* from = split + i * TOKEN_WORDS;
                    if (mine) {
                        columns[0] = *reinterpret_cast<const uint4*>(from + 2u * k * PAIR_WORDS + g * 4u);
                        columns[1] = *reinterpret_cast<const uint4*>(from + (2u * k + 1u) * PAIR_WORDS + g * 4u);
                    }
                    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    add_tile(sum, a.codes[0], b.codes[0], a.codes[1], b.codes[1], columns[0].x, columns[0].y);
                    add_tile(sum, a.codes[2], b.codes[2], a.codes[3], b.codes[3], columns[0].z, columns[0].w);
                    add_tile(sum, a.codes[4], b.codes[4], a.codes[5], b.codes[5], columns[1].x, columns[1].y);
                    add_tile(sum, a.codes[6], b.codes[6], a.codes[7], b.codes[7], columns[1].z, columns[1].w);
                    part[i] = fmaf(a.scale, sum.x + sum.y, part[i]);
                    part[TOKENS + i] = fmaf(b.scale, sum.z + sum.w, part[TOKENS + i]);
                    if (HAS_OFFSET) {
                        float inputs = __uint_as_float(from[SUM_WORDS + t * 4u + k]);
                        acc[i] = fmaf(a.offset, inputs, acc[i]);
                        acc[TOKENS + i] = fmaf(b.offset, inputs, acc[TOKENS + i]);
                    }
                }
            }
#pragma unroll
            for (u32 i = 0u; i < TOKENS; i++) {
                if (i > 0u && i >= n) { continue; }
                acc[i] = fmaf(part[i], powers[i], acc[i]);
                acc[TOKENS + i] = fmaf(part[TOKENS + i], powers[i], acc[TOKENS + i]);
            }
            __syncwarp(); // the next tile takes this one's place
        }
    }
    // Lane t ends with the sums t N / 4 and those behind it, of N; with two sums, lanes 0 and 1 have the first.
    add_up<2u * TOKENS, 2u>(acc, lane);
    constexpr u32 EACH = TOKENS > 1u ? TOKENS / 2u : 1u;
#pragma unroll
    for (u32 i = 0u; i < EACH; i++) {
        u32 sum = TOKENS > 1u ? t * EACH + i : t / 2u;
        u32 row = g + sum / TOKENS * 8u;
        if (TOKENS > 1u || t % 2u == 0u) { sums[(warp * TOKENS + sum % TOKENS) * ROWS + row] = acc[i]; }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < ROWS * TOKENS; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (u32 j = 0u; j < WARPS; j++) { sum += sums[j * ROWS * TOKENS + i]; }
        put(args, bias, routes, out, first_row + i % ROWS, first_token + i / ROWS, sum);
    }
}
