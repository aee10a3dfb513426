// New rows of a layer in one launch: rotates queries and keys in place (rope.cu), then stores keys and values (store_rows.cu). The
// results are those of `rope` for both and `store` for both, to the last bit. One block per new row of K or V, the others have
// the queries.
//
//   pairs > 0: q, k = rope(q), rope(k)
//   k_pool[head, cell[t]] = k[t, head],  v_pool[head, cell[t]] = v[t, head]      as they are stored
//   recent[n_slots + t] = recent[kept[t]] = the recent rows of both              on sides that have them

struct Args {
    u32 heads; // of q
    u32 kv_heads;
    u32 pairs;
    u32 angles; // as of `rope`
    u32 tokens;
    u32 k_cells;
    u32 v_cells;
    u32 written; // as of `store`
    u32 kept;
    u32 n_slots;
    u32 recent_row;
    u32 recent_values; // first word of values in a row of `recent`, keys come first
};

typedef Side<K_DTYPE, K_GROUP, K_CODES, K_WORDS, K_SCALES, K_WIDE, K_TURN, K_RECENT, true> Keys;
typedef Side<V_DTYPE, V_GROUP, V_CODES, V_WORDS, V_SCALES, V_WIDE, V_TURN, V_RECENT, false> Values;

#define HALF_WORDS ((DIM + 1u) / 2u) // of a row in f16

extern "C" __global__ void __launch_bounds__(64) store_both(
    const float* __restrict__ angles,
    float* __restrict__ q,   // [tokens, heads, DIM]
    u32* __restrict__ k,     // [tokens, kv_heads, DIM] f32 bits: NaN must stay NaN
    const u32* __restrict__ v,
    const u32* __restrict__ plan,
    const u32* __restrict__ order, // of keys: [kv_heads, DIM]
    u32* __restrict__ k_pool,      // [kv_heads, k_cells, K_WORDS]
    u32* __restrict__ v_pool,
    u32* __restrict__ recent,      // [n_slots + tokens, recent_row]
    Args args) {
    __shared__ u32 rotated[DIM];
    __shared__ float turned[DIM];
    __shared__ u32 codes[DIM];
    __shared__ u32 scales[Keys::SCALE_WORDS > Values::SCALE_WORDS ? Keys::SCALE_WORDS : Values::SCALE_WORDS];
    __shared__ float sums[THREADS];
    __shared__ u32 odd[THREADS];
    Row row = {turned, codes, scales, sums, odd};
    u32 token = blockIdx.y;
    const float* cosines = angles + args.angles + token * args.pairs;
    const float* sines = cosines + args.tokens * args.pairs;
    if (blockIdx.x >= 2u * args.kv_heads) {
        u32 id = (blockIdx.x - 2u * args.kv_heads) * THREADS + threadIdx.x;
        if (id >= args.heads * args.pairs) { return; }
        u32 i = id % args.pairs;
        float* x = q + (token * args.heads + id / args.pairs) * DIM + i;
        float2 y = rotated_pair(x[0], x[args.pairs], cosines[i], sines[i]);
        x[0] = y.x;
        x[args.pairs] = y.y;
        return;
    }
    bool is_key = blockIdx.x < args.kv_heads;
    u32 head = is_key ? blockIdx.x : blockIdx.x - args.kv_heads;
    u32 cell = plan[args.written + token];
    u32 at = (token * args.kv_heads + head) * DIM;
    u32* newest = nullptr;
    u32* kept = nullptr;
    if (is_key ? K_RECENT : V_RECENT) {
        u32* rows = recent + (is_key ? 0u : args.recent_values) + head * HALF_WORDS;
        u32 slot = plan[args.kept + token];
        newest = rows + (args.n_slots + token) * args.recent_row;
        kept = slot == NONE ? nullptr : rows + slot * args.recent_row;
    }
    if (!is_key) {
        u32* to = v_pool + (unsigned long long)(head * args.v_cells + cell) * V_WORDS;
        Values::store_row(row, v + at, nullptr, to, newest, kept);
        return;
    }
    for (u32 i = threadIdx.x; i < args.pairs; i += THREADS) {
        float2 y = rotated_pair(
            __uint_as_float(k[at + i]), __uint_as_float(k[at + args.pairs + i]), cosines[i], sines[i]);
        rotated[i] = k[at + i] = __float_as_uint(y.x);
        rotated[args.pairs + i] = k[at + args.pairs + i] = __float_as_uint(y.y);
    }
    for (u32 i = 2u * args.pairs + threadIdx.x; i < DIM; i += THREADS) { rotated[i] = k[at + i]; }
    __syncthreads();
    u32* to = k_pool + (unsigned long long)(head * args.k_cells + cell) * K_WORDS;
    Keys::store_row(row, rotated, K_WIDE > 0u ? order + head * DIM : nullptr, to, newest, kept);
}
