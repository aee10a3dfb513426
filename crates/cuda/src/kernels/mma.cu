// Tensor cores: products of small matrices that the 32 lanes of a warp compute together, and what brings their operands there.
// Every lane of a warp calls these functions, and all of them with the same loops around. Behind math.cu.
//
//   mma_f16_16816(d, a, b)   D += A B for A[16, 16], B[16, 8] and D[16, 8]. A and B are f16, D is f32 and so are the sums.
//   mma_bf16_16816(d, a, b)  the same for bf16
//   ldmatrix_x4(r, row)      four matrices [8, 8] of two-byte elements from shared memory. Lane 8i + j gives the address of row j of
//                            matrix i: 16 bytes, aligned to 16. Register i of a lane gets its pair of matrix i.
//   ldmatrix_x4_trans(r, row)  the same, each matrix transposed
//   transpose_8x8(word)      a matrix [8, 8] in registers, as ldmatrix leaves it, transposed
//   pack_half2(low, high)    two f32 as f16, `low` in the lower half of the word. Too large becomes infinite.
//   pack_bf162(low, high)    the same as bf16
// Addresses in shared memory are pointers, or of the type shared_address: a number of bytes, which takes one register and no
// conversion. `shared_at(pointer)` makes one that the compiler keeps instead of computing it again at every use.
//   put_shared(to, v)        writes 16 bytes there
//   copy_16(to, from)        copies 16 bytes there that nothing waits for (async.cu)
//
// Which elements a lane has, with g = lane / 4 and t = lane % 4. A register has two neighbours, the first in its lower half:
//   a matrix [8, 8] of ldmatrix: row g, columns 2t and 2t + 1; transposed: rows 2t and 2t + 1 of column g
//   A: a[0] row g, columns 2t, 2t + 1; a[1] row g + 8; a[2] row g, columns 2t + 8, 2t + 9; a[3] row g + 8, the same columns
//   B: b[0] rows 2t, 2t + 1 of column g; b[1] rows 2t + 8, 2t + 9
//   D: d[0], d[1] row g, columns 2t, 2t + 1; d[2], d[3] row g + 8
// Where the addresses of ldmatrix_x4 go, for rows of 16 elements in shared memory:
//   A in rows: lanes 0-15 give rows 0-15, columns 0-7; lanes 16-31 the same rows, columns 8-15. r is a.
//   B transposed, so that a column of B is one row there: lanes 0-7 give columns 0-7 of B, elements 0-7; lanes 8-15 the same, elements
//   8-15; lanes 16-31 that for columns 8-15. r[0], r[1] is b of the first product, r[2], r[3] that of the second.
//   B in rows: ldmatrix_x4_trans. Lanes 0-15 give rows 0-15, columns 0-7; lanes 16-31 columns 8-15. r as before.

#ifdef __CUDA_ARCH__

__device__ __forceinline__ void mma_f16_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_bf16_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}

typedef u32 shared_address;

__device__ __forceinline__ shared_address shared_at(const void* at) {
    // The compiler cannot see through a shuffle.
    return __shfl_sync(0xffffffffu, (u32)__cvta_generic_to_shared(at), threadIdx.x % 32u);
}

__device__ __forceinline__ void put_shared(shared_address to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void copy_16(shared_address to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

__device__ __forceinline__ u32 pack_half2(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ u32 pack_bf162(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

#else // The emulation has no such instructions.

typedef char* shared_address;

__device__ __forceinline__ shared_address shared_at(void* at) {
    return static_cast<char*>(at);
}

__device__ __forceinline__ void put_shared(shared_address to, uint4 v) {
    *reinterpret_cast<uint4*>(to) = v;
}

__device__ __forceinline__ void copy_16(shared_address to, const uint4* from) {
    put_shared(to, *from);
}

struct Operands {
    u32 a[4], b[2];
};

// The pair of floats in a register.
__device__ __forceinline__ float2 f16_pair(u32 word) {
    return make_float2(half_(word & 0xffffu), half_(word >> 16));
}
__device__ __forceinline__ float2 bf16_pair(u32 word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

template <class PAIR>
__device__ __forceinline__ void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], PAIR pair) {
    Operands mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    Operands all[32];
    kvist_all_lanes(all, mine);
    u32 lane = threadIdx.x % 32u;
    for (u32 i = 0u; i < 4u; i++) {
        for (u32 k = 0u; k < 8u; k++) { // pairs of the 16 columns of A
            const Operands& left = all[lane / 4u * 4u + k % 4u];
            const Operands& right = all[(2u * (lane % 4u) + i % 2u) * 4u + k % 4u];
            float2 x = pair(left.a[i / 2u + 2u * (k / 4u)]);
            float2 y = pair(right.b[k / 4u]);
            d[i] = fmaf(x.x, y.x, d[i]);
            d[i] = fmaf(x.y, y.y, d[i]);
        }
    }
}

__device__ __forceinline__ void mma_f16_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_16816(d, a, b, f16_pair);
}

__device__ __forceinline__ void mma_bf16_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_16816(d, a, b, bf16_pair);
}

struct Row {
    unsigned short element[8];
};

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], const void* row, bool transposed) {
    // As a GPU reads it: the sanitizer reports an address that is not aligned.
    uint4 words = *reinterpret_cast<const uint4*>(row);
    Row mine = kvist_bits<Row>(words);
    Row all[32];
    kvist_all_lanes(all, mine);
    u32 g = threadIdx.x % 32u / 4u;
    u32 t = threadIdx.x % 4u;
    for (u32 i = 0u; i < 4u; i++) {
        const Row* matrix = all + 8u * i;
        u32 low = transposed ? matrix[2u * t].element[g] : matrix[g].element[2u * t];
        u32 high = transposed ? matrix[2u * t + 1u].element[g] : matrix[g].element[2u * t + 1u];
        r[i] = low | (high << 16);
    }
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row) {
    ldmatrix(r, row, false);
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    ldmatrix(r, row, true);
}

__device__ __forceinline__ u32 pack_half2(float low, float high) {
    return to_half(__float_as_uint(low)) | (to_half(__float_as_uint(high)) << 16);
}

__device__ __forceinline__ u32 pack_bf162(float low, float high) {
    return to_bf16(__float_as_uint(low)) | (to_bf16(__float_as_uint(high)) << 16);
}

#endif

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
