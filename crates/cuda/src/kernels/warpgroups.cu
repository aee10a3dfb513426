// Tensor cores of compute capability 9.0: a warpgroup, four warps whose first one has a number 4w, has them multiply matrices that lie in
// shared memory, and goes on while they do. Behind mma.cu. Only code for sm_90a has these instructions.
//
//   MATRICES(name)             dynamic shared memory that matrices may begin with
//   Matrix                     where rows of 64 f16 lie, 128 bytes each, or columns k .. k + 15 of them
//   matrix_at(to)              the matrix whose first row is at an address of mma.cu, a multiple of 1024 bytes
//   moved(matrix, bytes)       the one so many bytes further on, a multiple of 1024: other rows, or another buffer
//   columns(matrix, k)         its columns k .. k + 15 and no others, for k = 0, 16, 32, 48
//   swizzled(row, c)           where 16 bytes of a row lie among the row's: tensor cores expect chunk c (elements 8c .. 8c + 7) there.
//                              So one chunk of eight rows, which they read at a time, meets in no bank.
//   Sums<N>                    sums of a product [64, N] that belong to a thread
//   written_for_products()     what this thread has written to shared memory can be read by tensor cores, behind a barrier
//   begin_products()           in front of one or several products
//   multiply(sums, a, b)       sums += A B^T for columns of 64 rows (A) and of N rows (B). It only begins.
//   end_products(sums)         ends a group of products
//   wait_products<LEFT>(sums)  all groups but the last LEFT have ended: their rows may be written over. Sums may be read if LEFT is 0.
// All threads of a warpgroup call the last four, and matrix_at too, with the same arguments.
//
// Which sums a thread has, with w = warp % 4, g = lane / 4 and t = lane % 4, for i < N / 8:
//   d[4i], d[4i + 1]: row 16w + g of A, rows 8i + 2t and 8i + 2t + 1 of B; d[4i + 2], d[4i + 3]: row 16w + g + 8 of A

__device__ __forceinline__ u32 swizzled(u32 row, u32 c) {
    return c ^ (row & 7u);
}

#ifdef __CUDA_ARCH__

#define MATRICES(name) extern __shared__ __align__(1024) uint4 name[]

// The instruction's descriptor, in units of 16 bytes: the address, and 1024 bytes from eight rows to the next. The layout is swizzled over
// 128 bytes.
typedef unsigned long long Matrix;

__device__ __forceinline__ Matrix matrix_at(shared_address rows) {
    // The same in all lanes: so it can lie in a register that a warp has once.
    u32 at = __shfl_sync(0xffffffffu, rows, 0u);
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | (at / 16u);
}

__device__ __forceinline__ Matrix moved(Matrix matrix, u32 bytes) {
    return matrix + bytes / 16u;
}

__device__ __forceinline__ Matrix columns(Matrix matrix, u32 k) {
    return matrix + k / 8u;
}

template <u32 N>
struct Sums {
    float d[N / 2u];
};

__device__ __forceinline__ void written_for_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

#define KVIST_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KVIST_16(d, i) KVIST_4(d, i), KVIST_4(d, i + 4), KVIST_4(d, i + 8), KVIST_4(d, i + 12)
#define KVIST_64(d) KVIST_16(d, 0), KVIST_16(d, 16), KVIST_16(d, 32), KVIST_16(d, 48)
#define KVIST_128(d) KVIST_64(d), KVIST_16(d, 64), KVIST_16(d, 80), KVIST_16(d, 96), KVIST_16(d, 112)

template <u32 N>
__device__ __forceinline__ void multiply(Sums<N>& sums, Matrix a, Matrix b) {
    static_assert(N == 128u || N == 256u, "products that are spelled out");
    if constexpr (N == 256u) {
        asm volatile(
            "{ .reg .pred adds; setp.eq.u32 adds, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
            "}, %128, %129, adds, 1, 1, 0, 0; }"
            : KVIST_128(sums.d)
            : "l"(a), "l"(b)
            : "memory");
    } else {
        asm volatile(
            "{ .reg .pred adds; setp.eq.u32 adds, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, %64, %65, adds, 1, 1, 0, 0; }"
            : KVIST_64(sums.d)
            : "l"(a), "l"(b)
            : "memory");
    }
}

template <u32 N>
__device__ __forceinline__ void end_products(Sums<N>&) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT, u32 N>
__device__ __forceinline__ void wait_products(Sums<N>& sums) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    if (LEFT == 0) {
        // Nothing reads them before the wait.
#pragma unroll
        for (u32 i = 0u; i < N / 2u; i++) { asm volatile("" : "+f"(sums.d[i])::"memory"); }
    }
}

#else // The emulation multiplies as late as it may, and leaves NaN if an operand has changed since it might have been read.

#define MATRICES(name) DYNAMIC_SHARED(name)

typedef char* Matrix;

__device__ __forceinline__ Matrix matrix_at(shared_address rows) {
    return rows;
}

__device__ __forceinline__ Matrix moved(Matrix matrix, u32 bytes) {
    return matrix + bytes;
}

__device__ __forceinline__ Matrix columns(Matrix matrix, u32 k) {
    return matrix + 2u * k;
}

// A product that has begun.
struct Begun {
    Matrix a, b;
    u32 group;
    u32 seen; // of its operands
};

template <u32 N>
struct Sums {
    float d[N / 2u];
    Begun begun[16];
    u32 n_begun = 0u;
    u32 groups = 0u; // that have been ended
};

__device__ __forceinline__ void written_for_products() {}
__device__ __forceinline__ void begin_products() {}

// Pair i of the 16 columns of a row, by its address as the hardware swizzles it.
__device__ __forceinline__ u32 pair_of(Matrix matrix, u32 row, u32 i) {
    unsigned long at = reinterpret_cast<unsigned long>(matrix) + row / 8u * 1024u + row % 8u * 128u + 4u * i;
    return *reinterpret_cast<const u32*>(at ^ ((at >> 7 & 7u) << 4));
}

// The first row of A that this thread has.
__device__ __forceinline__ u32 first_row() {
    return threadIdx.x / 32u % 4u * 16u + threadIdx.x % 32u / 4u;
}

// A number that nearly every change of the thread's operands changes.
template <u32 N>
__device__ __forceinline__ u32 seen(Matrix a, Matrix b) {
    u32 hash = 0u;
    for (u32 i = 0u; i < 8u; i++) {
        hash = hash * 31u + pair_of(a, first_row(), i) + 7u * pair_of(a, first_row() + 8u, i);
        for (u32 row = threadIdx.x % 4u * 2u; row < N; row += 8u) {
            hash = hash * 31u + pair_of(b, row, i) + 7u * pair_of(b, row + 1u, i);
        }
    }
    return hash;
}

template <u32 N>
__device__ __forceinline__ void multiply(Sums<N>& sums, Matrix a, Matrix b) {
    sums.begun[sums.n_begun++] = Begun{a, b, sums.groups, seen<N>(a, b)};
}

template <u32 N>
__device__ __forceinline__ void end_products(Sums<N>& sums) {
    sums.groups++;
}

template <u32 N>
__device__ __forceinline__ void multiply_now(Sums<N>& sums, const Begun& begun) {
    bool same = begun.seen == seen<N>(begun.a, begun.b);
    float2 left[2][8];
    for (u32 i = 0u; i < 8u; i++) {
        left[0][i] = unpair(pair_of(begun.a, first_row(), i));
        left[1][i] = unpair(pair_of(begun.a, first_row() + 8u, i));
    }
    for (u32 n = 0u; n < N / 4u; n++) { // rows of B
        float2 right[8];
        for (u32 i = 0u; i < 8u; i++) { right[i] = unpair(pair_of(begun.b, n / 2u * 8u + threadIdx.x % 4u * 2u + n % 2u, i)); }
        for (u32 half = 0u; half < 2u; half++) {
            float& d = sums.d[n / 2u * 4u + half * 2u + n % 2u];
            for (u32 i = 0u; i < 8u; i++) {
                d = fmaf(left[half][i].x, right[i].x, d);
                d = fmaf(left[half][i].y, right[i].y, d);
            }
            d = same ? d : __uint_as_float(0x7fc00000u);
        }
    }
}

template <int LEFT, u32 N>
__device__ __forceinline__ void wait_products(Sums<N>& sums) {
    u32 done = 0u;
    while (done < sums.n_begun && sums.begun[done].group + LEFT < sums.groups) { multiply_now(sums, sums.begun[done++]); }
    for (u32 i = done; i < sums.n_begun; i++) { sums.begun[i - done] = sums.begun[i]; }
    sums.n_begun -= done;
}

#endif
