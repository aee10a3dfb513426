// Bytes and nibbles of words.

__device__ __forceinline__ u32 byte_of(u32 word, u32 i) {
    return (word >> (8u * i)) & 0xffu;
}

__device__ __forceinline__ float signed_byte(u32 word, u32 i) {
    return (float)((int)(word << (24u - 8u * i)) >> 24);
}

// The bits of `mask` in each of four bytes.
__device__ __forceinline__ uint4 four(u32 word, u32 shift, u32 mask) {
    u32 x = word >> shift;
    return make_uint4(x & mask, (x >> 8) & mask, (x >> 16) & mask, (x >> 24) & mask);
}

// Byte `code` of four words.
__device__ __forceinline__ u32 entry(u32 a, u32 b, u32 c, u32 d, u32 code) {
    u32 word = (code & 8u) != 0u ? ((code & 4u) != 0u ? d : c) : ((code & 4u) != 0u ? b : a);
    return word >> (8u * (code & 3u));
}

// scale (codes - middle)
__device__ __forceinline__ float4 centred(float scale, uint4 codes, float middle) {
    return make_float4(
        scale * ((float)codes.x - middle), scale * ((float)codes.y - middle), scale * ((float)codes.z - middle),
        scale * ((float)codes.w - middle));
}

// scale codes + offset, rounded after each of the two
__device__ __forceinline__ float4 above(float scale, uint4 codes, float offset) {
    return make_float4(
        scale * (float)codes.x + offset, scale * (float)codes.y + offset, scale * (float)codes.z + offset,
        scale * (float)codes.w + offset);
}
