// The levels of t4, those of least mean square error for a normal distribution (Max, 1960):
// -127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127
__device__ __forceinline__ float t4_level(u32 code) {
    return signed_byte(entry(0xc6b5a081u, 0xfaeee1d4u, 0x2c1f1206u, 0x7f604b3au, code), 0u);
}
