// Cells of a pool to the rows of a block. One invocation per word of the block, because a word may have bytes of several rows.
//
//   block[i, first_head + head] = pool[head, cell[i]]      rows of row_bytes bytes; other heads' bytes stay as they are

struct Args {
    first: u32,      // word of the block where these rows begin
    row_bytes: u32,
    block_heads: u32,
    first_head: u32, // of the block: the first head of this part of the pool
    heads: u32,      // of this part
    words: u32,      // of a row of the pool
    cells: u32,      // of the pool
    n: u32,          // rows of the table
}

@group(0) @binding(0) var<storage, read> pool: array<u32>;        // [heads, cells, words]
@group(0) @binding(1) var<storage, read> table: array<u32>;       // [n] the cell of each row
@group(0) @binding(2) var<storage, read_write> block: array<u32>; // [n, block_heads, row_bytes], dense
var<immediate> args: Args;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let word = id.y * 65535u * 64u + id.x;
    let end = args.n * args.block_heads * args.row_bytes;
    if (4u * word >= end) { return; }
    var bits = block[args.first + word];
    for (var b = 0u; b < 4u; b++) {
        let byte = 4u * word + b;
        let row = byte / args.row_bytes;
        let head = row % args.block_heads;
        if (byte >= end || head < args.first_head || head >= args.first_head + args.heads) { continue; }
        let in_row = byte % args.row_bytes;
        let cell = table[row / args.block_heads];
        let from_ = pool[((head - args.first_head) * args.cells + cell) * args.words + in_row / 4u];
        let value = (from_ >> (8u * (in_row % 4u))) & 0xffu;
        bits = (bits & ~(0xffu << (8u * b))) | (value << (8u * b));
    }
    block[args.first + word] = bits;
}
