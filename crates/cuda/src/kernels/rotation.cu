// A pair of a rotary position embedding. `rope` and `store_both` must give the same bits.
__device__ __forceinline__ float2 rotated_pair(float a, float b, float cos, float sin) {
    return make_float2(a * cos - b * sin, b * cos + a * sin);
}
