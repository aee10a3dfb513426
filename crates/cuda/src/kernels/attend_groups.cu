// The second part of attend_mma.cu: which cells a warp takes, which query rows read them, and their way to shared memory.

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

// Brings rows that this warp copies first to the L2 cache.
template <class SIDE>
__device__ __forceinline__ void prefetch_runs(const Cursor& at, const u32* rows) {
    constexpr u32 LINE = 32u; // words
    if (!at.more()) { return; }
    u32 lane = threadIdx.x % 32u;
#pragma unroll
    for (u32 i = 0u; i + 1u < STAGES; i++) {
        u32 first = (at.group + i * WARPS) * GROUP;
        if (first + GROUP > at.end) { return; }
        const u32* run = rows + (size_t)(at.cell + (first - at.first)) * SIDE::WORDS;
        for (u32 word = lane * LINE; word < GROUP * SIDE::WORDS; word += 32u * LINE) { prefetch(run + word); }
    }
}
