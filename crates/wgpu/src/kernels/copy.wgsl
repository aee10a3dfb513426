// Copies rows within a pool, or to a larger one. Source and target do not overlap.
//
//   to[head, target + i] = from[head, source + i]      i < len;  WITHIN: from is to

struct Args {
    words: u32, // of a row
    heads: u32,
    from_cells: u32,
    to_cells: u32,
    source: u32,
    target_: u32,
    len: u32,
}

@group(0) @binding(0) var<storage, read_write> to: array<u32>; // [heads, to_cells, words]
@group(0) @binding(1) var<storage, read> from_: array<u32>;    // [heads, from_cells, words], not bound within a pool
var<immediate> args: Args;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.y * 65535u * 64u + id.x;
    if (i >= args.len * args.words) {
        return;
    }
    let read = (id.z * args.from_cells + args.source) * args.words + i;
    let write = (id.z * args.to_cells + args.target_) * args.words + i;
    if (WITHIN) { to[write] = to[read]; } else { to[write] = from_[read]; }
}
