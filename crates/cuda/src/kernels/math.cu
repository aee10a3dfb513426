// Arithmetic that every kernel shares. exp2 and tanh are spelled out as in the WGSL kernels: the library's own versions
// depend on the compiler's version, and a row's bits must not change with it.

#define LOG2_E 1.44269504088896340736f

__device__ __forceinline__ bool is_nan(float x) {
    return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u;
}

__device__ __forceinline__ float clamp_(float x, float low, float high) {
    return fminf(fmaxf(x, low), high);
}

// The larger one; NaN if x is NaN.
__device__ __forceinline__ float at_least(float x, float low) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(low));
    return y;
#else
    return x < low ? low : x;
#endif
}

// 2^n for integral n, 0 below -126.
__device__ __forceinline__ float power(float n) {
    float exponent = __uint_as_float((u32)((int)clamp_(n, -126.0f, 127.0f) + 127) << 23);
    return n < -126.0f ? 0.0f : exponent;
}

// 2^f for |f| <= 1/2. Its series up to f^7; the next term is 5e-9 at f = 1/2.
__device__ __forceinline__ float exp_2_part(float f) {
    float p = 1.5252734e-5f;
    p = fmaf(p, f, 1.5403530e-4f);
    p = fmaf(p, f, 1.3333558e-3f);
    p = fmaf(p, f, 9.6181291e-3f);
    p = fmaf(p, f, 5.5504109e-2f);
    p = fmaf(p, f, 2.4022651e-1f);
    p = fmaf(p, f, 6.9314718e-1f);
    return fmaf(p, f, 1.0f);
}

// 2^x within 2e-7 of its value, 0 below -126.
__device__ __forceinline__ float exp_2(float x) {
    float y = clamp_(x, -1000.0f, 127.0f);
    float n = rintf(y);
    float result = exp_2_part(y - n) * power(n);
    return is_nan(x) ? x : result;
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

// 2^(x - n) for an integral n >= x - 1/2. The same bits for every n, times a power of two: x - n is never rounded.
__device__ __forceinline__ float exp_2_less(float x, float n) {
    float whole = rintf(x);
    float result = exp_2_part(x - whole) * power(whole - n);
    return is_nan(x) ? x : result;
}

// 1 / (1 + e^-x)
__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + exp_2(-x * LOG2_E));
}

// Within 3e-7 of its value. Near 0 its series: the quotient would lose bits there.
__device__ __forceinline__ float tanh_(float x) {
    float t = exp_2(-2.0f * LOG2_E * fabsf(x));
    float far = copysignf((1.0f - t) / (1.0f + t), x);
    float s = x * x;
    float p = -8.8632355e-3f;
    p = fmaf(p, s, 2.1869488e-2f);
    p = fmaf(p, s, -5.3968254e-2f);
    p = fmaf(p, s, 1.3333333e-1f);
    p = fmaf(p, s, -3.3333333e-1f);
    float near = fmaf(p * s, x, x);
    return is_nan(x) ? x : (fabsf(x) < 0.4f ? near : far);
}

// f16 bits to f32, exactly, subnormal numbers too.
__device__ __forceinline__ float half_(u32 bits) {
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
    return x;
#else
    // The emulation has no such instruction.
    u32 sign = (bits & 0x8000u) << 16;
    u32 exponent = bits & 0x7c00u;
    if (exponent == 0x7c00u) { return __uint_as_float(0x7f800000u | ((bits & 0x3ffu) << 13) | sign); }
    if (exponent == 0u) {
        return __uint_as_float(__float_as_uint((float)(bits & 0x3ffu) * 5.9604644775390625e-8f) | sign);
    }
    return __uint_as_float((((bits & 0x7fffu) << 13) + 0x38000000u) | sign);
#endif
}

// The bits of the nearest f16, ties to even; too large becomes infinite, NaN stays NaN.
__device__ __forceinline__ u32 to_half(u32 x) {
    u32 sign = (x >> 16) & 0x8000u;
    u32 magnitude = x & 0x7fffffffu;
    if (magnitude > 0x7f800000u) { return sign | 0x7e00u; }
    if (magnitude >= 0x477ff000u) { return sign | 0x7c00u; }
    if (magnitude < 0x38800000u) {
        // Subnormal: multiples of 2^-24. Adding 0.5 leaves the rounded number in the lowest bits.
        return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
    }
    u32 rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return sign | ((rounded - 0x38000000u) >> 13);
}

// The bits of the nearest bf16, ties to even; NaN stays NaN.
__device__ __forceinline__ u32 to_bf16(u32 x) {
    if ((x & 0x7fffffffu) > 0x7f800000u) { return (x >> 16) | 0x40u; }
    return (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
}
