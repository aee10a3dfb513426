// Writes new rows of K or V to the cells of the plan, as the pool stores them. One block per row.
//
//   y = x[t, first_head + head]                                  in the order of `order`, if WIDE > 0; rotated, see turn.cu
//   pool[head, cell[t]] = codes(y), scales(y)                    see cells.cu
//   RECENT: recent[n_slots + t] = recent[kept[t]] = f16(y)       keys before order and rotation, values after them
//
//   q8: scale = max |y| / 127 of a group;  code = round(y / scale) + 128
//   q4: minimum = min y, scale = (max y - minimum) / 15;  code = round((y - minimum) / scale)
//   t4: unit = root mean square * 2.7326 / 127;  code = number of the nearest level;  scale so that the length of y is kept
//
// Scales are rounded to f16 first, and codes are computed from what is stored. A group with NaN or infinity gets a
// scale of NaN, so that the error stays visible.

struct Args {
    u32 cells;        // of the pool
    u32 first_head;   // of this part of the pool
    u32 all_heads;    // of x
    u32 written;      // first word of [tokens] cells in the plan
    u32 kept;         // first word of [tokens] slots or NONE
    u32 n_slots;
    u32 recent_row;   // words of a row of `recent`
    u32 recent_first; // first word of this side in it
};

#define THREADS 64u
#define NONE 0xffffffffu
#define LARGEST_HALF 65504.0f
#define NAN_HALF 0x7e00u
#define N_GROUPS ((DIM + GROUP - 1u) / GROUP)

// A row on its way to the pool, in shared memory.
struct Row {
    float* turned; // [DIM]
    u32* codes;    // [DIM]
    u32* scales;   // f16 bits, in stored order
    float* sums;   // [THREADS]
    u32* odd;      // [THREADS], nonzero: an element that is not finite
};

__device__ __forceinline__ bool is_finite(float x) {
    return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// An f16 for a recent row: saturated, but NaN and infinity stay.
__device__ __forceinline__ u32 recent_half(float x) {
    return to_half(__float_as_uint(is_finite(x) ? clamp_(x, -LARGEST_HALF, LARGEST_HALF) : x));
}

__device__ __forceinline__ u32 recent_element(const u32* x, const float* turned, u32 i) {
    if (i >= DIM) { return 0u; }
    return recent_half(PLAIN_RECENT ? __uint_as_float(x[i]) : turned[i]);
}

// Scale and codes of the elements from .. from + n as q8, by one thread.
__device__ __forceinline__ void encode_q8(const Row& row, u32 from, u32 n, u32 p) {
    float largest = 0.0f;
    bool finite = true;
    for (u32 i = 0u; i < n; i++) {
        largest = fmaxf(largest, fabsf(row.turned[from + i]));
        finite = finite && is_finite(row.turned[from + i]);
    }
    u32 bits = finite ? to_half(__float_as_uint(fminf(largest / 127.0f, LARGEST_HALF))) : NAN_HALF;
    float stored = half_(bits & 0x7fffu);
    float inverse = finite && stored > 0.0f ? 1.0f / stored : 0.0f;
    for (u32 i = 0u; i < n; i++) {
        int code = finite ? (int)clamp_(rintf(row.turned[from + i] * inverse), -127.0f, 127.0f) : 0;
        row.codes[from + i] = (u32)(code + 128);
    }
    row.scales[p] = bits;
}

__device__ __forceinline__ void encode_q4(const Row& row, u32 from, u32 n, u32 p) {
    float least = row.turned[from];
    float largest = row.turned[from];
    bool finite = true;
    for (u32 i = 0u; i < n; i++) {
        least = fminf(least, row.turned[from + i]);
        largest = fmaxf(largest, row.turned[from + i]);
        finite = finite && is_finite(row.turned[from + i]);
    }
    u32 minimum_bits = to_half(__float_as_uint(clamp_(least, -LARGEST_HALF, LARGEST_HALF)));
    float minimum = half_(minimum_bits);
    u32 scale_bits = to_half(__float_as_uint(clamp_((largest - minimum) / 15.0f, 0.0f, LARGEST_HALF)));
    float stored = half_(scale_bits);
    float inverse = stored > 0.0f ? 1.0f / stored : 0.0f;
    for (u32 i = 0u; i < n; i++) {
        float code = finite ? clamp_(rintf((row.turned[from + i] - minimum) * inverse), 0.0f, 15.0f) : 0.0f;
        row.codes[from + i] = (u32)code;
    }
    row.scales[p] = finite ? scale_bits : NAN_HALF;
    row.scales[p + 1u] = finite ? minimum_bits : NAN_HALF;
}

// The number of the level nearest to x.
__device__ __forceinline__ u32 t4_code(float x) {
    float a = fabsf(x);
    u32 magnitude = (u32)(a >= 12.0f) + (u32)(a >= 24.5f) + (u32)(a >= 37.5f) + (u32)(a >= 51.0f) + (u32)(a >= 66.5f) +
                    (u32)(a >= 85.5f) + (u32)(a >= 111.5f);
    return x < 0.0f ? 7u - magnitude : 8u + magnitude;
}

// The sum of what every thread passes, in a fixed order.
__device__ __forceinline__ float total(const Row& row, float x) {
    __syncthreads();
    row.sums[threadIdx.x] = x;
    __syncthreads();
    float sum = 0.0f;
    for (u32 i = 0u; i < THREADS; i++) { sum += row.sums[i]; }
    return sum;
}

// The elements WIDE .. DIM as t4, by all threads.
__device__ __forceinline__ void encode_t4(const Row& row, u32 p) {
    u32 n = DIM - WIDE;
    float squares = 0.0f;
    bool finite = true;
    for (u32 i = WIDE + threadIdx.x; i < DIM; i += THREADS) {
        squares += row.turned[i] * row.turned[i];
        finite = finite && is_finite(row.turned[i]);
    }
    row.odd[threadIdx.x] = finite ? 0u : 1u;
    squares = total(row, squares);
    float largest = 0.0f;
    bool any_odd = false;
    for (u32 i = 0u; i < THREADS; i++) { any_odd = any_odd || row.odd[i] != 0u; }
    // Squares may overflow where elements do not: then the largest level represents the largest element.
    bool sums_up = is_finite(squares);
    if (!sums_up) {
        for (u32 i = WIDE; i < DIM; i++) { largest = fmaxf(largest, fabsf(row.turned[i])); }
    }
    float unit = sums_up ? sqrtf(squares / (float)max(n, 1u)) * (2.7326f / 127.0f) : largest / 127.0f;
    float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
    float levels = 0.0f;
    for (u32 i = WIDE + threadIdx.x; i < DIM; i += THREADS) {
        u32 code = any_odd ? 0u : t4_code(row.turned[i] * inverse);
        row.codes[i] = code;
        float level = t4_level(code);
        levels += level * level;
    }
    levels = total(row, levels);
    // The stored row gets the length of the original, which avoids a bias.
    float scale = sums_up && levels > 0.0f ? sqrtf(squares / levels) : unit;
    if (threadIdx.x == 0u) {
        row.scales[p] = any_odd ? NAN_HALF : to_half(__float_as_uint(fminf(scale, LARGEST_HALF)));
    }
}

// The byte of a nibble dtype that stores elements j and j + half of a group.
__device__ __forceinline__ u32 nibbles(const u32* codes, u32 from, u32 len, u32 j) {
    u32 low = (len + 1u) / 2u;
    u32 byte = codes[from + j];
    if (j + low < len) { byte |= codes[from + j + low] << 4; }
    return byte;
}

// Byte i < CODES of the codes.
__device__ __forceinline__ u32 code_byte(const u32* codes, u32 i) {
    if (DTYPE == 3 || (DTYPE == 5 && i < WIDE)) { return codes[i]; }
    if (DTYPE == 4) {
        u32 g = i / (GROUP / 2u);
        return nibbles(codes, g * GROUP, min(GROUP, DIM - g * GROUP), i - g * (GROUP / 2u));
    }
    return nibbles(codes, WIDE, DIM - WIDE, i - WIDE);
}

// Byte i of a packed row.
__device__ __forceinline__ u32 row_byte(const Row& row, u32 i) {
    if (i < CODES) { return code_byte(row.codes, i); }
    u32 p = (i - CODES) / 2u;
    if (p >= SCALES) { return 0u; }
    return (row.scales[p] >> (8u * ((i - CODES) & 1u))) & 255u;
}

__device__ __forceinline__ u32 float_element(const float* turned, u32 i) {
    if (i >= DIM) { return 0u; }
    u32 bits = __float_as_uint(turned[i]);
    return DTYPE == 1 ? to_half(bits) : to_bf16(bits);
}

extern "C" __global__ void __launch_bounds__(64) store(
    const u32* __restrict__ x, // [tokens, all_heads, DIM] f32 bits: NaN must stay NaN
    const u32* __restrict__ plan,
    const u32* __restrict__ order, // [all_heads, DIM]
    u32* __restrict__ pool,        // [heads, cells, WORDS]
    u32* __restrict__ recent,      // [n_slots + tokens, recent_row]
    Args args) {
    __shared__ float turned[DIM];
    __shared__ u32 codes[DIM];
    __shared__ u32 scales[2u * N_GROUPS + 2u];
    __shared__ float sums[THREADS];
    __shared__ u32 odd[THREADS];
    Row row = {turned, codes, scales, sums, odd};
    u32 token = blockIdx.y;
    u32 head = args.first_head + blockIdx.x;
    const u32* from = x + (token * args.all_heads + head) * DIM;
    u32* to = pool + (unsigned long long)(blockIdx.x * args.cells + plan[args.written + token]) * WORDS;
    if (DTYPE == 0 && TURN == 0) {
        for (u32 i = threadIdx.x; i < DIM; i += THREADS) { to[i] = from[i]; }
        return;
    }
    for (u32 i = threadIdx.x; i < DIM; i += THREADS) {
        u32 channel = WIDE > 0 ? order[head * DIM + i] : i;
        turned[i] = __uint_as_float(from[channel]);
    }
    __syncthreads();
    turn_rows(turned, DIM, 1u, TURN, WIDE);
    if (RECENT) {
        u32 words = (DIM + 1u) / 2u;
        u32 first = args.recent_first + head * words;
        u32 slot = plan[args.kept + token];
        for (u32 i = threadIdx.x; i < words; i += THREADS) {
            u32 both = recent_element(from, turned, 2u * i) | (recent_element(from, turned, 2u * i + 1u) << 16);
            recent[(args.n_slots + token) * args.recent_row + first + i] = both;
            if (slot != NONE) { recent[slot * args.recent_row + first + i] = both; }
        }
    }
    if (DTYPE == 0) {
        for (u32 i = threadIdx.x; i < DIM; i += THREADS) { to[i] = __float_as_uint(turned[i]); }
        return;
    }
    if (DTYPE < 3) {
        for (u32 i = threadIdx.x; i < WORDS; i += THREADS) {
            to[i] = float_element(turned, 2u * i) | (float_element(turned, 2u * i + 1u) << 16);
        }
        return;
    }
    if (DTYPE == 5) {
        if (WIDE > 0 && threadIdx.x == 0u) { encode_q8(row, 0u, WIDE, 0u); }
        encode_t4(row, WIDE > 0 ? 1u : 0u);
    } else {
        for (u32 g = threadIdx.x; g < N_GROUPS; g += THREADS) {
            u32 n = min(GROUP, DIM - g * GROUP);
            if (DTYPE == 3) {
                encode_q8(row, g * GROUP, n, g);
            } else {
                encode_q4(row, g * GROUP, n, 2u * g);
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < WORDS; i += THREADS) {
        u32 b = 4u * i;
        to[i] = row_byte(row, b) | (row_byte(row, b + 1u) << 8) | (row_byte(row, b + 2u) << 16) |
                (row_byte(row, b + 3u) << 24);
    }
}
