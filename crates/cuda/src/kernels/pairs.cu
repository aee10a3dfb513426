// Pairs of f16 in a word, the low one first.

// Four bytes of a and b: nibble i of `selector` says which of a's bytes 0 .. 3 or b's 4 .. 7 is byte i.
__device__ __forceinline__ u32 pick_bytes(u32 a, u32 b, u32 selector) {
#ifdef __CUDA_ARCH__
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
#else
    unsigned long long both = (unsigned long long)b << 32 | a;
    u32 d = 0u;
    for (u32 i = 0u; i < 4u; i++) { d |= (u32)(both >> (8u * (selector >> (4u * i) & 7u)) & 0xffu) << (8u * i); }
    return d;
#endif
}

#ifndef __CUDA_ARCH__
// Both halves of a, b and c through f, rounded once. f32 holds every product of two f16 exactly.
template <class F>
__device__ __forceinline__ u32 each_half(u32 a, u32 b, u32 c, F f) {
    u32 low = to_half(__float_as_uint(f(half_(a & 0xffffu), half_(b & 0xffffu), half_(c & 0xffffu))));
    return low | to_half(__float_as_uint(f(half_(a >> 16), half_(b >> 16), half_(c >> 16)))) << 16;
}
#endif

__device__ __forceinline__ u32 sub_half2(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    u32 d;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return each_half(a, b, 0u, [](float x, float y, float) { return x - y; });
#endif
}

__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    u32 d;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return each_half(a, b, 0u, [](float x, float y, float) { return x * y; });
#endif
}

// a b + c
__device__ __forceinline__ u32 fma_half2(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    return each_half(a, b, c, [](float x, float y, float z) { return fmaf(x, y, z); });
#endif
}

// 2^x within 2^-22 of its value, and 0 far below.
__device__ __forceinline__ float exp_2_near(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp_2(x);
#endif
}

// A matrix of 8 x 8 halves, row l / 4 and columns 2 (l % 4) and the next one in lane l: transposed. The whole warp calls it.
__device__ __forceinline__ u32 transpose_8x8(u32 word) {
#ifdef __CUDA_ARCH__
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(word));
    return d;
#else
    u32 lane = threadIdx.x % 32u;
    u32 row = lane / 4u;
    u32 column = lane % 4u * 2u;
    // Element (column, row) is in lane 4 column + row / 2.
    u32 first = __shfl_sync(0xffffffffu, word, 4u * column + row / 2u);
    u32 second = __shfl_sync(0xffffffffu, word, 4u * column + 4u + row / 2u);
    u32 shift = 16u * (row % 2u);
    return (first >> shift & 0xffffu) | (second >> shift & 0xffffu) << 16;
#endif
}
