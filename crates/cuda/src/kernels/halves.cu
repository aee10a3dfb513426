// Rows of f32 as f16, for `gemm_fast`.
//
//   halves[t] = 2^e x[t] rounded to f16, zeros up to a multiple of 256 elements; behind all rows 2^-e of each as f32, padded to 16 bytes
//
// So rows begin at multiples of 512 bytes, and 128 bytes of one are a line of the cache instead of parts of two: reading inputs keeps the
// L2 cache busy for 92 % of the time of a product with rows of 16 bytes more (ncu, an H100).
// e is the row's own: it brings the largest magnitude to [2^14, 2^15). So nothing overflows, and an element has all of the 11
// bits of an f16 if it is not smaller than the largest one by 2^28. Infinite and NaN stay what they are, and have no part in e.
// A block has one row.

struct Args {
    u32 inputs;
};

#define THREADS 256u

// The bits of |x|; 0 if x is not finite.
__device__ __forceinline__ u32 magnitude(float x) {
    u32 bits = __float_as_uint(x) & 0x7fffffffu;
    return bits < 0x7f800000u ? bits : 0u;
}

// Elements 4c .. 4c + 3 of a row, times `scale`, as f16.
__device__ __forceinline__ uint2 packed(const float* row, u32 inputs, u32 c, float scale) {
    if (4u * c >= inputs) { return make_uint2(0u, 0u); }
    float4 v = inputs4(row, inputs, c);
    return make_uint2(pack_half2(v.x * scale, v.y * scale), pack_half2(v.z * scale, v.w * scale));
}

extern "C" __global__ void __launch_bounds__(256) halves(
    const float* __restrict__ x,      // [tokens, inputs]
    uint4* __restrict__ out,          // [tokens, inputs rounded up / 8], then [tokens]
    Args args) {
    __shared__ u32 largest[THREADS / 32u];
    const float* row = x + (size_t)blockIdx.x * args.inputs;
    u32 chunks = (args.inputs + 255u) / 256u * 32u; // of eight elements
    uint4* to = out + (size_t)blockIdx.x * chunks;
    // Magnitudes have the order of their bits.
    u32 most = 0u;
    for (u32 c = threadIdx.x; 4u * c < args.inputs; c += THREADS) {
        float4 v = inputs4(row, args.inputs, c);
        most = max(max(most, magnitude(v.x)), max(magnitude(v.y), max(magnitude(v.z), magnitude(v.w))));
    }
    for (u32 lanes = 16u; lanes > 0u; lanes /= 2u) { most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes)); }
    if (threadIdx.x % 32u == 0u) { largest[threadIdx.x / 32u] = most; }
    __syncthreads();
    for (u32 i = 0u; i < THREADS / 32u; i++) { most = max(most, largest[i]); }
    // 2^e, at most 2^126: its bits. The exponent of the largest one plus e is 14.
    u32 exponent = max(most >> 23, 15u);
    float scale = __uint_as_float((268u - exponent) << 23);
    float back = __uint_as_float((exponent - 14u) << 23);
    for (u32 i = threadIdx.x; i < chunks; i += THREADS) {
        uint2 low = packed(row, args.inputs, 2u * i, scale);
        uint2 high = packed(row, args.inputs, 2u * i + 1u, scale);
        to[i] = make_uint4(low.x, low.y, high.x, high.y);
    }
    if (threadIdx.x == 0u) { out[(size_t)gridDim.x * chunks + blockIdx.x] = make_uint4(__float_as_uint(back), 0u, 0u, 0u); }
}
