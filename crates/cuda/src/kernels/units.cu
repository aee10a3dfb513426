// Sums of a warp's rows of weights in blocks times the inputs of one token, without tensor cores, for kernels that wait for memory
// alone. A warp has EACH rows, and its lanes go through them side by side. A lane has a unit of each of these rows at a time, 16
// or 32 bytes of codes, and DEPTH units are under way. All warps of a block share the inputs in shared memory, up to CHUNK of
// them at a time.
//
// Codes of 8 bits become floats by a byte's place in 2^23 + n. Fewer bits take a cheaper way: the bits of n are those of the
// subnormal number 2^-149 n, and as bits of any place of the mantissa they are a power of two more. So a code is one mask and one fma,
// which computes with subnormal numbers as fast as with others. Inputs are scaled by a power of two, so that the products
// are normal numbers: the largest input of a chunk is near 2^120. Offsets of codes are for the sum of the inputs.

#define EACH 2u
#define HAS_BYTES (ENCODING == Q8_0 || ENCODING == INT8)
#define HAS_FURTHER (ENCODING == Q5_0 || ENCODING == Q5_1 || ENCODING == Q5_K || ENCODING == Q6_K) // codes of more than 4 bits
#define IS_WIDE (ENCODING == Q4_K || ENCODING == Q5_K) // two loads of 16 bytes: more codes for a scale
#define LOADS (IS_WIDE ? 2u : 1u)
#define DEPTH (ENCODING == Q5_K ? 1u : (IS_WIDE || HAS_FURTHER ? 2u : 4u))
#define UNIT_QUADS (HAS_BYTES ? 4u : 8u * LOADS)
#define CHUNK_UNITS (CHUNK / (4u * UNIT_QUADS))
static_assert(ROWS == EACH * WARPS, "the rows of a block");
static_assert(32u * UNIT_QUADS % 128u == 0u, "units of a warp are whole periods of place_of");
static_assert(CHUNK_UNITS % (32u * DEPTH) == 0u, "a chunk is whole rounds");

// What a lane has loaded of a unit. An encoding uses a part of it.
struct Raw {
    uint4 codes[LOADS];
    uint4 high[LOADS];
    uint4 head;
    u32 scale;
    u32 more;
};

// A row of a matrix.
struct Row {
    const u32* w;
    Form form;
    u32 before; // quads of the rows before this one
};

__device__ __forceinline__ Raw fetch(const Row& row, u32 unit) {
    const u32* w = row.w;
    Form form = row.form;
    u32 before = row.before;
    Raw raw;
    u32 u = unit % 8u;
    u32 super_block = before / 64u + unit / (64u / UNIT_QUADS);
    u32 block = before / 8u + unit; // of encodings with 16 bytes of codes for 32 elements
    switch (ENCODING) {
    case Q8_0:
    case INT8: {
        u32 quad = before + 4u * unit;
        raw.codes[0] = load4(w, quad);
        raw.scale = ENCODING == Q8_0 ? load_half(w, form.s, quad / 8u) : load1(w, form.s + quad / 8u);
        break;
    }
    case Q4_K:
    case Q5_K: {
        u32 at = super_block * (ENCODING == Q4_K ? 36u : 44u);
        u32 codes = at + (ENCODING == Q4_K ? 4u : 12u) + 8u * (unit % 4u);
#pragma unroll
        for (u32 i = 0u; i < LOADS; i++) {
            raw.codes[i] = load4(w, codes + 4u * i);
            if (ENCODING == Q5_K) { raw.high[i] = load4(w, at + 4u + 4u * i); }
        }
        raw.head = load4(w, at);
        break;
    }
    case Q6_K: {
        u32 at = super_block * 52u;
        raw.codes[0] = load4(w, at + 4u * u);
        raw.high[0] = load4(w, at + 32u + u / 4u * 8u + u % 2u * 4u);
        uint2 scales = load2(w, at + 48u + u / 4u * 2u);
        raw.scale = scales.x;
        raw.more = scales.y;
        raw.head.x = load_half(w, form.s, super_block);
        break;
    }
    default:
        raw.codes[0] = load4(w, block * 4u);
        if (ENCODING == Q5_0 || ENCODING == Q5_1) { raw.more = load1(w, form.b + block); }
        if (ENCODING == Q4_1 || ENCODING == Q5_1) {
            raw.scale = load1(w, form.s + block);
        } else {
            raw.scale = load_half(w, form.s, block);
        }
    }
    return raw;
}

// Loads the first units of every row.
__device__ __forceinline__ void fetch_first(Raw (&raw)[DEPTH][EACH], const Row (&rows)[EACH]) {
#pragma unroll
    for (u32 d = 0u; d < DEPTH; d++) {
        u32 unit = 32u * d + threadIdx.x % 32u;
#pragma unroll
        for (u32 r = 0u; r < EACH; r++) {
            if (unit < rows[r].form.quads / UNIT_QUADS) { raw[d][r] = fetch(rows[r], unit); }
        }
    }
}

// The quad of the row at which a unit's elements begin: those of codes in the low four bits, and how far behind it those in the
// high four bits begin.
__device__ __forceinline__ u32 first_quad(u32 unit) {
    u32 u = unit % 8u;
    switch (ENCODING) {
    case Q6_K: return unit / 8u * 64u + u / 4u * 32u + u / 2u % 2u * 8u + u % 2u * 4u;
    default: return unit * UNIT_QUADS;
    }
}
#define TO_HIGH (ENCODING == Q6_K ? 16u : 4u * LOADS)

// Where a quad of inputs lies in shared memory: eight neighbouring lanes, which read at once, then have eight different banks
// of four words, for every encoding.
__device__ __forceinline__ u32 place_of(u32 quad) {
    return quad ^ (quad >> 3 & 3u) ^ (quad >> 5 & 1u) * 7u ^ (quad >> 6 & 1u);
}

__device__ __forceinline__ float power_of_two(int n) {
    return __uint_as_float((u32)(n + 127) << 23);
}

__device__ __forceinline__ u32 word_of(uint4 words, u32 i) {
    return i == 0u ? words.x : (i == 1u ? words.y : (i == 2u ? words.z : words.w));
}

// A signed byte, from one that is 128 more.
__device__ __forceinline__ float byte_less(u32 word, u32 i) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + i)) - 8388736.0f;
}

// A whole number below 2^23 as float: faster than a conversion.
__device__ __forceinline__ float small(u32 n) {
    return __uint_as_float(0x4b000000u | n) - 8388608.0f;
}

// sum + codes . x, with codes as subnormal numbers in the bits of `mask` of a word and of its upper half: even elements, then odd ones.
__device__ __forceinline__ void add_codes(float& even, float& odd, u32 word, u32 mask, float4 x) {
    u32 upper = word >> 16;
    even = fmaf(__uint_as_float(word & mask), x.x, even);
    odd = fmaf(__uint_as_float(word & (mask << 8)), x.y, odd);
    even = fmaf(__uint_as_float(upper & mask), x.z, even);
    odd = fmaf(__uint_as_float(upper & (mask << 8)), x.w, odd);
}

// The further bits of four codes, in the bits from 4 on of four bytes: those of the low codes, then of the high ones.
__device__ __forceinline__ u32 further(const Raw& raw, u32 u, u32 i, bool high) {
    switch (ENCODING) {
    case Q5_0:
    case Q5_1: return ((raw.more >> (4u * i + (high ? 16u : 0u)) & 15u) * 0x02040810u) & 0x10101010u;
    case Q5_K: return (word_of(raw.high[i / 4u], i % 4u) >> (u % 4u * 2u + (high ? 1u : 0u)) & 0x01010101u) << 4;
    case Q6_K: return (word_of(raw.high[0], i) >> (u / 2u % 2u * 2u + (high ? 4u : 0u)) & 0x03030303u) << 4;
    default: return 0u;
    }
}

// Scale and offset of the low and of the high codes of a unit.
__device__ __forceinline__ float4 scales_of(const Raw& raw, u32 u) {
    switch (ENCODING) {
    case Q4_0:
    case Q5_0: {
        float scale = half_(raw.scale), offset = (ENCODING == Q4_0 ? -8.0f : -16.0f) * scale;
        return make_float4(scale, offset, scale, offset);
    }
    case Q4_1:
    case Q5_1: {
        float2 both = unpair(raw.scale);
        return make_float4(both.x, both.y, both.x, both.y);
    }
    case Q6_K: {
        u32 shift = u % 4u * 8u;
        float d = half_(raw.head.x);
        float low = d * (small((raw.scale >> shift & 255u) ^ 128u) - 128.0f);
        float high = d * (small((raw.more >> shift & 255u) ^ 128u) - 128.0f);
        return make_float4(low, -32.0f * low, high, -32.0f * high);
    }
    default: { // q4_K and q5_K
        // Bytes for two groups, in the low half: those of groups 0 .. 3 as they are, the others are put together.
        u32 shift = u % 2u * 16u;
        u32 low = raw.head.y >> shift, mid = raw.head.z >> shift, last = raw.head.w >> shift;
        bool first = u % 4u < 2u;
        u32 scales = first ? low & 0x3f3fu : (last & 0x0f0fu) | (low >> 2 & 0x3030u);
        u32 minima = first ? mid & 0x3f3fu : (last >> 4 & 0x0f0fu) | (mid >> 2 & 0x3030u);
        float2 d = unpair(raw.head.x);
        return make_float4(
            d.x * small(scales & 255u), -(d.y * small(minima & 255u)), d.x * small(scales >> 8),
            -(d.y * small(minima >> 8)));
    }
    }
}

// The sums of the rows, whose first units are loaded. In the lower half of a warp `total[0]` is that of its first row, in the upper half
// that of the second. For all threads of a block.
__device__ __forceinline__ void add_units(
    float (&total)[EACH], Raw (&raw)[DEPTH][EACH], const Row (&rows)[EACH], const float* __restrict__ x) {
    DYNAMIC_SHARED(shared); // CHUNK inputs, then the sums of 16 each
    __shared__ u32 largest[WARPS];
    float4* inputs = reinterpret_cast<float4*>(shared);
    float* sums = reinterpret_cast<float*>(inputs + CHUNK / 4u);
    u32 lane = threadIdx.x % 32u;
    u32 warp = threadIdx.x / 32u;
    u32 units = rows[0].form.quads / UNIT_QUADS;
    u32 quad = first_quad(lane);
    u32 places[2u * LOADS]; // of a unit's inputs, 16 by 16
#pragma unroll
    for (u32 i = 0u; i < LOADS; i++) {
        places[i] = kept(place_of(quad + 4u * i));
        places[LOADS + i] = kept(place_of(quad + TO_HIGH + 4u * i));
    }
    u32 u = lane % 8u;
#pragma unroll
    for (u32 r = 0u; r < EACH; r++) { total[r] = 0.0f; }
    for (u32 start = 0u; start < units; start += CHUNK_UNITS) {
        u32 end = min(units, start + CHUNK_UNITS);
        u32 quads = (end - start) * UNIT_QUADS;
        const float4* from = reinterpret_cast<const float4*>(x) + start * UNIT_QUADS;
        if (start > 0u) { __syncthreads(); } // no warp reads the last chunk any more
        for (u32 quad = threadIdx.x; quad < quads; quad += 32u * WARPS) {
            copy_words<4u>(reinterpret_cast<u32*>(inputs + place_of(quad)), reinterpret_cast<const u32*>(from + quad));
        }
        end_group();
        wait_groups<0>();
        int shift = 0;
        if (!HAS_BYTES) {
            u32 most = 0u; // the bits of the largest input: those of positive numbers have the order of the numbers
            // What this thread has copied it may read.
            for (u32 quad = threadIdx.x; quad < quads; quad += 32u * WARPS) {
                float4 value = inputs[place_of(quad)];
                float size = fmaxf(fmaxf(fabsf(value.x), fabsf(value.y)), fmaxf(fabsf(value.z), fabsf(value.w)));
                most = max(most, __float_as_uint(size));
            }
            most = __reduce_max_sync(WARP, most);
            if (lane == 0u) { largest[warp] = most; }
            __syncthreads();
#pragma unroll
            for (u32 i = 0u; i < WARPS; i++) { most = max(most, largest[i]); }
            shift = 247 - (int)(most >> 23);
            float power = power_of_two(shift / 2), rest = power_of_two(shift - shift / 2);
            // Whole warps: quads are a multiple of 8, and four lanes add up their sums.
            for (u32 first = 32u * warp; first < quads; first += 32u * WARPS) {
                u32 quad = first + lane;
                float sum = 0.0f;
                if (quad < quads) {
                    float4 value = inputs[place_of(quad)];
                    value.x = value.x * power * rest;
                    value.y = value.y * power * rest;
                    value.z = value.z * power * rest;
                    value.w = value.w * power * rest;
                    inputs[place_of(quad)] = value;
                    sum = (value.x + value.y) + (value.z + value.w);
                }
                sum += __shfl_xor_sync(WARP, sum, 1u);
                sum += __shfl_xor_sync(WARP, sum, 2u);
                // Times 2^-149, as the codes.
                if (lane % 4u == 0u && quad < quads) {
                    sums[quad / 4u] = sum * power_of_two(-75) * power_of_two(-74);
                }
            }
        }
        __syncthreads();
        float acc[EACH];
#pragma unroll
        for (u32 r = 0u; r < EACH; r++) { acc[r] = 0.0f; }
        u32 ahead = 0u; // quads of inputs to this round's: whole periods of `place_of`
        for (u32 first = start; first < end; first += 32u * DEPTH, ahead += 32u * DEPTH * UNIT_QUADS) {
#pragma unroll
            for (u32 d = 0u; d < DEPTH; d++) {
                u32 unit = first + 32u * d + lane;
                if (unit >= end) { continue; }
                u32 step = ahead + 32u * UNIT_QUADS * d;
                if (HAS_BYTES) {
                    float sum[EACH];
#pragma unroll
                    for (u32 r = 0u; r < EACH; r++) { sum[r] = 0.0f; }
#pragma unroll
                    for (u32 i = 0u; i < 4u; i++) {
                        float4 value = inputs[(places[0] + step) ^ i];
#pragma unroll
                        for (u32 r = 0u; r < EACH; r++) {
                            u32 word = word_of(raw[d][r].codes[0], i) ^ 0x80808080u;
                            float4 codes = make_float4(
                                byte_less(word, 0u), byte_less(word, 1u), byte_less(word, 2u), byte_less(word, 3u));
                            sum[r] = add_product(sum[r], codes, value);
                        }
                    }
#pragma unroll
                    for (u32 r = 0u; r < EACH; r++) {
                        u32 bits = raw[d][r].scale;
                        acc[r] = fmaf(ENCODING == Q8_0 ? half_(bits) : __uint_as_float(bits), sum[r], acc[r]);
                    }
                } else {
                    float even[2][EACH], odd[2][EACH]; // of the low and the high codes
#pragma unroll
                    for (u32 r = 0u; r < EACH; r++) { even[0][r] = even[1][r] = odd[0][r] = odd[1][r] = 0.0f; }
#pragma unroll
                    for (u32 i = 0u; i < 4u * LOADS; i++) {
                        float4 low = inputs[(places[i / 4u] + step) ^ i % 4u];
                        float4 high = inputs[(places[LOADS + i / 4u] + step) ^ i % 4u];
#pragma unroll
                        for (u32 r = 0u; r < EACH; r++) {
                            u32 word = word_of(raw[d][r].codes[i / 4u], i % 4u);
                            if (HAS_FURTHER) {
                                u32 first_word = (word & 0x0f0f0f0fu) | further(raw[d][r], u, i, false);
                                u32 second_word = (word >> 4 & 0x0f0f0f0fu) | further(raw[d][r], u, i, true);
                                add_codes(even[0][r], odd[0][r], first_word, 0xffu, low);
                                add_codes(even[1][r], odd[1][r], second_word, 0xffu, high);
                            } else {
                                add_codes(even[0][r], odd[0][r], word, 0x0fu, low);
                                add_codes(even[1][r], odd[1][r], word, 0xf0u, high);
                            }
                        }
                    }
                    float low_inputs = sums[(quad + step) / 4u], high_inputs = sums[(quad + step + TO_HIGH) / 4u];
                    if (IS_WIDE) {
                        low_inputs += sums[(quad + step) / 4u + 1u];
                        high_inputs += sums[(quad + step + TO_HIGH) / 4u + 1u];
                    }
#pragma unroll
                    for (u32 r = 0u; r < EACH; r++) {
                        float4 scales = scales_of(raw[d][r], u);
                        float low = fmaf(odd[0][r], 0.00390625f, even[0][r]);
                        float high = fmaf(odd[1][r], 0.00390625f, even[1][r]);
                        if (!HAS_FURTHER) { high *= 0.0625f; }
                        acc[r] = fmaf(scales.x, low, acc[r]);
                        acc[r] = fmaf(scales.y, low_inputs, acc[r]);
                        acc[r] = fmaf(scales.z, high, acc[r]);
                        acc[r] = fmaf(scales.w, high_inputs, acc[r]);
                    }
                }
                u32 next = unit + 32u * DEPTH;
#pragma unroll
                for (u32 r = 0u; r < EACH; r++) {
                    if (next < units) { raw[d][r] = fetch(rows[r], next); }
                }
            }
        }
        int back = 149 - shift;
        float power = power_of_two(back / 2), rest = power_of_two(back - back / 2);
#pragma unroll
        for (u32 r = 0u; r < EACH; r++) { total[r] += HAS_BYTES ? acc[r] : acc[r] * power * rest; }
    }
    add_up<EACH, 16u>(total, lane);
}
