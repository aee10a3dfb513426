// Rows of a block to the cells of a pool. One invocation per word of a row.
//
//   pool[head, cell[i]] = block[i, first_head + head]      rows of row_bytes bytes; the pool pads them to words with zeros

struct Args {
    first: u32,      // word of the block where these rows begin
    row_bytes: u32,
    block_heads: u32,
    first_head: u32, // of the block: the first head of this part of the pool
    heads: u32,      // of this part
    words: u32,      // of a row of the pool
    cells: u32,      // of the pool
}

@group(0) @binding(0) var<storage, read> block: array<u32>;      // [cells of the block, block_heads, row_bytes], dense
@group(0) @binding(1) var<storage, read> table: array<u32>;      // the cell of each row
@group(0) @binding(2) var<storage, read_write> pool: array<u32>; // [heads, cells, words]
var<immediate> args: Args;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let head = id.x / args.words;
    let word = id.x % args.words;
    if (head >= args.heads) { return; }
    // Rows are dense, so a word of the pool may have bytes of two words of the block.
    let byte = (id.y * args.block_heads + args.first_head + head) * args.row_bytes + 4u * word;
    let at = args.first + byte / 4u;
    let shift = 8u * (byte % 4u);
    let left = args.row_bytes - min(args.row_bytes, 4u * word);
    var bits = block[at] >> shift;
    if (shift > 0u && left > 4u - byte % 4u) { bits |= block[at + 1u] << (32u - shift); }
    if (left < 4u) { bits &= (1u << (8u * left)) - 1u; }
    pool[(head * args.cells + table[id.y]) * args.words + word] = bits;
}
