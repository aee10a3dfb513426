// Pairs of f16 in words, and products of small matrices of them on tensor cores. Sums are in f32.

// The nearest f16 of two numbers, `low` in the low half.
__device__ __forceinline__ u32 pair(float low, float high) {
#ifdef __CUDA_ARCH__
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return to_half(__float_as_uint(low)) | (to_half(__float_as_uint(high)) << 16);
#endif
}

__device__ __forceinline__ float2 unpair(u32 both) {
#ifdef __CUDA_ARCH__
    float2 x;
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(x.x), "=f"(x.y)
        : "r"(both));
    return x;
#else
    return make_float2(half_(both & 0xffffu), half_(both >> 16));
#endif
}

// a + b for both halves, rounded once.
__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
#else
    float2 x = unpair(a), y = unpair(b);
    return pair(x.x + y.x, x.y + y.y);
#endif
}

// a b + c for both halves, rounded once.
__device__ __forceinline__ u32 fma_pairs(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#else
    float2 x = unpair(a), y = unpair(b), z = unpair(c);
    return pair(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
#endif
}

// sum += A B on a warp: A is 16 x 16, B is 16 x 8. With g = lane / 4 and t = lane % 4 a lane has
//   of A: row g, columns 2t, 2t + 1 (a0) and 2t + 8, 2t + 9 (a2); the same of row g + 8 (a1, a3)
//   of B: of column g rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1)
//   of the sum: of rows g (x, y) and g + 8 (z, w) columns 2t, 2t + 1
__device__ __forceinline__ void add_tile(float4& sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef __CUDA_ARCH__
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    const u32 words[6] = {a0, a1, a2, a3, b0, b1};
    kvist::together(words, __LINE__, [&](const u32* const* lanes) {
        u32 g = threadIdx.x % 32u / 4u, t = threadIdx.x % 4u;
        for (u32 i = 0u; i < 4u; i++) {
            float added = 0.0f;
            for (u32 k = 0u; k < 16u; k += 2u) {
                u32 b = lanes[(2u * t + i % 2u) * 4u + k % 8u / 2u][4u + k / 8u];
                if (b == 0u) { continue; }
                float2 x = unpair(lanes[g * 4u + k % 8u / 2u][i / 2u + 2u * (k / 8u)]), y = unpair(b);
                added += x.x * y.x + x.y * y.y;
            }
            (&sum.x)[i] += added;
        }
    });
#endif
}
