// Copies rows to columns of other rows.
//
//   out[r, column ..] = x[index[r]]      without GATHER: index[r] = r;  with ZERO: 0

struct Args {
    u32 width; // of x
    u32 out_width;
    u32 column;
    u32 index; // first word of the indices
};

extern "C" __global__ void rows(
    const float* __restrict__ x, float* __restrict__ out, const u32* __restrict__ indices, Args args) {
    u32 column = blockIdx.x * 64u + threadIdx.x;
    u32 r = blockIdx.y;
    if (column >= args.width) { return; }
    u32 at = r * args.out_width + args.column + column;
    if (ZERO) {
        out[at] = 0.0f;
        return;
    }
    u32 row = GATHER ? indices[args.index + r] : r;
    out[at] = x[row * args.width + column];
}
