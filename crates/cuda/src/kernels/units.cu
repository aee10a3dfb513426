// Sums of rows of weights in blocks times the inputs of one token, without tensor cores, for kernels that wait for memory alone. A block
// has ROWS rows, and its threads go through them side by side: each has a unit of every row at a time, 16 bytes of codes.
// Inputs that were loaded are used for all of these rows. Blocks are small and many, so that a GPU is full of them to the end; while
// one waits for its first weights, others on the same multiprocessor compute.
//
// Codes become floats by their place in the bits of a float, which takes one instruction: a signed byte in 2^23 + n, from which 2^23 is then
// taken, and a code of up to 6 bits in 1 + n / 2^bits. What that 1 adds to a sum is the sum of the inputs, as for offsets of codes.

#define HAS_BYTES (ENCODING == Q8_0 || ENCODING == INT8)
#define UNIT_QUADS (HAS_BYTES ? 4u : 8u)
#define BITS (ENCODING == Q6_K ? 6u : (ENCODING == Q5_0 || ENCODING == Q5_1 ? 5u : 4u)) // of a code that is no byte
#define THREADS (32u * WARPS)
#ifndef GATED
#define GATED 0
#define NORMED 0
#endif
#define SIDES (GATED ? 2u : 1u) // GATED: half of the rows are of another matrix
#define ROWS_OF_SIDE (ROWS / SIDES)

// What a thread has loaded of a unit. An encoding uses a part of it.
struct Raw {
    uint4 codes;
    uint4 high;
    u32 head;
    u32 scale;
    u32 more;
};

struct Matrix {
    const u32* w;
    Form form;
};

// The rows of a block: those from `first` on of each side. Rows behind the last one are computed like it, and not written.
struct Rows {
    Matrix sides[SIDES];
    u32 first;
    u32 last;

    // Quads before a row.
    __device__ __forceinline__ u32 before(u32 r) const {
        return min(first + r % ROWS_OF_SIDE, last) * sides[0].form.quads;
    }
};

__device__ __forceinline__ Raw fetch(const Matrix& matrix, u32 before, u32 unit) {
    const u32* w = matrix.w;
    const Form& form = matrix.form;
    Raw raw;
    u32 u = unit % 8u;
    u32 super_block = before / 64u + unit / (64u / UNIT_QUADS);
    u32 block = before / 8u + unit; // of encodings with 16 bytes of codes for 32 elements
    switch (ENCODING) {
    case Q8_0:
    case INT8: {
        u32 quad = before + 4u * unit;
        raw.codes = load4(w, quad);
        raw.scale = ENCODING == Q8_0 ? load_half(w, form.s, quad / 8u) : load1(w, form.s + quad / 8u);
        break;
    }
    case Q6_K: {
        u32 at = super_block * 52u;
        raw.codes = load4(w, at + 4u * u);
        raw.high = load4(w, at + 32u + u / 4u * 8u + u % 2u * 4u);
        uint2 scales = load2(w, at + 48u + u / 4u * 2u);
        raw.scale = scales.x;
        raw.more = scales.y;
        raw.head = load_half(w, form.s, super_block);
        break;
    }
    default:
        raw.codes = load4(w, block * 4u);
        if (ENCODING == Q5_0 || ENCODING == Q5_1) { raw.more = load1(w, form.b + block); }
        if (ENCODING == Q4_1 || ENCODING == Q5_1) {
            raw.scale = load1(w, form.s + block);
        } else {
            raw.scale = load_half(w, form.s, block);
        }
    }
    return raw;
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
#define TO_HIGH (ENCODING == Q6_K ? 16u : 4u)

// A signed byte, from one that is 128 more.
__device__ __forceinline__ float byte_less(u32 word, u32 i) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + i)) - 8388736.0f;
}

// The further bits of four codes, in the bits from 4 on of four bytes: those of the low codes, then of the high ones.
__device__ __forceinline__ u32 further(const Raw& raw, u32 u, u32 i, bool high) {
    switch (ENCODING) {
    case Q5_0:
    case Q5_1: return ((raw.more >> (4u * i + (high ? 16u : 0u)) & 15u) * 0x02040810u) & 0x10101010u;
    case Q6_K: return (word_of(raw.high, i) >> (u / 2u % 2u * 2u + (high ? 4u : 0u)) & 0x03030303u) << 4;
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
        float d = half_(raw.head);
        float low = d * (small((raw.scale >> shift & 255u) ^ 128u) - 128.0f);
        float high = d * (small((raw.more >> shift & 255u) ^ 128u) - 128.0f);
        return make_float4(low, -32.0f * low, high, -32.0f * high);
    }
    default: return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Word i of the low or of the high codes of a unit, four of them: each at the top of the lower seven bits of its byte, whose eighth bit is 1.
__device__ __forceinline__ u32 lifted(const Raw& raw, u32 u, u32 i, bool high) {
    u32 word = word_of(raw.codes, i);
    if (BITS == 4u) { return ((high ? word >> 1 : word << 3) & 0x78787878u) | 0x80808080u; }
    return (((high ? word >> 4 : word) & 0x0f0f0f0fu) | further(raw, u, i, high)) << (7u - BITS) | 0x80808080u;
}

// 1 + n / 2^BITS for code n in byte `i` of such a word.
__device__ __forceinline__ float one_and(u32 word, u32 i) {
    return __uint_as_float(__byte_perm(word, 0x3f000000u, 0x7044u + (i << 8)));
}

// sum + (1 + n / 2^BITS) . x for the codes of such a word
__device__ __forceinline__ float add_codes(float sum, u32 word, float4 x) {
    sum = fmaf(one_and(word, 0u), x.x, sum);
    sum = fmaf(one_and(word, 1u), x.y, sum);
    sum = fmaf(one_and(word, 2u), x.z, sum);
    return fmaf(one_and(word, 3u), x.w, sum);
}

__device__ __forceinline__ float sum_of(float4 x) {
    return (x.x + x.y) + (x.z + x.w);
}

__device__ __forceinline__ void fetch_units(Raw (&raw)[ROWS], const Rows& rows, u32 unit, u32 units) {
    if (unit >= units) { return; }
#pragma unroll
    for (u32 r = 0u; r < ROWS; r++) { raw[r] = fetch(rows.sides[r / ROWS_OF_SIDE], rows.before(r), unit); }
}

// The inputs of a product: one vector, and the weights of its norm if there is one.
struct Inputs {
    const float4* x;
    const float4* norm;

    // Four of them, times their weights; adds their squares.
    __device__ __forceinline__ float4 at(u32 quad, float& squares) const {
        float4 v = x[quad];
        if (NORMED) {
            float4 w = norm[quad];
            squares = add_product(squares, v, v);
            v = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
        }
        return v;
    }
};

// Adds the products of a unit of every row, and the squares of its inputs.
__device__ __forceinline__ void add_unit(
    float (&sums)[ROWS], float& squares, const Raw (&raw)[ROWS], u32 unit, const Inputs& x) {
    u32 u = unit % 8u;
    u32 first = first_quad(unit);
    if (HAS_BYTES) {
        float4 inputs[4];
#pragma unroll
        for (u32 i = 0u; i < 4u; i++) { inputs[i] = x.at(first + i, squares); }
#pragma unroll
        for (u32 r = 0u; r < ROWS; r++) {
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0u; i < 4u; i++) {
                u32 word = word_of(raw[r].codes, i) ^ 0x80808080u;
                float4 codes =
                    make_float4(byte_less(word, 0u), byte_less(word, 1u), byte_less(word, 2u), byte_less(word, 3u));
                sum = add_product(sum, codes, inputs[i]);
            }
            u32 bits = raw[r].scale;
            sums[r] = fmaf(ENCODING == Q8_0 ? half_(bits) : __uint_as_float(bits), sum, sums[r]);
        }
        return;
    }
    float low[ROWS], high[ROWS]; // of the codes in the low four bits, and in the high ones
#pragma unroll
    for (u32 r = 0u; r < ROWS; r++) { low[r] = high[r] = 0.0f; }
    float low_inputs = 0.0f, high_inputs = 0.0f;
#pragma unroll
    for (u32 i = 0u; i < 4u; i++) {
        float4 a = x.at(first + i, squares);
        float4 b = x.at(first + TO_HIGH + i, squares);
        low_inputs += sum_of(a);
        high_inputs += sum_of(b);
#pragma unroll
        for (u32 r = 0u; r < ROWS; r++) {
            low[r] = add_codes(low[r], lifted(raw[r], u, i, false), a);
            high[r] = add_codes(high[r], lifted(raw[r], u, i, true), b);
        }
    }
#pragma unroll
    for (u32 r = 0u; r < ROWS; r++) {
        // A code's scale and offset, as those of 1 + n / 2^BITS.
        float4 scales = scales_of(raw[r], u);
        float of_low = scales.x * (float)(1u << BITS), of_high = scales.z * (float)(1u << BITS);
        float sum = fmaf(of_low, low[r], sums[r]);
        sum = fmaf(scales.y - of_low, low_inputs, sum);
        sum = fmaf(of_high, high[r], sum);
        sums[r] = fmaf(scales.w - of_high, high_inputs, sum);
    }
}

// The sums of the rows; `raw` has each thread's first units. For all threads of a block: afterwards the first ROWS of the SUMS words of shared
// memory are the sums of the rows, and the first warp may read them.
#define SUMS ((WARPS + 1u) * ROWS + WARPS)
__device__ __forceinline__ void add_units(
    float* of_rows, Raw (&raw)[ROWS], const Rows& rows, const float* __restrict__ x, const float* __restrict__ norm, float eps) {
    float* of_warps = of_rows + ROWS;
    float* squares_of_warps = of_warps + WARPS * ROWS;
    Inputs inputs = {reinterpret_cast<const float4*>(x), reinterpret_cast<const float4*>(norm)};
    float squares = 0.0f;
    u32 lane = threadIdx.x % 32u;
    u32 units = rows.sides[0].form.quads / UNIT_QUADS;
    float sums[ROWS];
#pragma unroll
    for (u32 r = 0u; r < ROWS; r++) { sums[r] = 0.0f; }
    for (u32 unit = threadIdx.x; unit < units; unit += THREADS) {
        add_unit(sums, squares, raw, unit, inputs);
        fetch_units(raw, rows, unit + THREADS, units);
    }
    add_up<ROWS, 16u>(sums, lane);
    constexpr u32 SHARING = 32u / ROWS; // lanes with the same row
    if (lane % SHARING == 0u) { of_warps[threadIdx.x / 32u * ROWS + lane / SHARING] = sums[0]; }
    if (NORMED) {
        for (u32 half = 16u; half > 0u; half /= 2u) { squares += __shfl_xor_sync(0xffffffffu, squares, half); }
        if (lane == 0u) { squares_of_warps[threadIdx.x / 32u] = squares; }
    }
    __syncthreads();
    if (threadIdx.x < ROWS) {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0u; i < WARPS; i++) { sum += of_warps[i * ROWS + threadIdx.x]; }
        if (NORMED) {
            float all = 0.0f;
#pragma unroll
            for (u32 i = 0u; i < WARPS; i++) { all += squares_of_warps[i]; }
            sum *= 1.0f / sqrtf(all / (float)(rows.sides[0].form.quads * 4u) + eps);
        }
        of_rows[threadIdx.x] = sum;
    }
    __syncwarp(); // the rows are those of one warp
}
