// RMS norm.
//
//   out = weight * x / sqrt(mean(x^2) + eps)      for every row, one block each; IN_PLACE: out is x
//
// Lane l adds up the squares l, l + 128, ...; the lanes of a warp are added as a binary tree, then the warps in order.

struct Args {
    u32 width;
    u32 rows;
    float eps;
};

extern "C" __global__ void __launch_bounds__(128) rms_norm(
    const float* __restrict__ weight, // [width]
    float* out,                       // [rows, width]
    const float* x,                   // [rows, width], not bound in place
    Args args) {
    __shared__ float sums[4];
    u32 lane = threadIdx.x;
    u32 row = blockIdx.y * ROWS + blockIdx.x;
    if (row >= args.rows) { return; } // of the whole block
    const float* from = (IN_PLACE ? out : x) + row * args.width;
    float sum = 0.0f;
    for (u32 i = lane; i < args.width; i += 128u) {
        float value = from[i];
        sum = fmaf(value, value, sum);
    }
    for (u32 half = 16u; half > 0u; half /= 2u) { sum += __shfl_xor_sync(0xffffffffu, sum, half); }
    if (lane % 32u == 0u) { sums[lane / 32u] = sum; }
    __syncthreads();
    sum = ((sums[0] + sums[1]) + sums[2]) + sums[3];
    float scale = 1.0f / sqrtf(sum / (float)args.width + args.eps);
    for (u32 i = lane; i < args.width; i += 128u) { out[row * args.width + i] = from[i] * scale * weight[i]; }
}
