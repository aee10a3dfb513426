// New rows of a layer in one dispatch: rotates queries and keys in place (rope.wgsl), then stores keys and values (store_rows.wgsl). The
// results are those of `rope` for both and `store` for both, to the last bit. One workgroup per new row of K or V, the others
// have the queries.
//
//   pairs > 0: q, k = rope(q), rope(k)
//   k_pool[head, cell[t]] = k[t, head],  v_pool[head, cell[t]] = v[t, head]      as they are stored
//   recent[n_slots + t] = recent[kept[t]] = the recent rows of both              on sides that have them

struct Args {
    heads: u32,    // of q
    kv_heads: u32,
    pairs: u32,
    angles: u32,   // as of `rope`
    tokens: u32,
    k_cells: u32,
    v_cells: u32,
    written: u32,  // as of `store`
    kept: u32,
    n_slots: u32,
    recent_row: u32,
    recent_values: u32, // first word of values in a row of `recent`, keys come first
}

@group(0) @binding(0) var<storage, read> angles: array<f32>;
@group(0) @binding(1) var<storage, read_write> q: array<f32>; // [tokens, heads, DIM]
@group(0) @binding(2) var<storage, read_write> k: array<u32>; // [tokens, kv_heads, DIM] f32 bits
@group(0) @binding(3) var<storage, read> v: array<u32>;
@group(0) @binding(4) var<storage, read> plan: array<u32>;
@group(0) @binding(5) var<storage, read> order: array<u32>;   // of keys: [kv_heads, DIM]
@group(0) @binding(6) var<storage, read_write> k_pool: array<u32>; // [kv_heads, k_cells, K_WORDS]
@group(0) @binding(7) var<storage, read_write> v_pool: array<u32>;
@group(0) @binding(8) var<storage, read_write> recent: array<u32>; // [n_slots + tokens, recent_row]
var<immediate> args: Args;

const K_PLAIN_RECENT: bool = true;
const V_PLAIN_RECENT: bool = false;
const SCALE_WORDS: u32 = 2u * max(K_GROUPS, V_GROUPS) + 2u;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let token = group.y;
    let cosines = args.angles + token * args.pairs;
    let sines = cosines + args.tokens * args.pairs;
    if (group.x >= 2u * args.kv_heads) {
        let id = (group.x - 2u * args.kv_heads) * THREADS + thread;
        if (id < args.heads * args.pairs) {
            let i = id % args.pairs;
            let low = (token * args.heads + id / args.pairs) * DIM + i;
            let y = rotated_pair(q[low], q[low + args.pairs], angles[cosines + i], angles[sines + i]);
            q[low] = y.x;
            q[low + args.pairs] = y.y;
        }
        return;
    }
    let is_key = group.x < args.kv_heads;
    let head = select(group.x - args.kv_heads, group.x, is_key);
    let cell = plan[args.written + token];
    let first = (token * args.kv_heads + head) * DIM;
    var newest = 0u;
    var kept = NONE;
    if (K_RECENT || V_RECENT) {
        let in_row = select(args.recent_values, 0u, is_key) + head * HALF_WORDS;
        newest = (args.n_slots + token) * args.recent_row + in_row;
        let slot = plan[args.kept + token];
        if (slot != NONE) { kept = slot * args.recent_row + in_row; }
    }
    if (!is_key) {
        for (var i = thread; i < DIM; i += THREADS) { row[i] = v[first + i]; }
        workgroupBarrier();
        v_store_row(thread, 0u, (head * args.v_cells + cell) * V_WORDS, newest, kept);
        return;
    }
    for (var i = thread; i < args.pairs; i += THREADS) {
        let a = bitcast<f32>(k[first + i]);
        let b = bitcast<f32>(k[first + args.pairs + i]);
        let y = rotated_pair(a, b, angles[cosines + i], angles[sines + i]);
        row[i] = bitcast<u32>(y.x);
        row[args.pairs + i] = bitcast<u32>(y.y);
        k[first + i] = row[i];
        k[first + args.pairs + i] = row[args.pairs + i];
    }
    for (var i = 2u * args.pairs + thread; i < DIM; i += THREADS) { row[i] = k[first + i]; }
    workgroupBarrier();
    k_store_row(thread, head * DIM, (head * args.k_cells + cell) * K_WORDS, newest, kept);
}
