// Cells of a pool to the rows of a block. A thread has sixteen bytes of the block at once where rows begin at multiples of sixteen bytes,
// else a word of the block, because a word may have bytes of several rows.
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

extern "C" __global__ void __launch_bounds__(256) gather(
    const u32* __restrict__ pool,  // [heads, cells, words]
    const u32* __restrict__ table, // [n] the cell of each row
    u32* __restrict__ block,       // [n, block_heads, row_bytes], dense
    Args args) {
    block += args.first;
    u32 start = blockIdx.x * 256u + threadIdx.x;
    u32 stride = gridDim.x * 256u;
    // The same for all threads.
    bool wide = args.row_bytes % 16u == 0u && 4u * args.words == args.row_bytes &&
        (reinterpret_cast<size_t>(block) | reinterpret_cast<size_t>(pool)) % 16u == 0u;
    if (wide) {
        u32 pieces = args.words / 4u; // of a row
        const uint4* from = reinterpret_cast<const uint4*>(pool);
        uint4* to = reinterpret_cast<uint4*>(block);
        for (u32 id = start; id < args.n * args.heads * pieces; id += stride) {
            u32 row = id / pieces;
            u32 head = row % args.heads;
            u32 i = row / args.heads;
            u32 piece = id % pieces;
            to[(i * args.block_heads + args.first_head + head) * pieces + piece] =
                from[(head * args.cells + table[i]) * pieces + piece];
        }
        return;
    }
    u32 end = args.n * args.block_heads * args.row_bytes;
    u32 words = end / 4u + (end % 4u > 0u ? 1u : 0u);
    for (u32 word = start; word < words; word += stride) {
        u32 bits = block[word];
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
        block[word] = bits;
    }
}
