// Arithmetic of pairs of f16 in words. Behind mma.cu, which packs them.

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
    return pack_half2(x.x + y.x, x.y + y.y);
#endif
}

// a b for both halves, rounded once.
__device__ __forceinline__ u32 mul_pairs(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
#else
    float2 x = unpair(a), y = unpair(b);
    return pack_half2(x.x * y.x, x.y * y.y);
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
    return pack_half2(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
#endif
}
