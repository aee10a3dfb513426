// Elements 4c .. 4c + 3 of a row that begins at x. Behind the end of a row lie those of another token: 0 instead.
__device__ __forceinline__ float4 inputs4(const float* x, u32 inputs, u32 c) {
    const float* at = x + 4u * c;
    // Rows of whole quads are aligned: buffers are.
    if (inputs % 4u == 0u) { return *reinterpret_cast<const float4*>(at); }
    u32 left = inputs - 4u * c;
    if (left >= 4u) { return make_float4(at[0], at[1], at[2], at[3]); }
    return make_float4(at[0], left > 1u ? at[1] : 0.0f, left > 2u ? at[2] : 0.0f, 0.0f);
}
