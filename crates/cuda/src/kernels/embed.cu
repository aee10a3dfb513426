// The rows of the step's tokens that lie in this part of the table.
//
//   out[t] = scale * table[token[t]]

struct Args {
    Form form;
    u32 first; // row of the table that is this part's first
    u32 rows;  // of this part
    u32 width;
    float scale;
};

extern "C" __global__ void embed(
    const u32* __restrict__ w,
    const u32* __restrict__ tokens,
    float* __restrict__ out, // [tokens, width]
    Args args) {
    u32 quad = blockIdx.x * 64u + threadIdx.x;
    u32 row = tokens[blockIdx.y] - args.first;
    if (quad >= args.form.quads || row >= args.rows) { return; }
    float4 four = weights4(w, args.form, row, quad);
    float values[4] = {four.x, four.y, four.z, four.w};
    for (u32 i = 0u; i < 4u; i++) {
        u32 column = 4u * quad + i;
        if (column < args.width) { out[blockIdx.y * args.width + column] = values[i] * args.scale; }
    }
}
