// In front of every kernel, behind its constants. NVRTC has no headers here, so nothing is included.

typedef unsigned int u32;

// Shared memory whose size the launch gives: `shared_bytes` in kernels.rs.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[]
#endif
