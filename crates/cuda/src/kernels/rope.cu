// Rotary position embedding in place. The host computes cos and sin, as exactly as on any other device.
//
//   for each token, head and pair i:  (a, b) = (x[i], x[i + pairs])
//     x[i] = a cos - b sin;  x[i + pairs] = b cos + a sin

struct Args {
    u32 heads;
    u32 head_dim;
    u32 pairs;
    u32 angles; // first element of this embedding's angles: cos [tokens, pairs], then sin
    u32 tokens;
};

extern "C" __global__ void rope(
    const float* __restrict__ angles,
    float* __restrict__ x, // [tokens, heads, head_dim]
    Args args) {
    u32 id = blockIdx.x * 64u + threadIdx.x;
    u32 token = blockIdx.y;
    if (id >= args.heads * args.pairs) { return; }
    u32 head = id / args.pairs;
    u32 i = id % args.pairs;
    float cos = angles[args.angles + token * args.pairs + i];
    float sin = angles[args.angles + (args.tokens + token) * args.pairs + i];
    u32 low = (token * args.heads + head) * args.head_dim + i;
    u32 high = low + args.pairs;
    float a = x[low];
    float b = x[high];
    float2 y = rotated_pair(a, b, cos, sin);
    x[low] = y.x;
    x[high] = y.y;
}
