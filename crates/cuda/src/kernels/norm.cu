// RMS norm.
//
//   out = weight * x / sqrt(mean(x^2) + eps)      for every row, one block each; IN_PLACE: out is x
//
// Thread t adds up the squares of quads t, t + 256, ... (of single elements in rows that are not whole quads); the lanes of a warp are
// added as a binary tree, then the warps in order. Loads of a thread do not wait for each other: a decode step has one row, and
// its time is that of a load.

#define THREADS 256u

struct Args {
    u32 width;
    u32 rows;
    float eps;
};

__device__ __forceinline__ float add_square(float sum, float4 x) {
    sum = fmaf(x.x, x.x, sum);
    sum = fmaf(x.y, x.y, sum);
    sum = fmaf(x.z, x.z, sum);
    return fmaf(x.w, x.w, sum);
}

extern "C" __global__ void __launch_bounds__(256) rms_norm(
    const float* __restrict__ weight, // [width]
    float* out,                       // [rows, width]
    const float* x,                   // [rows, width], not bound in place
    Args args) {
    __shared__ float sums[THREADS / 32u];
    u32 lane = threadIdx.x;
    u32 row = blockIdx.y * ROWS + blockIdx.x;
    if (row >= args.rows) { return; } // of the whole block
    const float* from = (IN_PLACE ? out : x) + (size_t)row * args.width;
    float* to = out + (size_t)row * args.width;
    bool quads = args.width % 4u == 0u; // then every row is aligned: buffers are
    float sum = 0.0f;
    if (quads) {
#pragma unroll 4
        for (u32 i = lane; i < args.width / 4u; i += THREADS) {
            sum = add_square(sum, reinterpret_cast<const float4*>(from)[i]);
        }
    } else {
        for (u32 i = lane; i < args.width; i += THREADS) { sum = fmaf(from[i], from[i], sum); }
    }
    for (u32 half = 16u; half > 0u; half /= 2u) { sum += __shfl_xor_sync(0xffffffffu, sum, half); }
    if (lane % 32u == 0u) { sums[lane / 32u] = sum; }
    __syncthreads();
    sum = sums[0];
    for (u32 i = 1u; i < THREADS / 32u; i++) { sum += sums[i]; }
    float scale = 1.0f / sqrtf(sum / (float)args.width + args.eps);
    if (quads) {
#pragma unroll 4
        for (u32 i = lane; i < args.width / 4u; i += THREADS) {
            float4 a = reinterpret_cast<const float4*>(from)[i];
            float4 w = reinterpret_cast<const float4*>(weight)[i];
            reinterpret_cast<float4*>(to)[i] =
                make_float4(a.x * scale * w.x, a.y * scale * w.y, a.z * scale * w.z, a.w * scale * w.w);
        }
    } else {
        for (u32 i = lane; i < args.width; i += THREADS) { to[i] = from[i] * scale * weight[i]; }
    }
}
