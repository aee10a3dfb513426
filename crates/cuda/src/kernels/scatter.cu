// Rows of a block to the cells of a pool. A thread has sixteen bytes of a row at once where rows begin at multiples of sixteen bytes, else
// a word of a row.
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
    u32 n;          // rows of the table
};

// Piece `id` of the rows, of which each has `pieces`, in the order of the block.
struct Piece {
    u32 i, head, piece;
};
__device__ __forceinline__ Piece piece_of(u32 id, u32 pieces, u32 heads) {
    u32 row = id / pieces;
    return {row / heads, row % heads, id % pieces};
}

// A word of the pool, whose bytes may be those of two words of the block, as rows there are dense.
__device__ __forceinline__ u32 word_of(const u32* block, u32 byte, u32 left) {
    u32 at = byte / 4u;
    u32 shift = 8u * (byte % 4u);
    u32 bits = block[at] >> shift;
    if (shift > 0u && left > 4u - byte % 4u) { bits |= block[at + 1u] << (32u - shift); }
    if (left < 4u) { bits &= (1u << (8u * left)) - 1u; }
    return bits;
}

extern "C" __global__ void __launch_bounds__(256) scatter(
    const u32* __restrict__ block, // [n, block_heads, row_bytes], dense
    const u32* __restrict__ table, // [n] the cell of each row
    u32* __restrict__ pool,        // [heads, cells, words]
    Args args) {
    block += args.first;
    u32 start = blockIdx.x * 256u + threadIdx.x;
    u32 stride = gridDim.x * 256u;
    u32 rows = args.n * args.heads;
    // The same for all threads.
    bool wide = args.row_bytes % 16u == 0u && 4u * args.words == args.row_bytes &&
        (reinterpret_cast<size_t>(block) | reinterpret_cast<size_t>(pool)) % 16u == 0u;
    if (wide) {
        u32 pieces = args.words / 4u;
        const uint4* from = reinterpret_cast<const uint4*>(block);
        uint4* to = reinterpret_cast<uint4*>(pool);
        for (u32 id = start; id < rows * pieces; id += stride) {
            Piece at = piece_of(id, pieces, args.heads);
            u32 row = at.i * args.block_heads + args.first_head + at.head;
            to[(at.head * args.cells + table[at.i]) * pieces + at.piece] = from[row * pieces + at.piece];
        }
        return;
    }
    for (u32 id = start; id < rows * args.words; id += stride) {
        Piece at = piece_of(id, args.words, args.heads);
        u32 row = at.i * args.block_heads + args.first_head + at.head;
        u32 left = args.row_bytes - min(args.row_bytes, 4u * at.piece);
        u32 bits = word_of(block, row * args.row_bytes + 4u * at.piece, left);
        pool[(at.head * args.cells + table[at.i]) * args.words + at.piece] = bits;
    }
}
