// Attention on tensor cores, for rows in f16, bf16, q8 and q4 of whole blocks of 32 elements. One block per work item, KV head and
// ROWS query rows, as `attend`; it reads the same tables (attend.cu has their words).
//
//   warp w takes the cells of group w, w + 4, ... of each unit, 16 at a time; the next groups are on their way to shared memory:
//     S = K Q^T       16 cells x 8 rows per product; q in two pieces, so that only k is rounded
//     M' = max(M, round(max S));  W = 2^(S - M');  l = l 2^(M - M') + sum W;  O = O 2^(M - M') + V^T W
//   at the end the warps' states are added up in the order of the warps
//
// (Dao, 2023, FlashAttention-2, with cells instead of queries as the rows of a product: decoding has few queries.) No warp waits for
// another one but between the passes and at the end. The running maximum is an integer, so that `merge` takes the states of both kernels.
// Sums depend on where groups begin, so on the batch: this is no kernel for --deterministic.
// A weight of 0 must not meet a value that is not finite, of another query's token: see `hide_bad_values`.
// Recent rows come in a second pass, which reads f16 instead of the packed rows for the cells that have them.

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
    // Pairs of codes, a byte each in the low bytes of halves, as numbers; then with their scales.
    static __device__ __forceinline__ u32 number(u32 bytes) {
        return add_pairs(bytes | 0x64006400u, TYPE == 3u ? 0xe480e480u : 0xe400e400u);
    }
    static __device__ __forceinline__ u32 value(u32 bytes, u32 scale, u32 offset) {
        return TYPE == 3u ? mul_pairs(number(bytes), scale) : fma_pairs(number(bytes), scale, offset);
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
                a[i] = value(__byte_perm(word, 0u, 0x4140u), scale, offset);
                a[i + 2u] = value(__byte_perm(word, 0u, 0x4342u), scale, offset);
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
#pragma unroll
            for (u32 e = 0u; e < 4u; e++) {
                u32 bytes = __byte_perm(x, y, 0x0400u + e * 0x0101u) & 0x00ff00ffu;
                // Element e is row g or g + 8 of operand e / 2.
                a[e / 2u][e % 2u + 2u * i] = value(bytes, scale, offset);
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

// ---- groups of cells

// A cell of a group, and the query rows that read it, a bit each: from the pool, and from a row of `recent`.
struct Cell {
    u32 number;
    u32 rows;
    u32 recent;
    u32 recent_rows;
};

// Bits of the rows whose slots are `first .. end` from the job's first slot on.
__device__ __forceinline__ u32 rows_of_slots(const Job& job, int first, int end) {
    int low = max(first * (int)job.per_kv - (int)job.row0, 0);
    int high = min(end * (int)job.per_kv - (int)job.row0, (int)job.rows);
    if (low >= high) { return 0u; }
    return (high == 32 ? 0xffffffffu : (1u << high) - 1u) & ~((1u << low) - 1u);
}

// The rows that see a cell of an entry (see attend.cu).
__device__ __forceinline__ u32 rows_that_see(const Job& job, const Args& args, u32 entry, u32 offset) {
    const u32* plan = job.plan;
    int slot0 = (int)plan[entry + 4u] - (int)job.first_slot;
    u32 kind = plan[entry + 5u];
    int slots = (int)(kind & 0xffffffu);
    u32 a = plan[entry + 6u];
    switch (kind >> 24) {
    case 0u: return rows_of_slots(job, slot0, slot0 + slots);
    case 1u: {
        // a + slot <= offset < b + slot
        int first = max(0, (int)offset - (int)plan[entry + 7u] + 1);
        int end = min(slots, (int)offset - (int)a + 1);
        return first < end ? rows_of_slots(job, slot0 + first, slot0 + end) : 0u;
    }
    default: {
        u32 rows = 0u;
        for (int i = 0; i < slots; i++) {
            u32 bit = a + (u32)i * plan[entry + 3u] + offset;
            if (((plan[args.bits + bit / 32u] >> (bit % 32u)) & 1u) == 1u) {
                rows |= rows_of_slots(job, slot0 + i, slot0 + i + 1);
            }
        }
        return rows;
    }
    }
}

// A warp's place in the units of its work item. The same in all of its lanes.
struct Cursor {
    u32 unit;
    u32 end_unit;
    u32 group;
    u32 n_cells; // of the unit
    u32 entry;   // that has the group's first cell
    u32 end_entry;
    u32 first; // cell of the unit that is the entry's first
    u32 end;
    u32 cell; // its number
    u32 slot; // the item's first
    u32 kind; // its slots and their mask
    bool even; // every slot of the item sees every cell, and none has a recent row

    // The first word of an entry.
    __device__ __forceinline__ u32 word(const Args& args, u32 number) const { return args.entries + ENTRY * number; }

    __device__ __forceinline__ void open(const u32* plan, const Args& args) {
        n_cells = 0u;
        if (unit < end_unit) {
            begin(plan, args, plan[args.units + 4u * unit + 2u], plan[args.units + 4u * unit + 3u]);
        }
    }
    // Begins with the entries of a unit. No load waits for another one.
    __device__ __forceinline__ void begin(const u32* plan, const Args& args, u32 first_entry, u32 last_entry) {
        entry = first_entry;
        end_entry = last_entry;
        n_cells = plan[word(args, end_entry)];
        load(plan, args);
    }
    __device__ __forceinline__ void load(const u32* plan, const Args& args) {
        u32 at = word(args, entry);
        first = plan[at];
        cell = plan[at + 1u];
        slot = plan[at + 4u];
        kind = plan[at + 5u];
        even = kind >> 24 == 0u && (!RECENT || plan[at + 8u] == NONE);
        end = plan[at + ENTRY];
    }
    // Skips units without cells for this warp.
    __device__ __forceinline__ void settle(const u32* plan, const Args& args) {
        while (unit < end_unit && group * GROUP >= n_cells) {
            unit++;
            group = threadIdx.x / 32u;
            open(plan, args);
        }
    }
    __device__ __forceinline__ bool more() const { return unit < end_unit; }
    __device__ __forceinline__ void next(const u32* plan, const Args& args) {
        group += WARPS;
        settle(plan, args);
    }
    // Finds the entry of the group's first cell. Mostly it is this one or a near one.
    __device__ __forceinline__ void find_entry(const u32* plan, const Args& args) {
        u32 flat = group * GROUP;
        if (end > flat) { return; }
        u32 steps = 0u;
        while (end <= flat && steps < 8u) {
            entry++;
            steps++;
            end = plan[word(args, entry + 1u)];
        }
        if (end <= flat) {
            u32 high = end_entry;
            while (high - entry > 1u) {
                u32 middle = (entry + high) / 2u;
                if (plan[word(args, middle)] <= flat) {
                    entry = middle;
                } else {
                    high = middle;
                }
            }
        }
        load(plan, args);
    }
    // The rows that see the cells of an even entry.
    __device__ __forceinline__ u32 rows(const Job& job) const {
        int from = (int)slot - (int)job.first_slot;
        return rows_of_slots(job, from, from + (int)(kind & 0xffffffu));
    }
};

// Cell `lane % 16` of the cursor's group. Behind the last cell of a unit it is the last one, which no row sees again.
__device__ __forceinline__ Cell find_cell(const Job& job, const Args& args, const Cursor& at) {
    const u32* plan = job.plan;
    u32 flat = at.group * GROUP + threadIdx.x % GROUP;
    bool exists = flat < at.n_cells;
    flat = min(flat, at.n_cells - 1u);
    u32 low = at.entry; // no cell of the group lies before it
    u32 high = at.end_entry;
    while (high - low > 1u) {
        u32 middle = (low + high) / 2u;
        if (plan[args.entries + ENTRY * middle] <= flat) {
            low = middle;
        } else {
            high = middle;
        }
    }
    u32 entry = args.entries + ENTRY * low;
    u32 offset = flat - plan[entry];
    Cell cell;
    cell.number = plan[entry + 1u] + offset;
    cell.rows = exists ? rows_that_see(job, args, entry, plan[entry + 2u] + offset) : 0u;
    cell.recent = NONE;
    cell.recent_rows = 0u;
    if (RECENT) {
        u32 list = plan[entry + 8u];
        cell.recent = list == NONE ? NONE : plan[args.recents + list + 2u * offset];
        if (cell.recent != NONE && cell.rows != 0u) {
            u32 near = plan[args.recents + list + 2u * offset + 1u];
            for (u32 r = 0u; r < job.rows; r++) {
                u32 slot = job.first_slot + (job.row0 + r) / job.per_kv;
                cell.recent_rows |= plan[args.recents + slot] == near ? cell.rows & 1u << r : 0u;
            }
            cell.rows &= ~cell.recent_rows;
        }
    }
    return cell;
}

// Starts to copy the rows of a group; lane i has the number of row i % 16 in `number`.
template <class SIDE>
__device__ __forceinline__ void copy_rows(u32* tile, const u32* rows, u32 pitch, u32 number) {
    constexpr u32 WORDS = SIDE::WORDS;
    constexpr u32 AT_ONCE = WORDS % 4u == 0u ? 4u : WORDS % 2u == 0u ? 2u : 1u;
    constexpr u32 PER_ROW = WORDS / AT_ONCE;
    constexpr u32 ALL = GROUP * PER_ROW;
    u32 lane = threadIdx.x % 32u;
#pragma unroll 1
    for (u32 first = 0u; first < ALL; first += 32u) {
        u32 i = first + lane;
        u32 row = min(i / PER_ROW, GROUP - 1u);
        u32 from = __shfl_sync(WARP, number, row);
        if (i < ALL) {
            u32 word = i % PER_ROW * AT_ONCE;
            copy_words<AT_ONCE>(tile + row * SIDE::STRIDE + word, rows + (size_t)from * pitch + word);
        }
    }
}

// To 16 bytes.
__device__ __forceinline__ bool aligned(const u32* at) {
    return reinterpret_cast<size_t>(at) % 16u == 0u;
}

// The same for rows that lie one behind the other, from an aligned address on.
template <class SIDE>
__device__ __forceinline__ void copy_run(u32* tile, const u32* rows) {
    constexpr u32 ALL = GROUP * SIDE::WORDS / 4u;
    u32 lane = threadIdx.x % 32u;
#pragma unroll
    for (u32 first = 0u; first < ALL; first += 32u) {
        u32 i = first + lane;
        if (ALL % 32u != 0u && i >= ALL) { break; }
        u32 to = 4u * i;
        if (!SIDE::PACKED) {
            constexpr u32 PER_ROW = SIDE::WORDS / 4u;
            to = i / PER_ROW * SIDE::STRIDE + i % PER_ROW * 4u;
        }
        copy_words<4u>(tile + to, rows + 4u * i);
    }
}

// ---- the state of a warp: lane 4g + c has query rows 8t + 2c and the next one, and elements g and g + 8 of every 16

struct State {
    float out[TILES][STEPS][4];
    float top[TILES][2];
    float norm[TILES][2]; // of the cells of this lane
};

__device__ __forceinline__ float over_cells(float x, bool largest) {
#pragma unroll
    for (u32 lanes = 4u; lanes < 32u; lanes *= 2u) {
        float other = __shfl_xor_sync(WARP, x, lanes);
        x = largest ? fmaxf(x, other) : x + other;
    }
    return x;
}

// Values that are not finite become 0, because the rows that do not read them have weights of 0. The rows that do get NaN.
template <class VALUES>
__device__ __forceinline__ void hide_bad_values(u32* tile, const u32 (&seen)[2], float (&scores)[TILES][4], u32 g, u32 c) {
    u32 lane = 4u * g + c;
    u32* row = tile + lane / 2u * VALUES::STRIDE;
    bool bad = VALUES::is_bad(row, lane % 2u);
    if (!__any_sync(WARP, bad)) { return; }
    float mine = bad ? 1.0f : 0.0f;
    float both = fmaxf(mine, __shfl_xor_sync(WARP, mine, 1u));
    if (both > 0.0f) { VALUES::clear(row, lane % 2u); }
    float nan = __uint_as_float(0x7fc00000u);
#pragma unroll
    for (u32 i = 0u; i < 2u; i++) {
        bool bad_cell = __shfl_sync(WARP, both, 2u * (g + 8u * i)) > 0.0f;
#pragma unroll
        for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
            for (u32 j = 0u; j < 2u; j++) {
                if (bad_cell && (seen[i] >> (8u * t + 2u * c + j) & 1u) == 1u) { scores[t][2u * i + j] = nan; }
            }
        }
    }
    __syncwarp();
}

// Adds a group of cells to the state. `seen` has the rows that read cells g and g + 8.
template <class KEYS, class VALUES>
__device__ __forceinline__ void add_group(
    const Args& args, State& state, u32* tile, const uint4* queries, const float* scales, const u32 (&seen)[2], u32 live) {
    u32 lane = threadIdx.x % 32u;
    u32 g = lane / 4u;
    u32 c = lane % 4u;
    float scores[TILES][4];
    float rest[TILES][4];
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
        for (u32 i = 0u; i < 4u; i++) { scores[t][i] = rest[t][i] = 0.0f; }
    }
#pragma unroll
    for (u32 step = 0u; step < STEPS; step++) {
        u32 k[4];
        KEYS::keys(k, tile, step, g, c);
#pragma unroll
        for (u32 t = 0u; t < TILES; t++) {
            uint4 q = queries[(t * STEPS + step) * 32u + lane];
            u32 high[2] = {q.x, q.y};
            u32 low[2] = {q.z, q.w};
            KEYS::product(scores[t], k, high);
            KEYS::product(rest[t], k, low);
        }
    }
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
        float2 scale = *reinterpret_cast<const float2*>(scales + 8u * t + 2u * c);
#pragma unroll
        for (u32 i = 0u; i < 4u; i++) {
            float x = (scores[t][i] + rest[t][i]) * (i % 2u == 0u ? scale.x : scale.y);
            if (args.cap > 0.0f) { x = args.cap * LOG2_E * tanh_(x); }
            if (x < NO_SCORE) { x = NO_SCORE; }
            scores[t][i] = (seen[i / 2u] >> (8u * t + 2u * c + i % 2u) & 1u) == 1u ? x : HIDDEN;
        }
    }
    u32* values = tile + GROUP * KEYS::STRIDE;
    if (__any_sync(WARP, (seen[0] & seen[1] & live) != live)) {
        hide_bad_values<VALUES>(values, seen, scores, g, c);
    }
    u32 weights[TILES][2]; // B[cells, rows]
    u32 rests[TILES][2];
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
        float factors[2];
#pragma unroll
        for (u32 j = 0u; j < 2u; j++) {
            float peak = over_cells(fmaxf(scores[t][j], scores[t][2u + j]), true);
            float before = state.top[t][j];
            float top = peak > NO_SCORE ? fmaxf(before, rintf(peak)) : before;
            factors[j] = power(before - top);
            state.top[t][j] = top;
#pragma unroll
            for (u32 i = 0u; i < 2u; i++) {
                float x = scores[t][2u * i + j];
                scores[t][2u * i + j] = x == HIDDEN ? 0.0f : exp_2_near(x - top);
            }
            state.norm[t][j] = state.norm[t][j] * factors[j] + (scores[t][j] + scores[t][2u + j]);
        }
        if (__any_sync(WARP, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
            for (u32 m = 0u; m < STEPS; m++) {
#pragma unroll
                for (u32 i = 0u; i < 4u; i++) { state.out[t][m][i] *= factors[i % 2u]; }
            }
        }
#pragma unroll
        for (u32 i = 0u; i < 2u; i++) {
            u32 packed = VALUES::pack(scores[t][2u * i], scores[t][2u * i + 1u]);
            weights[t][i] = transpose_8x8(packed);
            if (VALUES::BF16) { // which has too few bits for one piece
                float2 left = VALUES::rest(scores[t][2u * i], scores[t][2u * i + 1u], packed);
                rests[t][i] = transpose_8x8(VALUES::pack(left.x, left.y));
            }
        }
    }
#pragma unroll
    for (u32 block = 0u; block < DIM / 32u; block++) {
        u32 v[2][4];
        VALUES::values(v, values, block, g, c);
#pragma unroll
        for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
            for (u32 m = 0u; m < 2u; m++) {
                VALUES::product(state.out[t][2u * block + m], v[m], weights[t]);
                if (VALUES::BF16) { VALUES::product(state.out[t][2u * block + m], v[m], rests[t]); }
            }
        }
    }
}

// Where the rows of a pass are.
struct Source {
    const u32* k;
    const u32* v;
    u32 k_pitch;
    u32 v_pitch;
    bool k_recent;
    bool v_recent;
};

// Goes through this warp's groups from `at` on. `begin` runs once the first groups are on their way. Returns the place of the first
// group with recent rows in `recent`, or leaves it.
template <class KEYS, class VALUES, bool SECOND, int DEPTH, class BEGIN>
__device__ __forceinline__ void go_through(
    const Job& job, const Args& args, const Source& from, Cursor at, u32* ring, u32 words, u32* seen_by, const uint4* queries,
    const float* scales, State& state, Cursor& recent, BEGIN begin) {
    u32 lane = threadIdx.x % 32u;
    u32 warp = threadIdx.x / 32u;
    u32 live = job.rows == 32u ? 0xffffffffu : (1u << job.rows) - 1u;
    u32 asked = 0u;
    auto fetch = [&]() {
        // The second pass takes only groups with recent rows.
        while (at.more()) {
            at.find_entry(job.plan, args);
            u32 run = at.cell + (at.group * GROUP - at.first);
            const u32* keys = from.k + (size_t)run * KEYS::WORDS;
            const u32* values = from.v + (size_t)run * VALUES::WORDS;
            bool is_run = !SECOND && at.even && at.group * GROUP + GROUP <= at.end && aligned(keys) && aligned(values);
            u32 stage = asked % (u32)DEPTH;
            u32* tile = ring + (stage * WARPS + warp) * words;
            u32* seen = seen_by + (stage * WARPS + warp) * GROUP;
            if (is_run) {
                copy_run<KEYS>(tile, keys);
                copy_run<VALUES>(tile + GROUP * KEYS::STRIDE, values);
                u32 rows = at.rows(job);
                if (lane < GROUP) { seen[lane] = rows; }
                at.next(job.plan, args);
                asked++;
                break;
            }
            Cell cell = find_cell(job, args, at);
            u32 rows = SECOND ? cell.recent_rows : cell.rows;
            bool any_recent = RECENT && __any_sync(WARP, cell.recent_rows != 0u);
            if (!SECOND && any_recent && !recent.more()) { recent = at; }
            at.next(job.plan, args);
            if (SECOND && !any_recent) { continue; }
            // A cell without a recent row is copied as the first one, and no row reads it.
            u32 near = cell.recent == NONE ? 0u : cell.recent;
            copy_rows<KEYS>(tile, from.k, from.k_pitch, SECOND && from.k_recent ? near : cell.number);
            copy_rows<VALUES>(tile + GROUP * KEYS::STRIDE, from.v, from.v_pitch, SECOND && from.v_recent ? near : cell.number);
            if (lane < GROUP) { seen[lane] = rows; }
            asked++;
            break;
        }
        end_group();
    };
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++) { fetch(); }
    begin();
    for (u32 done = 0u; done < asked; done++) {
        wait_groups<DEPTH - 2>();
        // What the other lanes have copied; and all of them have done with the group that the next one replaces.
        __syncwarp();
        fetch();
        u32 stage = done % (u32)DEPTH;
        const u32* rows = seen_by + (stage * WARPS + warp) * GROUP;
        u32 seen[2] = {rows[lane / 4u], rows[lane / 4u + 8u]};
        add_group<KEYS, VALUES>(
            args, state, ring + (stage * WARPS + warp) * words, queries, scales, seen, live);
    }
    wait_groups<0>();
}

// ---- queries and results

// The queries of the job's rows, scaled, and as keys are stored if `turned`; then their operands B[elements, rows] in two pieces, and
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
        uint4 both;
        both.x = KEYS::pack(x[0], x[1]);
        both.y = KEYS::pack(x[2], x[3]);
        float2 left = KEYS::rest(x[0], x[1], both.x);
        float2 right = KEYS::rest(x[2], x[3], both.y);
        both.z = KEYS::pack(left.x, left.y);
        both.w = KEYS::pack(right.x, right.y);
        queries[i] = both;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(128, 2) attend(
    const float* __restrict__ q,    // [tokens, heads, DIM]
    const u32* __restrict__ k_pool, // [heads of this part, cells, words]
    const u32* __restrict__ v_pool,
    const u32* __restrict__ plan,
    const float* __restrict__ sinks,
    float* __restrict__ out,        // [tokens, heads, DIM]
    float* __restrict__ states,     // [partial slots, heads, DIM + 2]
    const u32* __restrict__ order,  // not used: keys are not reordered
    const u32* __restrict__ recent, // [rows, recent_row]: keys of all heads, then values
    Args args) {
    __shared__ u32 seen_by[STAGES * WARPS * GROUP];
    __shared__ float2 scales_of_rows[ROWS / 2u];
    __shared__ float tops[WARPS * ROWS];
    __shared__ float norms[WARPS * ROWS];
    __shared__ u32 any_recent;
    DYNAMIC_SHARED(dynamic);
    float* scales = reinterpret_cast<float*>(scales_of_rows);
    uint4* queries = dynamic; // [TILES, STEPS, 32]
    u32* ring = reinterpret_cast<u32*>(dynamic + TILES * STEPS * 32u);
    // Queries on their way to operands lie where the last stage is filled later, and results where the first one was.
    float* rows = reinterpret_cast<float*>(ring + (STAGES - 1u) * WARPS * GROUP_WORDS);

    const u32* work = plan + args.work + 4u * blockIdx.x;
    Cursor first;
    first.unit = work[0];
    first.end_unit = work[1];
    u32 partial = work[2];
    const u32* unit = plan + args.units + 4u * first.unit;
    Job job;
    job.plan = plan;
    job.per_kv = args.heads / args.kv_heads;
    job.first_slot = unit[0];
    job.row0 = blockIdx.z * ROWS;
    u32 all_rows = unit[1] * job.per_kv;
    if (job.row0 >= all_rows) { return; } // of the whole block
    job.rows = min(ROWS, all_rows - job.row0);
    u32 kv_head = args.first_head + blockIdx.y;
    u32 first_query_head = kv_head * job.per_kv;
    // 64 bits: these products count words of a whole part.
    Source pool;
    pool.k = k_pool + (size_t)(args.k_head + blockIdx.y) * args.cells * K_WORDS;
    pool.v = v_pool + (size_t)(args.v_head + blockIdx.y) * args.cells * V_WORDS;
    pool.k_pitch = K_WORDS;
    pool.v_pitch = V_WORDS;
    pool.k_recent = pool.v_recent = false;
    if (threadIdx.x == 0u) { any_recent = 0u; }

    State state;
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
        for (u32 m = 0u; m < STEPS; m++) {
#pragma unroll
            for (u32 i = 0u; i < 4u; i++) { state.out[t][m][i] = 0.0f; }
        }
        state.top[t][0] = state.top[t][1] = NO_SCORE;
        state.norm[t][0] = state.norm[t][1] = 0.0f;
    }
    first.group = threadIdx.x / 32u;
    first.open(plan, args);
    first.settle(plan, args);
    Cursor near = first;
    near.unit = near.end_unit;
    go_through<Keys, Values, false, STAGES>(
        job, args, pool, first, ring, GROUP_WORDS, seen_by, queries, scales, state, near,
        [&]() { load_queries<Keys>(job, args, q, first_query_head, true, rows, queries, scales); });
    if (RECENT) {
        __syncthreads();
        if (near.more()) { any_recent = 1u; } // the same from every thread
        __syncthreads();
        if (any_recent != 0u) {
            Source source = pool;
            // Halves of a word for each row of every head (DIM is even).
            if (K_RECENT) { source.k = recent + kv_head * (DIM / 2u); }
            if (V_RECENT) { source.v = recent + ((K_RECENT ? args.kv_heads : 0u) + kv_head) * (DIM / 2u); }
            source.k_pitch = K_RECENT ? args.recent_row : K_WORDS;
            source.v_pitch = V_RECENT ? args.recent_row : V_WORDS;
            source.k_recent = K_RECENT;
            source.v_recent = V_RECENT;
            // Keys in `recent` are as they came; the queries pass through memory that no copy has yet.
            load_queries<RecentKeys>(job, args, q, first_query_head, !K_RECENT, reinterpret_cast<float*>(ring), queries, scales);
            go_through<RecentKeys, RecentValues, true, RECENT_STAGES>(
                job, args, source, near, ring, RECENT_GROUP_WORDS, seen_by, queries, scales, state, near, []() {});
        }
    }

    // The states of the warps, one after the other.
    u32 lane = threadIdx.x % 32u;
    u32 warp = threadIdx.x / 32u;
    u32 g = lane / 4u;
    u32 c = lane % 4u;
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
        for (u32 j = 0u; j < 2u; j++) {
            float norm = over_cells(state.norm[t][j], false);
            if (g == 0u) {
                tops[warp * ROWS + 8u * t + 2u * c + j] = state.top[t][j];
                norms[warp * ROWS + 8u * t + 2u * c + j] = norm;
            }
        }
    }
    __syncthreads(); // no copy to the ring is on its way, and no warp reads it
    float* results = reinterpret_cast<float*>(ring); // [WARPS, ROWS, OUT_STRIDE], and the sums in the first of them
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
        for (u32 j = 0u; j < 2u; j++) {
            float* to = results + (warp * ROWS + 8u * t + 2u * c + j) * OUT_STRIDE;
#pragma unroll
            for (u32 m = 0u; m < STEPS; m++) {
#pragma unroll
                for (u32 half = 0u; half < 2u; half++) {
                    to[Values::element(m, half, g)] = state.out[t][m][2u * half + j];
                }
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < job.rows * DIM; i += THREADS) {
        u32 r = i / DIM;
        float top = NO_SCORE;
#pragma unroll
        for (u32 w = 0u; w < WARPS; w++) { top = fmaxf(top, tops[w * ROWS + r]); }
        float sum = 0.0f;
        float norm = 0.0f;
#pragma unroll
        for (u32 w = 0u; w < WARPS; w++) {
            float factor = power(tops[w * ROWS + r] - top);
            sum += results[(w * ROWS + r) * OUT_STRIDE + i % DIM] * factor;
            norm += norms[w * ROWS + r] * factor;
        }
        u32 head = first_query_head + (job.row0 + r) % job.per_kv;
        if (partial == DIRECT) {
            results[r * OUT_STRIDE + i % DIM] = sum * final_factor(sinks, args.has_sinks, top, norm, head);
        } else {
            u32 slot = partial + (job.row0 + r) / job.per_kv;
            float* state_of_row = states + (size_t)(slot * args.heads + head) * (DIM + 2u);
            state_of_row[i % DIM] = sum;
            if (i % DIM == 0u) {
                state_of_row[DIM] = top;
                state_of_row[DIM + 1u] = norm;
            }
        }
    }
    if (partial != DIRECT) { return; }
    __syncthreads();
    turn_rows_back(results, OUT_STRIDE, ROWS, V_TURN, V_WIDE);
    for (u32 i = threadIdx.x; i < job.rows * DIM; i += THREADS) {
        u32 row = job.row0 + i / DIM;
        u32 token = plan[args.order + job.first_slot + row / job.per_kv];
        u32 head = first_query_head + row % job.per_kv;
        out[(size_t)(token * args.heads + head) * DIM + i % DIM] = results[i / DIM * OUT_STRIDE + i % DIM];
    }
}
