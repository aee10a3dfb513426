// Loads of weights, which are read once: they do not push inputs out of the L1 cache. `word` is a multiple of the words loaded. And what
// all products do with loaded codes.

__device__ __forceinline__ uint4 load4(const u32* w, u32 word) {
#ifdef __CUDA_ARCH__
    uint4 x;
    asm volatile("ld.global.nc.L1::evict_first.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(w + word));
    return x;
#else
    return *reinterpret_cast<const uint4*>(w + word);
#endif
}

__device__ __forceinline__ uint2 load2(const u32* w, u32 word) {
#ifdef __CUDA_ARCH__
    uint2 x;
    asm volatile("ld.global.nc.L1::evict_first.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(w + word));
    return x;
#else
    return *reinterpret_cast<const uint2*>(w + word);
#endif
}

__device__ __forceinline__ u32 load1(const u32* w, u32 word) {
#ifdef __CUDA_ARCH__
    u32 x;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(w + word));
    return x;
#else
    return w[word];
#endif
}

// The bits of half i behind word `first`.
__device__ __forceinline__ u32 load_half(const u32* w, u32 first, u32 i) {
    const unsigned short* at = reinterpret_cast<const unsigned short*>(w + first) + i;
#ifdef __CUDA_ARCH__
    unsigned short x;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(at));
    return x;
#else
    return *at;
#endif
}

__device__ __forceinline__ u32 load_byte(const u32* w, u32 first, u32 i) {
    return byte_of(load1(w, first + i / 4u), i % 4u);
}

__device__ __forceinline__ u32 word_of(uint4 words, u32 i) {
    return i == 0u ? words.x : (i == 1u ? words.y : (i == 2u ? words.z : words.w));
}

// A whole number below 2^23 as float: faster than a conversion.
__device__ __forceinline__ float small(u32 n) {
    return __uint_as_float(0x4b000000u | n) - 8388608.0f;
}

// x, which the compiler computes once and keeps: otherwise it computes many addresses in every round of a loop again.
__device__ __forceinline__ u32 kept(u32 x) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(x));
#endif
    return x;
}
