// RMS norm.
//
//   out = weight * x / sqrt(mean(x^2) + eps)      for every row; IN_PLACE: out is x
//
// A decode step has one long row per norm, whose time is that of its loads one after the other. So a long row has a block, whose threads
// load its elements and weights at once, and keep them until the sum is there. Rows of up to NARROW elements, those of heads, are many:
// each has a warp.
//
// Thread t adds up the squares of quads t, t + LANES, ... (of single elements in rows that are not whole quads), where LANES is the
// threads of the row; the lanes of a warp are added as a binary tree, then the warps in order. That depends on the width alone.

#define THREADS 512u
#define WARPS (THREADS / 32u)
#define KEPT 4u // quads of a thread that stay in registers

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

__device__ __forceinline__ float4 normed(float4 x, float scale, float4 w) {
    return make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w);
}

// The sum over the LANES threads of a row, for all of them. `sums`: shared memory for one of each warp.
template <u32 LANES>
__device__ __forceinline__ float sum_of_row(float sum, float* sums) {
    for (u32 half = 16u; half > 0u; half /= 2u) { sum += __shfl_xor_sync(0xffffffffu, sum, half); }
    if constexpr (LANES > 32u) {
        if (threadIdx.x % 32u == 0u) { sums[threadIdx.x / 32u] = sum; }
        __syncthreads();
        sum = sums[0];
#pragma unroll
        for (u32 i = 1u; i < WARPS; i++) { sum += sums[i]; }
    }
    return sum;
}

// A row by LANES threads, of which this is number `lane`.
template <u32 LANES>
__device__ __forceinline__ void norm_row(
    const float* weight, const float* from, float* to, u32 lane, const Args& args, float* sums) {
    float sum = 0.0f;
    if (args.width % 4u != 0u) { // rows are not aligned
        for (u32 i = lane; i < args.width; i += LANES) { sum = fmaf(from[i], from[i], sum); }
        float scale = 1.0f / sqrtf(sum_of_row<LANES>(sum, sums) / (float)args.width + args.eps);
        for (u32 i = lane; i < args.width; i += LANES) { to[i] = from[i] * scale * weight[i]; }
        return;
    }
    const float4* x = reinterpret_cast<const float4*>(from);
    const float4* w = reinterpret_cast<const float4*>(weight);
    float4* y = reinterpret_cast<float4*>(to);
    u32 quads = args.width / 4u;
    float4 elements[KEPT];
    float4 weights[KEPT];
#pragma unroll
    for (u32 j = 0u; j < KEPT; j++) {
        u32 i = lane + j * LANES;
        elements[j] = weights[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < quads) {
            elements[j] = x[i];
            weights[j] = w[i];
        }
    }
#pragma unroll
    for (u32 j = 0u; j < KEPT; j++) { sum = add_square(sum, elements[j]); }
#pragma unroll 4
    for (u32 i = lane + KEPT * LANES; i < quads; i += LANES) { sum = add_square(sum, x[i]); }
    float scale = 1.0f / sqrtf(sum_of_row<LANES>(sum, sums) / (float)args.width + args.eps);
#pragma unroll
    for (u32 j = 0u; j < KEPT; j++) {
        u32 i = lane + j * LANES;
        if (i < quads) { y[i] = normed(elements[j], scale, weights[j]); }
    }
#pragma unroll 4
    for (u32 i = lane + KEPT * LANES; i < quads; i += LANES) { y[i] = normed(x[i], scale, w[i]); }
}

extern "C" __global__ void __launch_bounds__(512) rms_norm(
    const float* __restrict__ weight, // [width]
    float* out,                       // [rows, width]
    const float* x,                   // [rows, width], not bound in place
    Args args) {
    __shared__ float sums[WARPS];
    bool narrow = args.width <= NARROW;
    u32 block = blockIdx.y * ROWS + blockIdx.x;
    u32 row = narrow ? block * WARPS + threadIdx.x / 32u : block;
    if (row >= args.rows) { return; } // of the whole block, or of a whole warp that meets no barrier
    const float* from = (IN_PLACE ? out : x) + (size_t)row * args.width;
    float* to = out + (size_t)row * args.width;
    if (narrow) {
        norm_row<32u>(weight, from, to, threadIdx.x % 32u, args, sums);
    } else {
        norm_row<THREADS>(weight, from, to, threadIdx.x, args, sums);
    }
}
