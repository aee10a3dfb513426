// Writes new rows of K or V to the cells of the plan (see store_rows.wgsl). One workgroup per row.
//
//   pool[head, cell[t]] = x[t, first_head + head]                as it is stored
//   RECENT: recent[n_slots + t] = recent[kept[t]] = its recent row

struct Args {
    cells: u32,        // of the pool
    first_head: u32,   // of this part of the pool
    all_heads: u32,    // of x
    written: u32,      // first word of [tokens] cells in the plan
    kept: u32,         // first word of [tokens] slots or NONE
    n_slots: u32,
    recent_row: u32,   // words of a row of `recent`
    recent_first: u32, // first word of this side in it
}

@group(0) @binding(0) var<storage, read> x: array<u32>; // [tokens, all_heads, DIM] f32 bits
@group(0) @binding(1) var<storage, read> plan: array<u32>;
@group(0) @binding(2) var<storage, read> order: array<u32>;        // [all_heads, DIM]
@group(0) @binding(3) var<storage, read_write> pool: array<u32>;   // [heads, cells, WORDS]
@group(0) @binding(4) var<storage, read_write> recent: array<u32>; // [n_slots + tokens, recent_row]
var<immediate> args: Args;

const SCALE_WORDS: u32 = 2u * GROUPS + 2u;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let token = group.y;
    let head = args.first_head + group.x;
    let first = (token * args.all_heads + head) * DIM;
    for (var i = thread; i < DIM; i += THREADS) { row[i] = x[first + i]; }
    workgroupBarrier();
    let at = (group.x * args.cells + plan[args.written + token]) * WORDS;
    var newest = 0u;
    var kept = NONE;
    if (RECENT) {
        let in_row = args.recent_first + head * HALF_WORDS;
        newest = (args.n_slots + token) * args.recent_row + in_row;
        let slot = plan[args.kept + token];
        if (slot != NONE) { kept = slot * args.recent_row + in_row; }
    }
    store_row(thread, head * DIM, at, newest, kept);
}
