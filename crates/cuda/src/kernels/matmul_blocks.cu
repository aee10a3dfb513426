// A linear layer for a few tokens with weights of encodings in blocks (see product.cu and segments.cu), in sums of any order, on
// tensor cores. A block has 16 output rows, or 32 for several tokens. Its warps share the rows' inputs: slice i of SLICES has the
// tiles i, i + SLICES, ... For several tokens a slice is a pair of warps: each has 16 of the rows, and prepares the inputs
// of half of the tokens for both.
//
// A tensor core multiplies f16 alone. An input x is scaled by a power of two that its tile shares, so that it is below 2^14, and
// split into two f16, high + low: 22 bits, nearly those of f32. Codes are f16 exactly, and products and sums are f32. A scale of
// weights is for what one lane t has decoded, while a tensor core adds up what the lanes 0 .. 3 of a row have. So they get
// columns of their own: column 2t has high, and 2t + 1 low, where the other lanes have 0. In turn, lane t receives just
// these two columns.

#define PAIRED (TOKENS > 1u)
#define GROUPS (PAIRED ? 2u : 1u) // of 16 rows
#define SLICES (WARPS / GROUPS)
static_assert(ROWS == 16u * GROUPS, "the rows of a block");
// Words of shared memory for a token's tile: eight times two quads of each (t, high or low), with a gap; the segments' sums; the
// power of two.
#define PAIR_WORDS 36u
#define SUM_WORDS (8u * PAIR_WORDS)
#define POWER_WORD (SUM_WORDS + 16u)
#define TOKEN_WORDS (POWER_WORD + 4u)
#define TILE_WORDS (TOKENS * TOKEN_WORDS)
#define AT_ONCE (PAIRED ? 2u : 1u) // tokens that are loaded and multiplied together

// Waits for the other warp of a pair, and shows it what was written to shared memory.
__device__ __forceinline__ void meet(u32 slice) {
#ifdef __CUDA_ARCH__
    asm volatile("bar.sync %0, 64;" : : "r"(slice + 1u) : "memory");
#else
    kvist::meet(slice + 1u, 64u, __LINE__);
#endif
}

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

// The words at which a lane's inputs of both halves of a tile go.
__device__ __forceinline__ u32 place_of_inputs(u32 i, u32 lane) {
    u32 quad = 32u * i + lane;
    uint2 place = place_of(quad / 4u); // t, k
    return (2u * place.y + quad % 4u / 2u) * PAIR_WORDS + place.x * 8u + quad % 2u * 2u;
}

// The word at which the sum of the inputs goes that four lanes have.
__device__ __forceinline__ u32 place_of_sum(u32 i, u32 lane) {
    uint2 place = place_of(8u * i + lane / 4u);
    return SUM_WORDS + place.x * 4u + place.y;
}

// Splits a token's tile to shared memory, with the power of two that it is divided by.
__device__ __forceinline__ void split_inputs(u32* to, const Inputs& x, const u32* places, u32 lane) {
    float most = fmaxf(largest(x.half[0]), largest(x.half[1]));
    // Exponents of positive numbers have the order of their bits. 14: both powers are normal.
    u32 exponent = max(__reduce_max_sync(WARP, __float_as_uint(most)) >> 23, 14u);
    float scale = __uint_as_float((267u - exponent) << 23);
#pragma unroll
    for (u32 i = 0u; i < 2u; i++) {
        float4 value = x.half[i];
        float4 y = make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale);
        uint2 high = make_uint2(pack_half2(y.x, y.z), pack_half2(y.y, y.w));
        float2 even = unpair(high.x), odd = unpair(high.y);
        uint2 low = make_uint2(pack_half2(y.x - even.x, y.z - even.y), pack_half2(y.y - odd.x, y.w - odd.y));
        u32* at = to + places[i];
        *reinterpret_cast<uint2*>(at) = high;
        *reinterpret_cast<uint2*>(at + 4u) = low;
        if (HAS_OFFSET) {
            float sum = (value.x + value.y) + (value.z + value.w);
            sum += __shfl_xor_sync(WARP, sum, 1u);
            sum += __shfl_xor_sync(WARP, sum, 2u);
            if (lane % 4u == 0u) { to[places[2u + i]] = __float_as_uint(sum); }
        }
    }
    if (lane == 0u) { to[places[4]] = (exponent - 13u) << 23; }
}

extern "C" __global__ void __launch_bounds__(256, PAIRED ? 2 : 3) matmul(
    const u32* __restrict__ w,
    const float* __restrict__ x,      // [tokens, inputs]
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const u32* __restrict__ routes,   // as routes.cu says
    Args args) {
    DYNAMIC_SHARED(shared);
    __shared__ float sums[SLICES * ROWS * TOKENS];
    u32 lane = kept(threadIdx.x % 32u);
    u32 warp = __reduce_max_sync(WARP, threadIdx.x / 32u); // which the compiler then knows to be that of all lanes
    u32 slice = warp % SLICES;
    u32 group = warp / SLICES;
    u32 t = kept(lane % 4u);
    u32 g = lane / 4u;
    u32 first_row = blockIdx.x * ROWS + group * 16u;
    u32 first_token = blockIdx.y * TOKENS;
    Work work = work_of(routes, args, ROUTED ? routes[first_token] : 0u);
    if (ROUTED && blockIdx.x * ROWS >= work.outputs) { return; } // the whole block
    u32 n = min(TOKENS, args.tokens - first_token);
    Form form = args.form;
    u32 tiles = (form.quads + 63u) / 64u;
    // Rows behind the last one are computed like it, and not written.
    u32 last = work.outputs - 1u;
    u32 before[2] = {
        kept((work.before + min(first_row + g, last)) * form.quads),
        kept((work.before + min(first_row + g + 8u, last)) * form.quads)};
    Raw raw[2];
    if (slice < tiles) {
#pragma unroll
        for (u32 k = 0u; k < 4u; k++) {
            fetch(raw[0], w, form, before[0], slice, k, t);
            fetch(raw[1], w, form, before[1], slice, k, t);
        }
    }
    u32* split = reinterpret_cast<u32*>(shared);
    u32 own = slice * GROUPS * TILE_WORDS; // the first word of this slice; a pair has two tiles in turn
    u32 places[5];
#pragma unroll
    for (u32 i = 0u; i < 2u; i++) {
        places[i] = kept(own + place_of_inputs(i, lane));
        places[2u + i] = kept(own + place_of_sum(i, lane));
    }
    places[4] = kept(own + POWER_WORD);
    u32 own_columns = kept(own + g * 4u);
    u32 own_sums = kept(own + SUM_WORDS + t * 4u);
    u32 base = BEFORE_BYTES + (args.tokens == 0u); // unknown to the compiler: there is a token
    bool mine = g / 2u == t; // whether column g is this lane's
    uint4 columns[AT_ONCE][2];
#pragma unroll
    for (u32 j = 0u; j < AT_ONCE; j++) { columns[j][0] = columns[j][1] = make_uint4(0u, 0u, 0u, 0u); }
    float acc[2u * TOKENS]; // [rows, tokens]
#pragma unroll
    for (u32 i = 0u; i < 2u * TOKENS; i++) { acc[i] = 0.0f; }
    u32 turn = 0u; // words to the tile of shared memory that is in use
    for (u32 tile = slice; tile < tiles; tile += SLICES) {
        u32* here = split + turn;
#pragma unroll
        for (u32 i = 0u; i < TOKENS; i += AT_ONCE) {
            if ((i > 0u && i >= n) || (PAIRED && i / 2u % 2u != group)) { continue; }
            Inputs loaded[AT_ONCE];
#pragma unroll
            for (u32 j = 0u; j < AT_ONCE; j++) {
                const float* row = x + work.inputs(args, first_token + i + j) * args.inputs;
                loaded[j] = load_inputs(row, form.quads, tile, lane);
            }
#pragma unroll
            for (u32 j = 0u; j < AT_ONCE; j++) { split_inputs(here + (i + j) * TOKEN_WORDS, loaded[j], places, lane); }
        }
        if (PAIRED) {
            meet(slice);
        } else {
            __syncwarp();
        }
        float part[2u * TOKENS];
#pragma unroll
        for (u32 i = 0u; i < 2u * TOKENS; i++) { part[i] = 0.0f; }
        u32 next = tile + SLICES;
#pragma unroll
        for (u32 k = 0u; k < 4u; k++) {
            Segment a = decode(raw[0], k, t, base);
            Segment b = decode(raw[1], k, t, base);
#pragma unroll
            for (u32 i = 0u; i < TOKENS; i += AT_ONCE) {
                if (i > 0u && i >= n) { continue; }
                const u32* from = here + i * TOKEN_WORDS;
                float sum[AT_ONCE][4];
#pragma unroll
                for (u32 j = 0u; j < AT_ONCE; j++) {
                    const u32* at = from + j * TOKEN_WORDS + own_columns + 2u * k * PAIR_WORDS;
                    if (mine) {
                        columns[j][0] = *reinterpret_cast<const uint4*>(at);
                        columns[j][1] = *reinterpret_cast<const uint4*>(at + PAIR_WORDS);
                    }
#pragma unroll
                    for (u32 e = 0u; e < 4u; e++) { sum[j][e] = 0.0f; }
                }
                // Quad by quad; the sums of two tokens do not wait for each other.
#pragma unroll
                for (u32 q = 0u; q < 4u; q++) {
#pragma unroll
                    for (u32 j = 0u; j < AT_ONCE; j++) {
                        uint4 two = columns[j][q / 2u];
                        u32 codes[4] = {
                            a.codes[2u * q], b.codes[2u * q], a.codes[2u * q + 1u], b.codes[2u * q + 1u]};
                        u32 column[2] = {q % 2u == 0u ? two.x : two.z, q % 2u == 0u ? two.y : two.w};
                        mma_f16_16816(sum[j], codes, column);
                    }
                }
#pragma unroll
                for (u32 j = 0u; j < AT_ONCE; j++) {
                    u32 token = i + j;
                    part[token] = fmaf(a.scale, sum[j][0] + sum[j][1], part[token]);
                    part[TOKENS + token] = fmaf(b.scale, sum[j][2] + sum[j][3], part[TOKENS + token]);
                    if (HAS_OFFSET) {
                        float inputs = __uint_as_float(from[j * TOKEN_WORDS + own_sums + k]);
                        acc[token] = fmaf(a.offset, inputs, acc[token]);
                        acc[TOKENS + token] = fmaf(b.offset, inputs, acc[TOKENS + token]);
                    }
                }
            }
            // Behind the products: before them these loads would need registers of their own.
            if (next < tiles) {
                fetch(raw[0], w, form, before[0], next, k, t);
                fetch(raw[1], w, form, before[1], next, k, t);
            }
        }
#pragma unroll
        for (u32 i = 0u; i < TOKENS; i++) {
            if (i >= AT_ONCE && i / AT_ONCE * AT_ONCE >= n) { continue; }
            float power = __uint_as_float(here[i * TOKEN_WORDS + places[4]]);
            acc[i] = fmaf(part[i], power, acc[i]);
            acc[TOKENS + i] = fmaf(part[TOKENS + i], power, acc[TOKENS + i]);
        }
        if (PAIRED) {
            // The other warp may still read this tile, while this one prepares the next.
            turn = TILE_WORDS - turn;
        } else {
            __syncwarp(); // the next tile takes this one's place
        }
    }
    // Lane t ends with the sums t N / 4 and those behind it, of N; with two sums, lanes 0 and 1 have the first.
    add_up<2u * TOKENS, 2u>(acc, lane);
    constexpr u32 EACH = TOKENS > 1u ? TOKENS / 2u : 1u;
#pragma unroll
    for (u32 i = 0u; i < EACH; i++) {
        u32 sum = TOKENS > 1u ? t * EACH + i : t / 2u;
        u32 row = group * 16u + g + sum / TOKENS * 8u;
        if (TOKENS > 1u || t % 2u == 0u) { sums[(slice * TOKENS + sum % TOKENS) * ROWS + row] = acc[i]; }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < ROWS * TOKENS; i += 32u * WARPS) {
        float sum = 0.0f;
#pragma unroll
        for (u32 j = 0u; j < SLICES; j++) { sum += sums[j * ROWS * TOKENS + i]; }
        put(args, work, bias, out, blockIdx.x * ROWS + i % ROWS, first_token + i / ROWS, sum);
    }
}
