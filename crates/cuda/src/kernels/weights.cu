// Weights as they lie in memory, decoded four at a time.
//
//   weights4(w, form, row, c) = elements 4c .. 4c + 3 of a row
//
// A block's codes, then further codes (b), then scales (s) lie in regions of their own, so that every code is in an
// aligned word, and codes of blocks begin at multiples of 16 bytes. q4_K and q5_K lie block by block as in their files.
// The values are those of `kvist_device::weights`, in the same order of operations.

#define F32 0
#define F16 1
#define BF16 2
#define Q8_0 3
#define Q4_0 4
#define Q4_1 5
#define Q5_0 6
#define Q5_1 7
#define IQ4_NL 8
#define MXFP4 9
#define Q2_K 10
#define Q3_K 11
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define IQ4_XS 15
#define FEW 16
#define INT8 17

struct Form {
    u32 quads; // elements of a row / 4, rounded up
    u32 b;     // first word of the further codes
    u32 s;     // first word of the scales
};

// Bits `i .. i + 3` of a word, as `value` or 0.
__device__ __forceinline__ uint4 bits4(u32 word, u32 i, u32 value) {
    u32 x = word >> i;
    return make_uint4((x & 1u) * value, ((x >> 1) & 1u) * value, ((x >> 2) & 1u) * value, ((x >> 3) & 1u) * value);
}

__device__ __forceinline__ uint4 both(uint4 a, uint4 b) {
    return make_uint4(a.x | b.x, a.y | b.y, a.z | b.z, a.w | b.w);
}

// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
__device__ __forceinline__ float iq4(u32 code) {
    return signed_byte(entry(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, code), 0u);
}

// fp4, doubled: 0, 1, 2, 3, 4, 6, 8, 12, and the same negated
__device__ __forceinline__ float fp4(u32 code) {
    return signed_byte(entry(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu, code), 0u);
}

__device__ __forceinline__ float half_at(const u32* w, u32 first, u32 i) {
    return half_((w[first + (i >> 1)] >> (16u * (i & 1u))) & 0xffffu);
}

// Scale and minimum of group i of q4_K and q5_K, from the first words of their block.
__device__ __forceinline__ float2 scale_min(const u32* block, u32 i) {
    u32 j = i & 3u;
    u32 low = byte_of(block[1], j);
    u32 mid = byte_of(block[2], j);
    u32 high = byte_of(block[3], j);
    if (i < 4u) { return make_float2((float)(low & 63u), (float)(mid & 63u)); }
    return make_float2((float)((high & 15u) | ((low >> 6) << 4)), (float)((high >> 4) | ((mid >> 6) << 4)));
}

__device__ __forceinline__ float4 weights4(const u32* __restrict__ w, Form form, u32 row, u32 c) {
    u32 quad = row * form.quads + c;
    u32 block = quad / 8u; // of 32 elements
    u32 i = quad % 8u;
    u32 super_block = quad / 64u; // of 256 elements
    u32 group = block % 8u;       // of 32 elements in it
    switch (ENCODING) {
    case F32: return reinterpret_cast<const float4*>(w)[quad];
    case F16: {
        uint2 words = reinterpret_cast<const uint2*>(w)[quad];
        return make_float4(
            half_(words.x & 0xffffu), half_(words.x >> 16), half_(words.y & 0xffffu), half_(words.y >> 16));
    }
    case BF16: {
        uint2 words = reinterpret_cast<const uint2*>(w)[quad];
        return make_float4(
            __uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u), __uint_as_float(words.y << 16),
            __uint_as_float(words.y & 0xffff0000u));
    }
    case Q8_0: {
        u32 word = w[quad];
        float scale = half_at(w, form.s, block);
        return make_float4(
            scale * signed_byte(word, 0u), scale * signed_byte(word, 1u), scale * signed_byte(word, 2u),
            scale * signed_byte(word, 3u));
    }
    case Q4_0: {
        uint4 codes = four(w[block * 4u + (i & 3u)], (i >> 2) * 4u, 15u);
        return centred(half_at(w, form.s, block), codes, 8.0f);
    }
    case Q4_1: {
        uint4 codes = four(w[block * 4u + (i & 3u)], (i >> 2) * 4u, 15u);
        return above(half_at(w, form.s, 2u * block), codes, half_at(w, form.s, 2u * block + 1u));
    }
    case Q5_0: {
        uint4 low = four(w[block * 4u + (i & 3u)], (i >> 2) * 4u, 15u);
        return centred(half_at(w, form.s, block), both(low, bits4(w[form.b + block], 4u * i, 16u)), 16.0f);
    }
    case Q5_1: {
        uint4 low = four(w[block * 4u + (i & 3u)], (i >> 2) * 4u, 15u);
        uint4 codes = both(low, bits4(w[form.b + block], 4u * i, 16u));
        return above(half_at(w, form.s, 2u * block), codes, half_at(w, form.s, 2u * block + 1u));
    }
    case IQ4_NL: {
        uint4 codes = four(w[block * 4u + (i & 3u)], (i >> 2) * 4u, 15u);
        float scale = half_at(w, form.s, block);
        return make_float4(scale * iq4(codes.x), scale * iq4(codes.y), scale * iq4(codes.z), scale * iq4(codes.w));
    }
    case MXFP4: {
        uint4 codes = four(w[block * 4u + (i & 3u)], (i >> 2) * 4u, 15u);
        u32 e = byte_of(w[form.s + block / 4u], block & 3u);
        // 2^(e - 128): the codes are doubled. Subnormal below e = 2.
        float scale = __uint_as_float(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
        return make_float4(scale * fp4(codes.x), scale * fp4(codes.y), scale * fp4(codes.z), scale * fp4(codes.w));
    }
    case Q2_K: {
        const u32* at = w + super_block * 20u;
        uint4 codes = four(at[4u + group / 4u * 8u + i], 2u * (group & 3u), 3u);
        u32 g = 2u * group + i / 4u;
        u32 scale = byte_of(at[g / 4u], g & 3u);
        u32 d = w[form.s + super_block];
        return above(half_(d & 0xffffu) * (float)(scale & 15u), codes, -(half_(d >> 16) * (float)(scale >> 4)));
    }
    case Q3_K: {
        const u32* at = w + super_block * 24u;
        const u32* scales = w + form.b + super_block * 3u;
        uint4 low = four(at[8u + group / 4u * 8u + i], 2u * (group & 3u), 3u);
        uint4 high = four(at[i], group, 1u);
        uint4 codes = both(low, make_uint4(high.x << 2, high.y << 2, high.z << 2, high.w << 2));
        u32 g = 2u * group + i / 4u;
        u32 low_scale = (byte_of(scales[(g & 7u) / 4u], g & 3u) >> (4u * (g / 8u))) & 15u;
        u32 high_scale = (byte_of(scales[2], g & 3u) >> (2u * (g / 4u))) & 3u;
        float scale = (float)(low_scale | (high_scale << 4)) - 32.0f;
        return centred(half_at(w, form.s, super_block) * scale, codes, 4.0f);
    }
    case Q4_K: {
        const u32* at = w + super_block * 36u;
        uint4 codes = four(at[4u + group / 2u * 8u + i], 4u * (group & 1u), 15u);
        float2 sm = scale_min(at, group);
        return above(half_(at[0] & 0xffffu) * sm.x, codes, -(half_(at[0] >> 16) * sm.y));
    }
    case Q5_K: {
        const u32* at = w + super_block * 44u;
        uint4 low = four(at[12u + group / 2u * 8u + i], 4u * (group & 1u), 15u);
        uint4 high = four(at[4u + i], group, 1u);
        uint4 codes = both(low, make_uint4(high.x << 4, high.y << 4, high.z << 4, high.w << 4));
        float2 sm = scale_min(at, group);
        return above(half_(at[0] & 0xffffu) * sm.x, codes, -(half_(at[0] >> 16) * sm.y));
    }
    case Q6_K: {
        const u32* at = w + super_block * 52u;
        u32 h = group / 4u;
        u32 quarter = group & 3u;
        uint4 low = four(at[h * 16u + (quarter & 1u) * 8u + i], (quarter / 2u) * 4u, 15u);
        uint4 high = four(at[32u + h * 8u + i], 2u * quarter, 3u);
        uint4 codes = both(low, make_uint4(high.x << 4, high.y << 4, high.z << 4, high.w << 4));
        u32 g = 2u * group + i / 4u;
        return centred(half_at(w, form.s, super_block) * signed_byte(at[48u + g / 4u], g & 3u), codes, 32.0f);
    }
    case IQ4_XS: {
        const u32* head = w + form.s + super_block * 2u;
        uint4 codes = four(w[block * 4u + (i & 3u)], (i >> 2) * 4u, 15u);
        u32 low = (head[1] >> (4u * group)) & 15u;
        u32 high = (head[0] >> (16u + 2u * group)) & 3u;
        float scale = half_(head[0] & 0xffffu) * ((float)(low | (high << 4)) - 32.0f);
        return make_float4(scale * iq4(codes.x), scale * iq4(codes.y), scale * iq4(codes.z), scale * iq4(codes.w));
    }
    case FEW: {
        const u32* table = w + form.b + super_block * 8u; // and scales
        uint4 codes = four(w[block * 4u + (i & 3u)], (i >> 2) * 4u, 15u);
        u32 g = 2u * group + i / 4u;
        float scale = __uint_as_float(w[form.s + super_block]) * signed_byte(table[4u + g / 4u], g & 3u);
        u32 a = table[0], b = table[1], c = table[2], d = table[3];
        return make_float4(
            scale * ((float)(entry(a, b, c, d, codes.x) & 0xffu) - 128.0f),
            scale * ((float)(entry(a, b, c, d, codes.y) & 0xffu) - 128.0f),
            scale * ((float)(entry(a, b, c, d, codes.z) & 0xffu) - 128.0f),
            scale * ((float)(entry(a, b, c, d, codes.w) & 0xffu) - 128.0f));
    }
    case INT8: {
        u32 word = w[quad];
        // Every block repeats the scale of its row.
        float scale = __uint_as_float(w[form.s + block]);
        return make_float4(
            scale * signed_byte(word, 0u), scale * signed_byte(word, 1u), scale * signed_byte(word, 2u),
            scale * signed_byte(word, 3u));
    }
    default: return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}
