// What kernels of attention share: their arguments, and which cells a query sees.

const NO_SCORE: f32 = -1e30;
const HIDDEN: f32 = -3e38;
const DIRECT: u32 = 0xffffffffu;
const NONE: u32 = 0xffffffffu;
const RECENT: bool = K_RECENT || V_RECENT;

struct Args {
    heads: u32,      // query heads
    kv_heads: u32,
    first_head: u32, // KV head of the first workgroup in y
    k_head: u32,     // and its numbers in these parts of the pools
    v_head: u32,
    cells: u32,      // of the pool
    order: u32,      // first words of the plan's sections
    work: u32,
    units: u32,
    entries: u32,
    bits: u32,
    scale: f32,      // with log2 e, or divided by the cap
    cap: f32,        // 0: none
    has_sinks: u32,
    recents: u32,    // first word of [query slots] recent groups, then of the lists that entries refer to
    recent_row: u32, // words of a row of `recent`
}

@group(0) @binding(0) var<storage, read> q: array<f32>; // [tokens, heads, DIM]
@group(0) @binding(1) var<storage, read> k_pool: array<u32>; // [heads of this part, cells, words]
@group(0) @binding(2) var<storage, read> v_pool: array<u32>;
@group(0) @binding(3) var<storage, read> plan: array<u32>;
@group(0) @binding(4) var<storage, read> sinks: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;    // [tokens, heads, DIM]
@group(0) @binding(6) var<storage, read_write> states: array<f32>; // [partial slots, heads, DIM + 2]
@group(0) @binding(7) var<storage, read> order: array<u32>;  // [KV heads, DIM] channels of keys, if K_WIDE > 0
@group(0) @binding(8) var<storage, read> recent: array<u32>; // [rows, recent_row]: keys of all heads, then values
var<immediate> args: Args;

// Element i of a row of `recent` whose first word is `at`.
fn recent_element(at: u32, i: u32) -> f32 {
    return element_((recent[at + i / 2u] >> (16u * (i & 1u))) & 0xffffu);
}

// Entry: (cells before it in its unit, first cell, its offset in the item's run, the run's length,
//         first slot, slots | mask << 24, a, b, list of recent rows or NONE); masks: 0 all, 1 band a + slot .. b + slot, 2 bits from a
// An entry, for one cell of it.
struct Seen {
    first: u32,  // slot
    slots: u32,
    mask: u32,
    a: u32,
    b: u32,
    run: u32,    // length of the item's run
    offset: u32, // of the cell in it
}

fn seen_of(entry: u32, cell: u32) -> Seen {
    let kind = plan[entry + 5u];
    let a = plan[entry + 6u];
    let b = plan[entry + 7u];
    return Seen(plan[entry + 4u], kind & 0xffffffu, kind >> 24u, a, b, plan[entry + 3u], plan[entry + 2u] + cell);
}

// Whether a query slot sees the cell.
fn is_seen(seen: Seen, slot: u32) -> bool {
    let i = slot - seen.first;
    if (i >= seen.slots) { return false; }
    if (seen.mask == 0u) { return true; }
    if (seen.mask == 1u) {
        let o = i32(seen.offset) - i32(i);
        return o >= bitcast<i32>(seen.a) && o < bitcast<i32>(seen.b);
    }
    let bit = seen.a + i * seen.run + seen.offset;
    return ((plan[args.bits + bit / 32u] >> (bit % 32u)) & 1u) == 1u;
}

// A score for comparisons: NaN as the smallest.
fn known(s: f32) -> f32 {
    return select(s, NO_SCORE, is_nan(s));
}
