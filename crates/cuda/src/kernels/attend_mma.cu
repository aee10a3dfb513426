// Attention on tensor cores, for rows in f16, bf16, q8 and q4 of whole blocks of 32 elements. One block per work item, KV head and
// ROWS query rows, as `attend`; it reads the same tables (attend.cu has their words).
//
//   warp w takes the cells of group w, w + 4, ... of each unit, 16 at a time; the next groups are on their way to shared memory:
//     S = K Q^T       16 cells x 8 rows per product; over floats q is in two pieces, so that only k is rounded
//     M' = max(M, round(max S));  W = 2^(S - M');  l = l 2^(M - M') + sum W;  O = O 2^(M - M') + V^T W
//   at the end the warps' states are added up in the order of the warps
//
// (Dao, 2023, FlashAttention-2, with cells instead of queries as the rows of a product: decoding has few queries.) No warp waits for
// another one but between the passes and at the end. The running maximum is an integer, so that `merge` takes the states of both kernels,
// and may be up to LAG below the largest score: weights are then up to 2^LAG, far below what f16 holds. So it rarely changes.
// Sums depend on where groups begin, so on the batch: this is no kernel for --deterministic.
// A weight of 0 must not meet a value that is not finite, of another query's token: see `hide_bad_values`.
// Recent rows come in a second pass, which reads f16 instead of the packed rows for the cells that have them.

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

#define LAG 8.0f

// Takes scores into the running maxima. `peaks`: the largest score of this lane's cells for each of its rows.
__device__ __forceinline__ void raise(State& state, const float (&peaks)[TILES][2]) {
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
        float factors[2];
#pragma unroll
        for (u32 j = 0u; j < 2u; j++) {
            float peak = over_cells(peaks[t][j], true);
            float before = state.top[t][j];
            float top = peak > NO_SCORE ? fmaxf(before, rintf(peak)) : before;
            factors[j] = power(before - top);
            state.top[t][j] = top;
            state.norm[t][j] *= factors[j];
        }
#pragma unroll
        for (u32 m = 0u; m < STEPS; m++) {
#pragma unroll
            for (u32 i = 0u; i < 4u; i++) { state.out[t][m][i] *= factors[i % 2u]; }
        }
    }
}

// Adds a group of cells to the state. `seen` has the rows that read cells g and g + 8.
template <class KEYS, class VALUES>
__device__ __forceinline__ void add_group(
    const Args& args, State& state, u32* tile, const uint4* queries, const float* scales, const u32 (&seen)[2], u32 live) {
    // A product waits for the one before with the same sums. So a single tile has two sets of them.
    constexpr bool TWO_SUMS = TWO_PIECES || TILES == 1u;
    u32 lane = threadIdx.x % 32u;
    u32 g = lane / 4u;
    u32 c = lane % 4u;
    float scores[TILES][4];
    float others[TILES][4];
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
        for (u32 i = 0u; i < 4u; i++) { scores[t][i] = others[t][i] = 0.0f; }
    }
#pragma unroll
    for (u32 step = 0u; step < STEPS; step++) {
        u32 k[4];
        KEYS::keys(k, tile, step, g, c);
#pragma unroll
        for (u32 t = 0u; t < TILES; t++) {
            u32 at = (t * STEPS + step) * 32u + lane;
            if (TWO_PIECES) {
                uint4 q = queries[at];
                u32 high[2] = {q.x, q.y};
                u32 low[2] = {q.z, q.w};
                KEYS::product(scores[t], k, high);
                KEYS::product(others[t], k, low);
            } else {
                uint2 q = reinterpret_cast<const uint2*>(queries)[at];
                u32 only[2] = {q.x, q.y};
                KEYS::product(TWO_SUMS && step % 2u == 1u ? others[t] : scores[t], k, only);
            }
        }
    }
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
        float2 scale = *reinterpret_cast<const float2*>(scales + 8u * t + 2u * c);
#pragma unroll
        for (u32 i = 0u; i < 4u; i++) {
            float sum = TWO_SUMS ? scores[t][i] + others[t][i] : scores[t][i];
            scores[t][i] = sum * (i % 2u == 0u ? scale.x : scale.y);
        }
    }
    if (args.cap > 0.0f) {
#pragma unroll
        for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
            for (u32 i = 0u; i < 4u; i++) { scores[t][i] = args.cap * LOG2_E * tanh_(scores[t][i]); }
        }
    }
    u32 mine[2] = {seen[0] >> (2u * c), seen[1] >> (2u * c)};
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
        for (u32 i = 0u; i < 4u; i++) {
            float x = at_least(scores[t][i], NO_SCORE);
            scores[t][i] = (mine[i / 2u] & 1u << (8u * t + i % 2u)) != 0u ? x : HIDDEN;
        }
    }
    u32* values = tile + GROUP * KEYS::STRIDE;
    if (__any_sync(WARP, (seen[0] & seen[1] & live) != live)) {
        hide_bad_values<VALUES>(values, seen, scores, g, c);
    }
    // Mostly no score is far above its row's maximum. Then nothing is exchanged, and no sum is scaled.
    float peaks[TILES][2];
    bool higher = false;
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
        for (u32 j = 0u; j < 2u; j++) {
            peaks[t][j] = fmaxf(scores[t][j], scores[t][2u + j]);
            higher = higher || peaks[t][j] > state.top[t][j] + LAG;
        }
    }
    if (__any_sync(WARP, higher)) { raise(state, peaks); }
    u32 weights[TILES][2]; // B[cells, rows]
    u32 rests[TILES][2];
#pragma unroll
    for (u32 t = 0u; t < TILES; t++) {
#pragma unroll
        for (u32 i = 0u; i < 4u; i++) {
            // What is hidden becomes 0.
            scores[t][i] = exp_2_near(scores[t][i] - state.top[t][i % 2u]);
        }
#pragma unroll
        for (u32 j = 0u; j < 2u; j++) { state.norm[t][j] += scores[t][j] + scores[t][2u + j]; }
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

extern "C" __global__ void __launch_bounds__(128, BLOCKS_PER_SM) attend(
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
    uint4* queries = dynamic; // [TILES, STEPS, 32], of half the size if there is one piece
    u32* ring = reinterpret_cast<u32*>(dynamic + TILES * STEPS * 32u / (TWO_PIECES ? 1u : 2u));
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
    // No kernel writes the plan. The kernel before may write cells; what it has written by then is what comes from the L2 cache.
    prefetch_runs<Keys>(first, pool.k);
    prefetch_runs<Values>(first, pool.v);
    after_the_kernel_before();
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
