// Rotates rows of DIM elements in shared memory, or back.
//
//   x[r * stride + i]     r < rows
//   turn 0: nothing
//   turn 1: the Hadamard matrix, block-diagonal over the largest power of two that divides DIM; its own inverse
//   turn 2: elements first .. DIM as one row of n: signs flipped, the first 2^k elements rotated, and if n is not 2^k, signs
//           flipped again and the last 2^k elements rotated
//
// Every thread of the block must call it, after a barrier; what it leaves may be read after it returns.

// The sign bit that is flipped of element i, or 0.
__device__ __forceinline__ u32 sign_of(u32 i) {
    u32 mixed = (i + 1u) * 0x9e3779b1u;
    return ((mixed ^ (mixed >> 15)) * 0x85ebca6bu) & 0x80000000u;
}

__device__ __forceinline__ void flip_signs(float* x, u32 stride, u32 rows, u32 first) {
    u32 n = DIM - first;
    for (u32 i = threadIdx.x; i < rows * n; i += blockDim.x) {
        u32 at = i / n * stride + first + i % n;
        x[at] = __uint_as_float(__float_as_uint(x[at]) ^ sign_of(i % n));
    }
    __syncthreads();
}

// Rotates blocks of `block` elements, a power of two, of elements first .. first + n of every row.
__device__ __forceinline__ void rotate(float* x, u32 stride, u32 rows, u32 first, u32 n, u32 block) {
    // block = 2^twos; the norm is 2^(-twos / 2), exact but for the factor of an odd one.
    u32 twos = 0u;
    for (u32 half = 1u; half < block; half *= 2u) {
        twos++;
        for (u32 i = threadIdx.x; i < rows * (n / 2u); i += blockDim.x) {
            u32 pair = i % (n / 2u);
            u32 low = i / (n / 2u) * stride + first + pair / half * 2u * half + pair % half;
            float a = x[low];
            float b = x[low + half];
            x[low] = a + b;
            x[low + half] = a - b;
        }
        __syncthreads();
    }
    float norm = power(-(float)(twos / 2u)) * ((twos & 1u) == 1u ? 0.70710678118654752f : 1.0f);
    for (u32 i = threadIdx.x; i < rows * n; i += blockDim.x) { x[i / n * stride + first + i % n] *= norm; }
    __syncthreads();
}

// The largest power of two that is not larger than n.
__device__ __forceinline__ u32 largest_power(u32 n) {
    u32 power = 1u;
    while (2u * power <= n) { power *= 2u; }
    return power;
}

__device__ __forceinline__ void turn_rows(float* x, u32 stride, u32 rows, u32 turn, u32 first) {
    if (turn == 1u) { rotate(x, stride, rows, 0u, DIM, DIM & (0u - DIM)); }
    if (turn == 2u && first < DIM) {
        u32 block = largest_power(DIM - first);
        flip_signs(x, stride, rows, first);
        rotate(x, stride, rows, first, block, block);
        if (block < DIM - first) {
            flip_signs(x, stride, rows, first);
            rotate(x, stride, rows, DIM - block, block, block);
        }
    }
}

__device__ __forceinline__ void turn_rows_back(float* x, u32 stride, u32 rows, u32 turn, u32 first) {
    if (turn == 1u) { rotate(x, stride, rows, 0u, DIM, DIM & (0u - DIM)); }
    if (turn == 2u && first < DIM) {
        u32 block = largest_power(DIM - first);
        if (block < DIM - first) {
            rotate(x, stride, rows, DIM - block, block, block);
            flip_signs(x, stride, rows, first);
        }
        rotate(x, stride, rows, first, block, block);
        flip_signs(x, stride, rows, first);
    }
}
