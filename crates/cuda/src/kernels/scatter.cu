// Rows of a block to the cells of a pool. One thread per word of a row.
//
//   pool[head, cell[i]] = block[i, first_head + head]      rows of row_bytes bytes; the pool pads them to words with zeros

struct Args {
    u32 first; // word of the block where these rows begin
    u32 row_bytes;
    u32 block_heads;
    u32 first_head; // of the block: the first head of this part of the pool
    u32 heads;      // of this part
    u32 words;      // of a row of the pool
    u32 cells;      // of the pool
};

extern "C" __global__ void scatter(
    const u32* __restrict__ block, // [cells of the block, block_heads, row_bytes], dense
    const u32* __restrict__ table, // the cell of each row
    u32* __restrict__ pool,        // [heads, cells, words]
    Args args) {
    u32 id = blockIdx.x * 64u + threadIdx.x;
    u32 head = id / args.words;
    u32 word = id % args.words;
    if (head >= args.heads) { return; }
    // Rows are dense, so a word of the pool may have bytes of two words of the block.
    u32 byte = (blockIdx.y * args.block_heads + args.first_head + head) * args.row_bytes + 4u * word;
    u32 at = args.first + byte / 4u;
    u32 shift = 8u * (byte % 4u);
    u32 left = args.row_bytes - min(args.row_bytes, 4u * word);
    u32 bits = block[at] >> shift;
    if (shift > 0u && left > 4u - byte % 4u) { bits |= block[at + 1u] << (32u - shift); }
    if (left < 4u) { bits &= (1u << (8u * left)) - 1u; }
    pool[(head * args.cells + table[blockIdx.y]) * args.words + word] = bits;
}
