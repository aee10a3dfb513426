// Copies from global to shared memory that nothing waits for, where the hardware can.

template <u32 WORDS>
__device__ __forceinline__ void copy_words(u32* to, const u32* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    if (WORDS == 4u) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    } else if (WORDS == 2u) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
    }
#else
    if (WORDS == 4u) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
        for (u32 i = 0u; i < WORDS; i++) { to[i] = from[i]; }
    }
#endif
}

// Ends a group of copies.
__device__ __forceinline__ void end_group() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for this thread's groups, but for the last N.
template <int N>
__device__ __forceinline__ void wait_groups() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Begins to bring memory to the L2 cache that is read later. All multiprocessors read and write through that cache, so this is right even
// before another kernel has written there.
__device__ __forceinline__ void prefetch(const void* at) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}
