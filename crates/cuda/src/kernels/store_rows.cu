// New rows of K or V as a pool stores them. All threads of a block store one row.
//
//   y = x                                                        in the order of `order`, if WIDE > 0; rotated, see turn.cu
//   pool row = codes(y), scales(y)                               see cells.cu
//   recent row = f16(y)                                          keys before order and rotation, values after them
//
//   q8: scale = max |y| / 127 of a group;  code = round(y / scale) + 128
//   q4: minimum = min y, scale = (max y - minimum) / 15;  code = round((y - minimum) / scale)
//   t4: unit = root mean square * 2.7326 / 127;  code = number of the nearest level;  scale so that the length of y is kept
//
// Scales are rounded to f16 first, and codes are computed from what is stored. A group with NaN or infinity gets a
// scale of NaN, so that the error stays visible.

#define THREADS 64u
#define NONE 0xffffffffu
#define LARGEST_HALF 65504.0f
#define NAN_HALF 0x7e00u

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

// The byte of a nibble dtype that stores elements j and j + half of a group.
__device__ __forceinline__ u32 nibbles(const u32* codes, u32 from, u32 len, u32 j) {
    u32 low = (len + 1u) / 2u;
    u32 byte = codes[from + j];
    if (j + low < len) { byte |= codes[from + j + low] << 4; }
    return byte;
}

// One side in its form: the constants of `Form`, and whether it has recent rows, of keys as they came.
template <u32 TYPE, u32 EACH, u32 N_CODES, u32 N_WORDS, u32 N_SCALES, u32 FIRST, u32 TURNS, bool IS_RECENT, bool IS_PLAIN>
struct Side {
    static constexpr u32 GROUPS = (DIM + EACH - 1u) / EACH;
    static constexpr u32 SCALE_WORDS = 2u * GROUPS + 2u;

    static __device__ __forceinline__ u32 recent_element(const u32* x, const float* turned, u32 i) {
        if (i >= DIM) { return 0u; }
        return recent_half(IS_PLAIN ? __uint_as_float(x[i]) : turned[i]);
    }

    // The elements FIRST .. DIM as t4, by all threads.
    static __device__ __forceinline__ void encode_t4(const Row& row, u32 p) {
        u32 n = DIM - FIRST;
        float squares = 0.0f;
        bool finite = true;
        for (u32 i = FIRST + threadIdx.x; i < DIM; i += THREADS) {
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
            for (u32 i = FIRST; i < DIM; i++) { largest = fmaxf(largest, fabsf(row.turned[i])); }
        }
        float unit = sums_up ? sqrtf(squares / (float)max(n, 1u)) * (2.7326f / 127.0f) : largest / 127.0f;
        float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
        float levels = 0.0f;
        for (u32 i = FIRST + threadIdx.x; i < DIM; i += THREADS) {
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

    // Byte i < N_CODES of the codes.
    static __device__ __forceinline__ u32 code_byte(const u32* codes, u32 i) {
        if (TYPE == 3 || (TYPE == 5 && i < FIRST)) { return codes[i]; }
        if (TYPE == 4) {
            u32 g = i / (EACH / 2u);
            return nibbles(codes, g * EACH, min(EACH, DIM - g * EACH), i - g * (EACH / 2u));
        }
        return nibbles(codes, FIRST, DIM - FIRST, i - FIRST);
    }

    // Byte i of a packed row.
    static __device__ __forceinline__ u32 row_byte(const Row& row, u32 i) {
        if (i < N_CODES) { return code_byte(row.codes, i); }
        u32 p = (i - N_CODES) / 2u;
        if (p >= N_SCALES) { return 0u; }
        return (row.scales[p] >> (8u * ((i - N_CODES) & 1u))) & 255u;
    }

    static __device__ __forceinline__ u32 float_element(const float* turned, u32 i) {
        if (i >= DIM) { return 0u; }
        u32 bits = __float_as_uint(turned[i]);
        return TYPE == 1 ? to_half(bits) : to_bf16(bits);
    }

    // Stores the row `from`, whose head has the order `order`; `newest` and `kept` are its recent rows, or null.
    static __device__ __forceinline__ void store_row(
        const Row& row, const u32* from, const u32* order, u32* to, u32* newest, u32* kept) {
        float* turned = row.turned;
        if (TYPE == 0 && TURNS == 0) {
            for (u32 i = threadIdx.x; i < DIM; i += THREADS) { to[i] = from[i]; }
            return;
        }
        for (u32 i = threadIdx.x; i < DIM; i += THREADS) {
            u32 channel = FIRST > 0 ? order[i] : i;
            turned[i] = __uint_as_float(from[channel]);
        }
        __syncthreads();
        turn_rows(turned, DIM, 1u, TURNS, FIRST);
        if (IS_RECENT) {
            for (u32 i = threadIdx.x; i < (DIM + 1u) / 2u; i += THREADS) {
                u32 both = recent_element(from, turned, 2u * i) | (recent_element(from, turned, 2u * i + 1u) << 16);
                newest[i] = both;
                if (kept != nullptr) { kept[i] = both; }
            }
        }
        if (TYPE == 0) {
            for (u32 i = threadIdx.x; i < DIM; i += THREADS) { to[i] = __float_as_uint(turned[i]); }
            return;
        }
        if (TYPE < 3) {
            for (u32 i = threadIdx.x; i < N_WORDS; i += THREADS) {
                to[i] = float_element(turned, 2u * i) | (float_element(turned, 2u * i + 1u) << 16);
            }
            return;
        }
        if (TYPE == 5) {
            if (FIRST > 0 && threadIdx.x == 0u) { encode_q8(row, 0u, FIRST, 0u); }
            encode_t4(row, FIRST > 0 ? 1u : 0u);
        } else {
            for (u32 g = threadIdx.x; g < GROUPS; g += THREADS) {
                u32 n = min(EACH, DIM - g * EACH);
                if (TYPE == 3) {
                    encode_q8(row, g * EACH, n, g);
                } else {
                    encode_q4(row, g * EACH, n, 2u * g);
                }
            }
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < N_WORDS; i += THREADS) {
            u32 b = 4u * i;
            to[i] = row_byte(row, b) | (row_byte(row, b + 1u) << 8) | (row_byte(row, b + 2u) << 16) |
                    (row_byte(row, b + 3u) << 24);
        }
    }
};
