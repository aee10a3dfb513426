// Loads of weights, which are read once: they do not push inputs out of the L1 cache. `word` is a multiple of the words loaded.

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
