// Cells of a pool to the rows of a block. One thread per word of the block, because a word may have bytes of several rows.
//
//   block[i, first_head + head] = pool[head, cell[i]]      rows of row_bytes bytes; other heads' bytes stay as they are

struct Args {
    u32 first; // word of the block where these rows begin
    u32 row_bytes;
    u32 block_heads;
    u32 first_head; // of the block: the first head of this part of the pool
    u32 heads;      // of this part
    u32 words;      // of a row of the pool
    u32 cells;      // of the pool
    u32 n;          // rows of the table
};

extern "C" __global__ void gather(
    const u32* __restrict__ pool,  // [heads, cells, words]
    const u32* __restrict__ table, // [n] the cell of each row
    u32* __restrict__ block,       // [n, block_heads, row_bytes], dense
    Args args) {
    u32 word = (blockIdx.y * 65535u + blockIdx.x) * 64u + threadIdx.x;
    u32 end = args.n * args.block_heads * args.row_bytes;
    if (4u * word >= end) { return; }
    u32 bits = block[args.first + word];
    for (u32 b = 0u; b < 4u; b++) {
        u32 byte = 4u * word + b;
        u32 row = byte / args.row_bytes;
        u32 head = row % args.block_heads;
        if (byte >= end || head < args.first_head || head >= args.first_head + args.heads) { continue; }
        u32 in_row = byte % args.row_bytes;
        u32 cell = table[row / args.block_heads];
        u32 from = pool[((head - args.first_head) * args.cells + cell) * args.words + in_row / 4u];
        u32 value = (from >> (8u * (in_row % 4u))) & 0xffu;
        bits = (bits & ~(0xffu << (8u * b))) | (value << (8u * b));
    }
    block[args.first + word] = bits;
}
