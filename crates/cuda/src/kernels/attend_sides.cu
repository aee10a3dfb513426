// The first part of attend_mma.cu: its constants and arguments, rows of K and V in shared memory, and the operands of tensor cores that a
// lane makes of them.

#define WARPS 4u
#define THREADS 128u
#define GROUP 16u // cells
#define TILES (ROWS / 8u)
#define STEPS (DIM / 16u)
#define NO_SCORE -1e30f
#define HIDDEN -3e38f
#define DIRECT 0xffffffffu
#define NONE 0xffffffffu
#define WARP 0xffffffffu
#define RECENT (K_RECENT || V_RECENT)
// Whether queries are rounded to two f16. Over packed keys, which are rounded more coarsely, to one; then over their recent rows, too, which
// are in f16.
#define TWO_PIECES (K_DTYPE < 3u)
#define OUT_STRIDE (DIM + 4u) // of queries and results in shared memory

struct Args { // as those of `attend`
    u32 heads;
    u32 kv_heads;
    u32 first_head;
    u32 k_head;
    u32 v_head;
    u32 cells;
    u32 order;
    u32 work;
    u32 units;
    u32 entries;
    u32 bits;
    float scale;
    float cap;
    u32 has_sinks;
    u32 recents;
    u32 recent_row;
};

// What a block works on.
struct Job {
    const u32* plan;
    u32 first_slot;
    u32 row0;
    u32 rows;
    u32 per_kv;
};

// ---- rows of K and V in shared memory, and the operands that a lane makes of them

// TYPE: 1 f16, 2 bf16, 3 q8, 4 q4. A step is 16 elements of keys, or two steps 32 of values; which element is where in an operand is
// free, as long as keys and queries agree, and the values of both passes: a lane takes what lies side by side. IN_FOURS: values are in
// the order of packed ones.
template <u32 TYPE, u32 EACH, u32 CODES, u32 ROW_WORDS, bool KEYS, bool IN_FOURS>
struct Side {
    static constexpr u32 WORDS = ROW_WORDS;
    static constexpr bool BF16 = TYPE == 2u;
    static constexpr bool PACKED = TYPE >= 3u;
    // Words of a row in a tile: of floats such that the lanes of a read are in different banks. Packed rows lie as in memory, so that a
    // run of them is copied 16 bytes at a time; at most two lanes of a read meet in a bank.
    static constexpr u32 STRIDE = PACKED ? WORDS : DIM / 2u + (KEYS ? 8u : 4u);

    static __device__ __forceinline__ u32 scale_bits(const u32* row, u32 p) {
        return reinterpret_cast<const unsigned short*>(row)[CODES / 2u + p];
    }
    // Word of the codes of elements i .. i + 3, and where they begin in its bytes.
    static __device__ __forceinline__ u32 codes(const u32* row, u32 i) {
        if (TYPE == 3u) { return row[i / 4u]; }
        u32 j = i % EACH;
        bool high = j >= EACH / 2u;
        u32 word = row[(i / EACH * (EACH / 2u) + (high ? j - EACH / 2u : j)) / 4u];
        return (high ? word >> 4 : word) & 0x0f0f0f0fu;
    }
    // Bytes of `codes` that `select` names in its first and third digit, as halves: 1,024 and the code. Then with their scales.
    static __device__ __forceinline__ u32 halves(u32 codes, u32 select) { return __byte_perm(codes, 0x64646464u, select); }
    static __device__ __forceinline__ u32 value(u32 halves, u32 scale, u32 offset) {
        u32 number = add_pairs(halves, TYPE == 3u ? 0xe480e480u : 0xe400e400u);
        return TYPE == 3u ? mul_pairs(number, scale) : fma_pairs(number, scale, offset);
    }

    // Elements 4c .. 4c + 3 of step `step` of rows g and g + 8: A[cells, elements].
    static __device__ __forceinline__ void keys(u32 (&a)[4], const u32* tile, u32 step, u32 g, u32 c) {
#pragma unroll
        for (u32 i = 0u; i < 2u; i++) {
            const u32* row = tile + (g + 8u * i) * STRIDE;
            if (!PACKED) {
                uint2 words = *reinterpret_cast<const uint2*>(row + 8u * step + 2u * c);
                a[i] = words.x;
                a[i + 2u] = words.y;
            } else {
                u32 word = codes(row, 16u * step + 4u * c);
                u32 p = 16u * step / EACH;
                u32 scale = scale_bits(row, TYPE == 3u ? p : 2u * p) * 0x10001u;
                u32 offset = TYPE == 3u ? 0u : scale_bits(row, 2u * p + 1u) * 0x10001u;
                a[i] = value(halves(word, 0x4140u), scale, offset);
                a[i + 2u] = value(halves(word, 0x4342u), scale, offset);
            }
        }
    }

    // Two operands A[elements, cells] of 16 of the 32 elements from 32 `block` on each.
    static __device__ __forceinline__ void values(u32 (&a)[2][4], const u32* tile, u32 block, u32 g, u32 c) {
        if (!PACKED && IN_FOURS) {
#pragma unroll
            for (u32 i = 0u; i < 2u; i++) {
                const u32* first = tile + (2u * c + 8u * i) * STRIDE + 16u * block + 2u * g;
                uint2 x = *reinterpret_cast<const uint2*>(first);
                uint2 y = *reinterpret_cast<const uint2*>(first + STRIDE);
                a[0][2u * i] = __byte_perm(x.x, y.x, 0x5410u);
                a[0][2u * i + 1u] = __byte_perm(x.x, y.x, 0x7632u);
                a[1][2u * i] = __byte_perm(x.y, y.y, 0x5410u);
                a[1][2u * i + 1u] = __byte_perm(x.y, y.y, 0x7632u);
            }
            return;
        }
        if (!PACKED) {
            u32 lane = 4u * g + c;
            const u32* row = tile + (lane % 8u + lane / 16u * 8u) * STRIDE + 16u * block + lane / 8u % 2u * 4u;
            ldmatrix_x4_trans(a[0], row);
            ldmatrix_x4_trans(a[1], row + 8u);
            return;
        }
#pragma unroll
        for (u32 i = 0u; i < 2u; i++) {
            const u32* first = tile + (2u * c + 8u * i) * STRIDE;
            const u32* second = first + STRIDE;
            u32 p = 32u * block / EACH * (TYPE == 3u ? 1u : 2u);
            u32 scale = scale_bits(first, p) | scale_bits(second, p) << 16;
            u32 offset = TYPE == 3u ? 0u : scale_bits(first, p + 1u) | scale_bits(second, p + 1u) << 16;
            u32 x = codes(first, 32u * block + 4u * g);
            u32 y = codes(second, 32u * block + 4u * g);
            // The first two elements of both cells, and the others.
            u32 pairs[2] = {__byte_perm(x, y, 0x5140u), __byte_perm(x, y, 0x7362u)};
#pragma unroll
            for (u32 e = 0u; e < 4u; e++) {
                // Element e is row g or g + 8 of operand e / 2.
                a[e / 2u][e % 2u + 2u * i] = value(halves(pairs[e / 2u], e % 2u == 0u ? 0x4140u : 0x4342u), scale, offset);
            }
        }
    }

    // The element of row `8 half + g` of operand `m` of all.
    static __device__ __forceinline__ u32 element(u32 m, u32 half, u32 g) {
        return IN_FOURS ? m / 2u * 32u + 4u * g + m % 2u * 2u + half : 16u * m + 8u * half + g;
    }

    // Whether words `first`, `first + 2`, ... of a row may become infinite or NaN: floats with an exponent of ones, and scales with which
    // some code exceeds the range of f16 (as such a value does when an f16 cache stores it).
    static __device__ __forceinline__ bool is_bad(const u32* row, u32 first) {
        // 128 codes from 512 on; 15 codes below 2,048 and a minimum below 32,768 stay in range.
        constexpr u32 LOW = TYPE == 3u ? 0x6000u : (TYPE == 4u ? 0x6800u : (BF16 ? 0x7f80u : 0x7c00u));
        constexpr u32 HIGH = TYPE == 4u ? 0x7800u : LOW;
        bool bad = false;
        for (u32 i = (PACKED ? CODES / 4u : 0u) + first; i < WORDS; i += 2u) {
            // Behind the scales of a packed row may be half a word of padding, which is 0.
            bad = bad || (row[i] & 0x7fffu) >= LOW || (row[i] >> 16 & 0x7fffu) >= HIGH;
        }
        return bad;
    }
    static __device__ __forceinline__ void clear(u32* row, u32 first) {
        for (u32 i = (PACKED ? CODES / 4u : 0u) + first; i < WORDS; i += 2u) { row[i] = 0u; }
    }

    static __device__ __forceinline__ void product(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
        if (BF16) {
            mma_bf16_16816(d, a, b);
        } else {
            mma_f16_16816(d, a, b);
        }
    }
    static __device__ __forceinline__ u32 pack(float low, float high) {
        return BF16 ? pack_bf162(low, high) : pack_half2(low, high);
    }
    // What packing leaves of two numbers.
    static __device__ __forceinline__ float2 rest(float low, float high, u32 packed) {
        float x = BF16 ? __uint_as_float(packed << 16) : half_(packed & 0xffffu);
        float y = BF16 ? __uint_as_float(packed & 0xffff0000u) : half_(packed >> 16);
        return make_float2(low - x, high - y);
    }
};

typedef Side<K_DTYPE, K_GROUP, K_CODES, K_WORDS, true, false> Keys;
typedef Side<V_DTYPE, V_GROUP, V_CODES, V_WORDS, false, (V_DTYPE >= 3u)> Values;
typedef Side<K_RECENT ? 1u : K_DTYPE, K_GROUP, K_CODES, K_RECENT ? DIM / 2u : K_WORDS, true, false> RecentKeys;
typedef Side<V_RECENT ? 1u : V_DTYPE, V_GROUP, V_CODES, V_RECENT ? DIM / 2u : V_WORDS, false, V_RECENT> RecentValues;

#define GROUP_WORDS (GROUP * (Keys::STRIDE + Values::STRIDE))
#define RECENT_GROUP_WORDS (GROUP * (RecentKeys::STRIDE + RecentValues::STRIDE))
