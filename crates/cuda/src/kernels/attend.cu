// Attention over exactly the cells that the plan's reads name. One block per work item, KV head and 8 query rows (the query
// heads of a KV head, for up to 8 queries).
//
//   for each unit of the work item (a split: 1,024 positions of the sequence), in order:
//     for each tile of CELLS of its cells, in order, while the next tile is on its way to shared memory:
//       s = q . k                                  q includes scale and log2 e; softcap: s = cap log2 e tanh(q . k)
//                                                  k and v as they are stored, see cells.cu; q is rotated like k
//       M' = max(M, round(max s));  w = 2^(s - M');  l = l 2^(M - M') + w;  o = o 2^(M - M') + w v
//     total = total 2^(Mt - M*) + unit 2^(M - M*)
//   out = o / l, with a sink: o 2^(M - P) / (l 2^(M - P) + 2^(sink - P)), rotated back if values are stored rotated; or the
//   state, for `merge` to add up
//
// (online softmax: Milakov and Gimelshein, 2018; splits: Dao et al., 2023, flash-decoding.) The running maximum is an
// integer, so every rescaling is exact, and each sum runs over the cells in their order. A row's result therefore does
// not depend on where tiles end, on the other rows, or on whether a work item has one unit or all of them.
// RECENT: a packed row of a token that is near to the query's (in its recent group) is read in f16 instead.
// A weight of 0 is skipped instead of multiplied: the cell may hold NaN of another query's token.
//
// For the scores, THREADS / CELLS neighbouring lanes share a cell and add up as a binary tree. For the weights a warp has a
// row and a lane a cell. For the values a thread has an element, and goes through the cells.

#define THREADS 128u
#define LANES (THREADS / CELLS) // of a cell
#define PER_THREAD ((DIM + THREADS - 1u) / THREADS)
#define NO_SCORE -1e30f
#define HIDDEN -3e38f
#define DIRECT 0xffffffffu

#define NONE 0xffffffffu
#define RECENT (K_RECENT || V_RECENT)

// Words of a row in a tile. Lanes of a cell read neighbouring words, 16 bytes each of floats and 4 of codes: rows of K lie so
// many banks apart that the lanes of several cells read different banks.
#define K_LANE_WORDS (K_DTYPE < 3 ? 16u : 4u)
#define K_STRIDE ((K_WORDS + 31u - K_LANE_WORDS) / 32u * 32u + K_LANE_WORDS)
#define V_STRIDE ((V_WORDS + 3u) / 4u * 4u)
#define Q_STRIDE ((DIM + 7u) / 8u * 8u)
#define TILE_WORDS (CELLS * (K_STRIDE + V_STRIDE))

typedef Rows<K_DTYPE, K_GROUP, K_WIDE, K_CODES> Keys;
typedef Rows<V_DTYPE, V_GROUP, V_WIDE, V_CODES> Values;

struct Args {
    u32 heads; // query heads
    u32 kv_heads;
    u32 first_head; // KV head of the first block in y
    u32 k_head;     // and its numbers in these parts of the pools
    u32 v_head;
    u32 cells; // of the pool
    u32 order; // first words of the plan's sections
    u32 work;
    u32 units;
    u32 entries;
    u32 bits;
    float scale; // with log2 e, or divided by the cap
    float cap;   // 0: none
    u32 has_sinks;
    u32 recents;    // first word of [query slots] recent groups, then of the lists that entries refer to
    u32 recent_row; // words of a row of `recent`
};

// What a block works on.
struct Job {
    const u32* k; // of the block's KV head: [cells, K_WORDS]
    const u32* v;
    const u32* plan;
    u32 first_slot;
    u32 row0; // of the tile's rows
    u32 rows;
    u32 per_kv;
    const u32* recent_keys; // of the block's KV head: [rows of recent], recent_row words apart
    const u32* recent_values;
};

// Shared memory of a block.
struct Shared {
    float* queries; // [ROWS, Q_STRIDE], zero behind DIM, as keys are stored; at the end the outputs
    float* plain;   // the same as they came, where recent keys need them
    float* weights; // [CELLS, ROWS]: scores, then weights
    u32* tiles;     // [STAGES]: K [CELLS, K_STRIDE], then V [CELLS, V_STRIDE]
    u32* cell_of;   // [2, CELLS], by parity of the tile: offset in its entry
    u32* entry_of;  // [2, CELLS]: first word of its entry in the plan; DIRECT if there is no such cell
    float* maxima;  // [ROWS] each
    float* norms;
    float* factors;
    float* total_maxima;
    float* total_norms;
    u32* recent_of;   // [2, CELLS]: the cell's row of `recent`, or NONE
    u32* recent_rows; // [CELLS]: which query rows read it, a bit each
    u32* special;     // not 0: some weight of this tile is 0, or some value is recent
};

template <u32 WORDS, u32 STRIDE>
__device__ __forceinline__ void load_rows(
    const u32* pool, u32* tile, const u32* plan, const u32* cell_of, const u32* entry_of) {
    constexpr u32 AT_ONCE = WORDS % 4u == 0u ? 4u : WORDS % 2u == 0u ? 2u : 1u;
    constexpr u32 PER_ROW = WORDS / AT_ONCE;
    for (u32 i = threadIdx.x; i < CELLS * PER_ROW; i += THREADS) {
        u32 c = i / PER_ROW;
        u32 word = i % PER_ROW * AT_ONCE;
        if (entry_of[c] == DIRECT) { break; } // as in every later cell
        u32 cell = plan[entry_of[c] + 1u] + cell_of[c];
        copy_words<AT_ONCE>(tile + c * STRIDE + word, pool + cell * WORDS + word);
    }
}

// ---- the steps of a tile

// Finds the cells of tile t of a unit.
__device__ __forceinline__ void find_cells(
    const u32* plan, const Args& args, u32 first_entry, u32 end_entry, u32 t, u32 n_cells, const Shared& s) {
    if (threadIdx.x >= CELLS) { return; }
    u32 flat = t * CELLS + threadIdx.x;
    u32 low = first_entry;
    u32 high = end_entry;
    while (high - low > 1u) {
        u32 middle = (low + high) / 2u;
        if (plan[args.entries + ENTRY * middle] <= flat) {
            low = middle;
        } else {
            high = middle;
        }
    }
    u32 entry = args.entries + ENTRY * low;
    u32 cell = flat - plan[entry];
    u32 at = t % 2u * CELLS + threadIdx.x;
    s.entry_of[at] = flat < n_cells ? entry : DIRECT;
    s.cell_of[at] = cell;
    if (RECENT) {
        u32 list = flat < n_cells ? plan[entry + 8u] : NONE;
        s.recent_of[at] = list == NONE ? NONE : plan[args.recents + list + 2u * cell];
    }
}

// Entry: (cells before it in its unit, first cell, its offset in the item's run, the run's length,
//         first slot, slots | mask << 24, a, b, list of recent rows or NONE); masks: 0 all, 1 band a + slot .. b + slot, 2 bits from a
__device__ __forceinline__ bool sees(const u32* plan, const Args& args, u32 entry, u32 offset, u32 slot) {
    u32 i = slot - plan[entry + 4u];
    u32 kind = plan[entry + 5u];
    if (i >= (kind & 0xffffffu)) { return false; }
    u32 a = plan[entry + 6u];
    switch (kind >> 24) {
    case 0u: return true;
    case 1u: {
        int o = (int)offset - (int)i;
        return o >= (int)a && o < (int)plan[entry + 7u];
    }
    default: {
        u32 bit = a + i * plan[entry + 3u] + offset;
        return ((plan[args.bits + bit / 32u] >> (bit % 32u)) & 1u) == 1u;
    }
    }
}

// acc[r] += q[r] . k over N elements, in order.
template <u32 R, u32 N>
__device__ __forceinline__ void add_products(float* acc, const float* queries, const float* k) {
#pragma unroll
    for (u32 r = 0u; r < R; r++) {
        const float* q = queries + r * Q_STRIDE;
#pragma unroll
        for (u32 i = 0u; i < N; i++) { acc[r] = fmaf(q[i], k[i], acc[r]); }
    }
}

template <u32 R>
__device__ __forceinline__ void add_quad(float* acc, const float* queries, float4 k) {
    float x[4] = {k.x, k.y, k.z, k.w};
    add_products<R, 4u>(acc, queries, x);
}

// This lane's part of the scores of its cell: every LANES-th quad. Of f16 and bf16 every LANES-th pair of quads, if rows are
// whole pairs, because 16 bytes are read at a time.
template <u32 R>
__device__ __forceinline__ void partial_scores(float* acc, const float* queries, const u32* row, u32 lane) {
    constexpr bool PAIRS = (K_DTYPE == 1 || K_DTYPE == 2) && DIM % 8u == 0u;
    if (PAIRS) {
#pragma unroll
        for (u32 pair = lane; pair < DIM / 8u; pair += LANES) {
            uint4 words = reinterpret_cast<const uint4*>(row)[pair];
            u32 both[4] = {words.x, words.y, words.z, words.w};
            float x[8];
#pragma unroll
            for (u32 i = 0u; i < 4u; i++) {
                x[2u * i] = K_DTYPE == 1 ? half_(both[i] & 0xffffu) : __uint_as_float(both[i] << 16);
                x[2u * i + 1u] = K_DTYPE == 1 ? half_(both[i] >> 16) : __uint_as_float(both[i] & 0xffff0000u);
            }
            add_products<R, 8u>(acc, queries + 8u * pair, x);
        }
        return;
    }
#pragma unroll
    for (u32 c = lane; c < DIM / 4u; c += LANES) {
        add_quad<R>(acc, queries + 4u * c, Keys::quad(row, c));
    }
    if (DIM % 4u != 0u && lane == DIM / 4u % LANES) {
        for (u32 i = DIM / 4u * 4u; i < DIM; i++) {
            float x = Keys::element(row, i);
            add_products<R, 1u>(acc, queries + i, &x);
        }
    }
}

// Element i of a row of `recent`.
__device__ __forceinline__ float recent_element(const u32* row, u32 i) {
    return half_(reinterpret_cast<const unsigned short*>(row)[i]);
}

// The same of a row of `recent`.
template <u32 R>
__device__ __forceinline__ void recent_scores(float* acc, const float* queries, const u32* row, u32 lane) {
    for (u32 i = lane; i < DIM; i += LANES) {
        float x = recent_element(row, i);
        add_products<R, 1u>(acc, queries + i, &x);
    }
}

// Bits of the rows that read the recent row of a cell.
template <u32 R>
__device__ __forceinline__ u32 recent_bits(const Job& job, const Args& args, u32 entry, u32 cell) {
    u32 near = job.plan[args.recents + job.plan[entry + 8u] + 2u * cell + 1u];
    u32 bits = 0u;
    for (u32 r = 0u; r < R; r++) {
        u32 slot = job.first_slot + (job.row0 + min(r, job.rows - 1u)) / job.per_kv;
        bits |= job.plan[args.recents + slot] == near ? 1u << r : 0u;
    }
    return bits;
}

template <u32 R>
__device__ __forceinline__ void score(
    const Job& job, const Args& args, const Shared& s, const u32* tile, u32 t) {
    u32 c = threadIdx.x / LANES;
    u32 lane = threadIdx.x % LANES;
    u32 entry = s.entry_of[t % 2u * CELLS + c];
    u32 cell = s.cell_of[t % 2u * CELLS + c];
    float acc[R];
#pragma unroll
    for (u32 r = 0u; r < R; r++) { acc[r] = 0.0f; }
    if (RECENT) {
        u32 row = s.recent_of[t % 2u * CELLS + c];
        u32 recents = entry != DIRECT && row != NONE ? recent_bits<R>(job, args, entry, cell) : 0u;
        if (lane == 0u) {
            s.recent_rows[c] = recents;
            if (V_RECENT && recents != 0u) { *s.special = 1u; }
        }
        if (K_RECENT && recents != 0u) {
            float near[R];
#pragma unroll
            for (u32 r = 0u; r < R; r++) { near[r] = 0.0f; }
            recent_scores<R>(near, s.plain, job.recent_keys + row * args.recent_row, lane);
            if (recents != (1u << R) - 1u) { partial_scores<R>(acc, s.queries, tile + c * K_STRIDE, lane); }
#pragma unroll
            for (u32 r = 0u; r < R; r++) { acc[r] = (recents >> r & 1u) == 1u ? near[r] : acc[r]; }
        } else if (entry != DIRECT) {
            partial_scores<R>(acc, s.queries, tile + c * K_STRIDE, lane);
        }
    } else if (entry != DIRECT) {
        partial_scores<R>(acc, s.queries, tile + c * K_STRIDE, lane);
    }
    add_up<R, LANES / 2u>(acc, lane);
    constexpr u32 SHARING = LANES > R ? LANES / R : 1u; // lanes with the same row
    constexpr u32 OWN = R > LANES ? R / LANES : 1u;     // rows of a lane
    if (lane % SHARING != 0u) { return; }
#pragma unroll
    for (u32 i = 0u; i < OWN; i++) {
        u32 r = lane / SHARING * OWN + i;
        float x = acc[i];
        if (args.cap > 0.0f) { x = args.cap * LOG2_E * tanh_(x); }
        if (x < NO_SCORE) { x = NO_SCORE; }
        bool seen = entry != DIRECT && r < job.rows;
        if (seen) {
            u32 slot = job.first_slot + (job.row0 + r) / job.per_kv;
            seen = sees(job.plan, args, entry, job.plan[entry + 2u] + cell, slot);
        }
        s.weights[c * ROWS + r] = seen ? x : HIDDEN;
    }
}

// New maxima, and weights instead of scores.
template <u32 R>
__device__ __forceinline__ void weigh(const Job& job, const Shared& s, u32 n_here) {
    u32 c = threadIdx.x % 32u;
    for (u32 r = threadIdx.x / 32u; r < R; r += THREADS / 32u) {
        float x = c < CELLS ? s.weights[c * ROWS + r] : HIDDEN;
        bool seen = __any_sync(WARP, x != HIDDEN);
        float peak = x;
        for (u32 half = 16u; half > 0u; half /= 2u) { peak = fmaxf(peak, __shfl_xor_sync(WARP, peak, half)); }
        float before = s.maxima[r];
        float top = before;
        // All scores are NaN or as small as can be, but there are some.
        if (seen && !(peak > NO_SCORE) && top == NO_SCORE) { top = 0.0f; }
        if (peak > NO_SCORE) { top = fmaxf(top, rintf(peak)); }
        float weight = x == HIDDEN ? 0.0f : exp_2_less(x, top);
        bool zero = __any_sync(WARP, c < n_here && r < job.rows && __float_as_uint(weight) == 0u);
        if (c < CELLS) { s.weights[c * ROWS + r] = weight; }
        if (c == 0u) {
            s.factors[r] = power(before - top);
            s.maxima[r] = top;
            if (zero) { *s.special = 1u; }
        }
    }
}

// The norms, and the sums of weighted values.
template <u32 R>
__device__ __forceinline__ void add_values(
    const Job& job, const Args& args, const Shared& s, const u32* tile, u32 t, u32 n_here, float* sums) {
    if (threadIdx.x < R) {
        float norm = s.norms[threadIdx.x] * s.factors[threadIdx.x];
        for (u32 c = 0u; c < n_here; c++) { norm += s.weights[c * ROWS + threadIdx.x]; }
        s.norms[threadIdx.x] = norm;
    }
    bool special = *s.special != 0u;
#pragma unroll
    for (u32 j = 0u; j < PER_THREAD; j++) {
        u32 e = threadIdx.x + THREADS * j;
        if (e >= DIM) { break; }
        float* sum = sums + R * j;
#pragma unroll
        for (u32 r = 0u; r < R; r++) { sum[r] *= s.factors[r]; }
        const u32* rows = tile + CELLS * K_STRIDE;
        if (!special) {
#pragma unroll 4
            for (u32 c = 0u; c < n_here; c++) {
                float x = Values::element(rows + c * V_STRIDE, e);
#pragma unroll
                for (u32 r = 0u; r < R; r++) { sum[r] = fmaf(s.weights[c * ROWS + r], x, sum[r]); }
            }
        } else {
            for (u32 c = 0u; c < n_here; c++) {
                float x = Values::element(rows + c * V_STRIDE, e);
                u32 recents = V_RECENT ? s.recent_rows[c] : 0u;
                float near = x;
                if (recents != 0u) {
                    near = recent_element(job.recent_values + s.recent_of[t % 2u * CELLS + c] * args.recent_row, e);
                }
#pragma unroll
                for (u32 r = 0u; r < R; r++) {
                    float weight = s.weights[c * ROWS + r];
                    float value = (recents >> r & 1u) == 1u ? near : x;
                    sum[r] = __float_as_uint(weight) == 0u ? sum[r] : fmaf(weight, value, sum[r]);
                }
            }
        }
    }
}

// ---- units, and the result

template <u32 R>
__device__ __forceinline__ void add_unit(const Shared& s, float* totals, const float* sums) {
#pragma unroll
    for (u32 r = 0u; r < R; r++) {
        float top = fmaxf(s.total_maxima[r], s.maxima[r]);
        float a = power(s.total_maxima[r] - top);
        float b = power(s.maxima[r] - top);
        bool first = s.total_maxima[r] == NO_SCORE;
        bool none = s.maxima[r] == NO_SCORE;
#pragma unroll
        for (u32 j = 0u; j < PER_THREAD; j++) {
            u32 i = R * j + r;
            float sum = first ? sums[i] : totals[i] * a + sums[i] * b;
            totals[i] = none ? totals[i] : sum;
        }
    }
    __syncthreads();
    u32 r = threadIdx.x;
    if (r < R && s.maxima[r] != NO_SCORE) {
        float top = fmaxf(s.total_maxima[r], s.maxima[r]);
        float sum = s.total_norms[r] * power(s.total_maxima[r] - top) + s.norms[r] * power(s.maxima[r] - top);
        s.total_norms[r] = s.total_maxima[r] == NO_SCORE ? s.norms[r] : sum;
        s.total_maxima[r] = top;
    }
    __syncthreads();
}

template <u32 R>
__device__ __forceinline__ void load_tile(const Job& job, const Shared& s, u32 t) {
    u32* tile = s.tiles + t % STAGES * TILE_WORDS;
    const u32* cells = s.cell_of + t % 2u * CELLS;
    const u32* entries = s.entry_of + t % 2u * CELLS;
    load_rows<K_WORDS, K_STRIDE>(job.k, tile, job.plan, cells, entries);
    load_rows<V_WORDS, V_STRIDE>(job.v, tile + CELLS * K_STRIDE, job.plan, cells, entries);
    end_group();
}

// Goes through the cells of a unit. `sums` and the unit's maxima and norms are its state.
template <u32 R>
__device__ __forceinline__ void run_unit(const Job& job, const Args& args, const Shared& s, u32 unit, float* sums) {
    u32 first_entry = job.plan[args.units + 4u * unit + 2u];
    u32 end_entry = job.plan[args.units + 4u * unit + 3u];
    // Behind a unit's entries is one that only says how many cells it has.
    u32 n_cells = job.plan[args.entries + ENTRY * end_entry];
    u32 n_tiles = (n_cells + CELLS - 1u) / CELLS;
    auto find = [&](u32 t) { find_cells(job.plan, args, first_entry, end_entry, t, n_cells, s); };
#pragma unroll
    for (u32 i = 0u; i < R * PER_THREAD; i++) { sums[i] = 0.0f; }
    if (threadIdx.x < ROWS) {
        s.maxima[threadIdx.x] = NO_SCORE;
        s.norms[threadIdx.x] = 0.0f;
    }
    find(0u);
    __syncthreads();
    load_tile<R>(job, s, 0u);
    for (u32 t = 0u; t < n_tiles; t++) {
        bool more = t + 1u < n_tiles;
        if (more) { find(t + 1u); }
        if (threadIdx.x == 0u) { *s.special = 0u; }
        // With two stages the next tile replaces the last one, which nothing reads behind this barrier.
        __syncthreads();
        if (STAGES == 2 && more) {
            load_tile<R>(job, s, t + 1u);
            wait_groups<1>();
        } else {
            wait_groups<0>();
        }
        __syncthreads();
        const u32* tile = s.tiles + t % STAGES * TILE_WORDS;
        u32 n_here = min(CELLS, n_cells - t * CELLS);
        score<R>(job, args, s, tile, t);
        __syncthreads();
        weigh<R>(job, s, n_here);
        __syncthreads();
        add_values<R>(job, args, s, tile, t, n_here, sums);
        __syncthreads();
        if (STAGES == 1 && more) { load_tile<R>(job, s, t + 1u); }
    }
}

// The queries of the tile's rows, scaled, and as keys are stored.
template <u32 R>
__device__ __forceinline__ void load_queries(
    const Job& job, const Args& args, const Shared& s, const float* q, const u32* order, u32 first_query_head) {
    const u32* channels = order + (K_WIDE > 0u ? (args.first_head + blockIdx.y) * DIM : 0u);
    for (u32 i = threadIdx.x; i < R * Q_STRIDE; i += THREADS) {
        u32 row = job.row0 + min(i / Q_STRIDE, job.rows - 1u);
        u32 token = job.plan[args.order + job.first_slot + row / job.per_kv];
        u32 e = i % Q_STRIDE;
        const float* from = q + (token * args.heads + first_query_head + row % job.per_kv) * DIM;
        if (PLAIN) { s.plain[i] = e < DIM ? from[e] * args.scale : 0.0f; }
        u32 channel = K_WIDE > 0u && e < DIM ? channels[e] : e;
        s.queries[i] = e < DIM ? from[channel] * args.scale : 0.0f;
    }
    __syncthreads();
    turn_rows(s.queries, Q_STRIDE, R, K_TURN, K_WIDE);
}

// Writes the results, rotated back.
template <u32 R>
__device__ __forceinline__ void write_out(
    const Job& job, const Args& args, const Shared& s, const float* sinks, u32 first_query_head, const float* totals,
    float* out) {
#pragma unroll
    for (u32 r = 0u; r < R; r++) {
        u32 head = first_query_head + (job.row0 + r) % job.per_kv;
        float factor = final_factor(sinks, args.has_sinks, s.total_maxima[r], s.total_norms[r], head);
#pragma unroll
        for (u32 j = 0u; j < PER_THREAD; j++) {
            u32 e = threadIdx.x + THREADS * j;
            if (e < DIM) { s.queries[r * Q_STRIDE + e] = totals[R * j + r] * factor; }
        }
    }
    __syncthreads();
    turn_rows_back(s.queries, Q_STRIDE, R, V_TURN, V_WIDE);
    for (u32 i = threadIdx.x; i < job.rows * DIM; i += THREADS) {
        u32 row = job.row0 + i / DIM;
        u32 token = job.plan[args.order + job.first_slot + row / job.per_kv];
        float* to = out + (token * args.heads + first_query_head + row % job.per_kv) * DIM;
        to[i % DIM] = s.queries[i / DIM * Q_STRIDE + i % DIM];
    }
}

template <u32 R>
__device__ __forceinline__ void run(
    const Job& job, const Args& args, const Shared& s, const float* q, const u32* order, const float* sinks, float* out,
    float* states) {
    const u32* plan = job.plan;
    u32 work = args.work + 4u * blockIdx.x;
    u32 end_unit = plan[work + 1u];
    u32 partial = plan[work + 2u];
    u32 first_query_head = (args.first_head + blockIdx.y) * job.per_kv;
    load_queries<R>(job, args, s, q, order, first_query_head);
    if (threadIdx.x < ROWS) {
        s.total_maxima[threadIdx.x] = NO_SCORE;
        s.total_norms[threadIdx.x] = 0.0f;
    }
    float totals[R * PER_THREAD];
    float sums[R * PER_THREAD];
#pragma unroll
    for (u32 i = 0u; i < R * PER_THREAD; i++) { totals[i] = 0.0f; }
    for (u32 unit = plan[work]; unit < end_unit; unit++) {
        run_unit<R>(job, args, s, unit, sums);
        add_unit<R>(s, totals, sums);
    }
    if (partial == DIRECT) {
        write_out<R>(job, args, s, sinks, first_query_head, totals, out);
        return;
    }
#pragma unroll
    for (u32 r = 0u; r < R; r++) {
        if (r < job.rows) {
            u32 row = job.row0 + r;
            u32 head = first_query_head + row % job.per_kv;
            float* state = states + ((partial + row / job.per_kv) * args.heads + head) * (DIM + 2u);
#pragma unroll
            for (u32 j = 0u; j < PER_THREAD; j++) {
                u32 e = threadIdx.x + THREADS * j;
                if (e < DIM) { state[e] = totals[R * j + r]; }
            }
            if (threadIdx.x == 0u) {
                state[DIM] = s.total_maxima[r];
                state[DIM + 1u] = s.total_norms[r];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) attend(
    const float* __restrict__ q,    // [tokens, heads, DIM]
    const u32* __restrict__ k_pool, // [heads of this part, cells, words]
    const u32* __restrict__ v_pool,
    const u32* __restrict__ plan,
    const float* __restrict__ sinks,
    float* __restrict__ out,          // [tokens, heads, DIM]
    float* __restrict__ states,       // [partial slots, heads, DIM + 2]
    const u32* __restrict__ order,    // [KV heads, DIM] channels of keys, if K_WIDE > 0
    const u32* __restrict__ recent,   // [rows, recent_row]: keys of all heads, then values
    Args args) {
    __shared__ float weights[CELLS * ROWS];
    __shared__ u32 of_cells[7u * CELLS];
    __shared__ float of_rows[5u * ROWS];
    __shared__ u32 special;
    DYNAMIC_SHARED(dynamic);
    Shared s;
    s.tiles = reinterpret_cast<u32*>(dynamic);
    s.queries = reinterpret_cast<float*>(s.tiles + STAGES * TILE_WORDS);
    s.plain = PLAIN ? s.queries + ROWS * Q_STRIDE : s.queries;
    s.weights = weights;
    s.cell_of = of_cells;
    s.entry_of = of_cells + 2u * CELLS;
    s.recent_of = of_cells + 4u * CELLS;
    s.recent_rows = of_cells + 6u * CELLS;
    s.maxima = of_rows;
    s.norms = of_rows + ROWS;
    s.factors = of_rows + 2u * ROWS;
    s.total_maxima = of_rows + 3u * ROWS;
    s.total_norms = of_rows + 4u * ROWS;
    s.special = &special;

    const u32* unit = plan + args.units + 4u * plan[args.work + 4u * blockIdx.x];
    Job job;
    job.per_kv = args.heads / args.kv_heads;
    job.first_slot = unit[0];
    job.row0 = blockIdx.z * ROWS;
    u32 all_rows = unit[1] * job.per_kv;
    if (job.row0 >= all_rows) { return; } // of the whole block
    job.rows = min(ROWS, all_rows - job.row0);
    u32 kv_head = args.first_head + blockIdx.y;
    // 64 bits: these products count words of a whole part.
    job.k = k_pool + (unsigned long long)(args.k_head + blockIdx.y) * args.cells * K_WORDS;
    job.v = v_pool + (unsigned long long)(args.v_head + blockIdx.y) * args.cells * V_WORDS;
    job.plan = plan;
    // Not bound otherwise.
    u32 recent_words = RECENT ? (DIM + 1u) / 2u : 0u;
    job.recent_keys = recent + kv_head * recent_words;
    job.recent_values = recent + ((K_RECENT ? args.kv_heads : 0u) + kv_head) * recent_words;
    if (job.rows <= 4u) {
        run<4u>(job, args, s, q, order, sinks, out, states);
    } else {
        run<8u>(job, args, s, q, order, sinks, out, states);
    }
}
