// Writes new rows of K or V to the cells of the plan, as the pool stores them (store_rows.cu). One block per row.
//
//   pool[head, cell[t]] = x[t, first_head + head] as it is stored
//   RECENT: recent[n_slots + t] = recent[kept[t]] = its recent row

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

typedef Side<DTYPE, GROUP, CODES, WORDS, SCALES, WIDE, TURN, RECENT, PLAIN_RECENT> Stored;

extern "C" __global__ void __launch_bounds__(64) store(
    const u32* __restrict__ x, // [tokens, all_heads, DIM] f32 bits: NaN must stay NaN
    const u32* __restrict__ plan,
    const u32* __restrict__ order, // [all_heads, DIM]
    u32* __restrict__ pool,        // [heads, cells, WORDS]
    u32* __restrict__ recent,      // [n_slots + tokens, recent_row]
    Args args) {
    __shared__ float turned[DIM];
    __shared__ u32 codes[DIM];
    __shared__ u32 scales[Stored::SCALE_WORDS];
    __shared__ float sums[THREADS];
    __shared__ u32 odd[THREADS];
    Row row = {turned, codes, scales, sums, odd};
    u32 token = blockIdx.y;
    u32 head = args.first_head + blockIdx.x;
    u32* to = pool + (unsigned long long)(blockIdx.x * args.cells + plan[args.written + token]) * WORDS;
    u32* newest = nullptr;
    u32* kept = nullptr;
    if (RECENT) {
        u32* rows = recent + args.recent_first + head * ((DIM + 1u) / 2u);
        u32 slot = plan[args.kept + token];
        newest = rows + (args.n_slots + token) * args.recent_row;
        kept = slot == NONE ? nullptr : rows + slot * args.recent_row;
    }
    Stored::store_row(row, x + (token * args.all_heads + head) * DIM, WIDE > 0u ? order + head * DIM : nullptr, to, newest, kept);
}
