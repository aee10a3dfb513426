// Copies rows within a pool, or to a larger one. Source and target do not overlap.
//
//   to[head, target + i] = from[head, source + i]      i < len;  WITHIN: from is to

struct Args {
    u32 words; // of a row
    u32 heads;
    u32 from_cells;
    u32 to_cells;
    u32 source;
    u32 target;
    u32 len;
};

extern "C" __global__ void copy(
    u32* to,         // [heads, to_cells, words]
    const u32* from, // [heads, from_cells, words], not bound within a pool
    Args args) {
    u32 i = (blockIdx.y * 65535u + blockIdx.x) * 64u + threadIdx.x;
    if (i >= args.len * args.words) { return; }
    u32 head = blockIdx.z;
    u32 read = (head * args.from_cells + args.source) * args.words + i;
    u32 write = (head * args.to_cells + args.target) * args.words + i;
    to[write] = WITHIN ? to[read] : from[read];
}
