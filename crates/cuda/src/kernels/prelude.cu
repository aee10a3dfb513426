// In front of every kernel, behind its constants. NVRTC has no headers here, so nothing is included.

typedef unsigned int u32;

// Shared memory whose size the launch gives: `shared_bytes` in kernels.rs.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[]
#endif

// The first statement of every kernel; kernels.rs puts it there. A graph may start a kernel before the one before has ended: this waits until
// that, and so everything before it, has ended and its writes can be read. Then the next kernel may start. Elsewhere it does nothing.
__device__ __forceinline__ void after_the_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
