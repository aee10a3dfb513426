// Weights as the tensor cores take them: 32 neighbours of a row as f16, times a power of two.
//
//   load_block(w, form, row, b)      the words of elements 32b .. 32b + 31, from global memory
//   decode_block(block, scale, out)  from them 32 f16
//
// Between the two a kernel does other work. Codes become f16 without conversions from integers, which are slow: a byte c in the
// lowest bits of the f16 1024 is 1024 + c. What is rounded is the product of a scale and a code (11 bits), and in q4_K,
// q5_K and q6_K the scale before it. int8 has one scale per row, so its codes stay whole numbers, and `row_scale` is for their sums.

// How the rarer encodings are loaded: while they are decoded, four at a time.
#define QUADS (ENCODING == Q2_K || ENCODING == Q3_K || ENCODING == IQ4_XS || ENCODING == FEW)

// The first output and token of a block's tile. Blocks that run at the same time share weights and inputs: GROUP tiles of tokens with every
// tile of outputs.
#define GROUP 8u
struct Corner {
    u32 output;
    u32 token;
};
__device__ __forceinline__ Corner corner_of_tile() {
    u32 number = blockIdx.y * gridDim.x + blockIdx.x;
    u32 group = number / (GROUP * gridDim.x);
    u32 in_group = number % (GROUP * gridDim.x);
    u32 height = min(GROUP, gridDim.y - group * GROUP);
    return {in_group / height * TILE_OUTPUTS, (group * GROUP + in_group % height) * TILE_TOKENS};
}

struct Block {
    uint4 codes[5];
    u32 scale;
    const u32* w; // of QUADS
    Form form;
    u32 row;
    u32 at; // block in the row
};

// ---- bytes to f16

// The f16 in both halves of a word.
__device__ __forceinline__ u32 twice(float x) {
    return pack_half2(x, x);
}

// Four bytes as f16, less `middle`.
__device__ __forceinline__ uint2 halves_of(u32 bytes, u32 middle) {
    u32 offset = (0xe400u + middle) * 0x10001u; // -(1024 + middle)
    u32 low = __byte_perm(bytes, 0x64646464u, 0x4140u);
    u32 high = __byte_perm(bytes, 0x64646464u, 0x4342u);
    return make_uint2(add_pairs(low, offset), add_pairs(high, offset));
}

// Bits `i .. i + 3` of a word, bit `to` of a byte each.
__device__ __forceinline__ u32 spread(u32 word, u32 i, u32 to) {
    return ((((word >> i) & 15u) * 0x00204081u) & 0x01010101u) << to;
}

// Of four bytes below 16 the bytes that a table of 16 has for them.
__device__ __forceinline__ u32 looked_up(u32 a, u32 b, u32 c, u32 d, u32 codes) {
    u32 which = codes | (codes >> 4);
    which = __byte_perm(which, 0u, 0x0020u) & 0x7777u; // the lowest three bits of each code in a nibble
    u32 upper = ((codes >> 3) & 0x01010101u) * 255u;
    return (__byte_perm(c, d, which) & upper) | (__byte_perm(a, b, which) & ~upper);
}

// ---- loading

// Two words where 16 bytes need not be aligned.
__device__ __forceinline__ uint4 in_pairs(const u32* at) {
    uint2 low = *reinterpret_cast<const uint2*>(at);
    uint2 high = *reinterpret_cast<const uint2*>(at + 2);
    return make_uint4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ u32 short_at(const u32* w, u32 first, u32 i) {
    return reinterpret_cast<const unsigned short*>(w + first)[i];
}

// The word at which a block's codes begin.
__device__ __forceinline__ const u32* codes_at(const u32* w, const Form& form, u32 row, u32 b) {
    u32 quad = row * form.quads + 8u * b;
    switch (ENCODING) {
    case F16: case BF16: return w + 2u * (size_t)quad;
    case Q8_0: case INT8: return w + quad;
    case Q4_K: return w + quad / 64u * 36u;
    case Q5_K: return w + quad / 64u * 44u;
    case Q6_K: return w + quad / 64u * 52u;
    default: return w + quad / 2u;
    }
}

__device__ __forceinline__ Block load_block(const u32* __restrict__ w, const Form& form, u32 row, u32 b) {
    Block block;
    const u32* at = codes_at(w, form, row, b);
    const uint4* wide = reinterpret_cast<const uint4*>(at);
    u32 number = row * (form.quads / 8u) + b;
    u32 group = number % 8u; // in a block of 256
    switch (ENCODING) {
    case F16: case BF16: {
        if (form.quads % 8u == 0u) {
#pragma unroll
            for (u32 i = 0u; i < 4u; i++) { block.codes[i] = wide[i]; }
            break;
        }
        // Rows need not end with a whole block, or begin at a multiple of 16 bytes.
        u32 quads = form.quads - 8u * b;
#pragma unroll
        for (u32 i = 0u; i < 4u; i++) {
            block.codes[i] = make_uint4(0u, 0u, 0u, 0u);
            if (form.quads % 2u == 0u) {
                if (2u * i < quads) { block.codes[i] = wide[i]; }
            } else if (2u * i + 1u < quads) {
                block.codes[i] = in_pairs(at + 4u * i);
            } else if (2u * i < quads) {
                uint2 last = *reinterpret_cast<const uint2*>(at + 4u * i);
                block.codes[i] = make_uint4(last.x, last.y, 0u, 0u);
            }
        }
        break;
    }
    case Q8_0: case INT8:
        block.codes[0] = wide[0];
        block.codes[1] = wide[1];
        if (ENCODING == Q8_0) { block.scale = short_at(w, form.s, number); }
        break;
    case Q4_0: case IQ4_NL:
        block.codes[0] = wide[0];
        block.scale = short_at(w, form.s, number);
        break;
    case Q5_0:
        block.codes[0] = wide[0];
        block.codes[1].x = w[form.b + number];
        block.scale = short_at(w, form.s, number);
        break;
    case Q4_1:
        block.codes[0] = wide[0];
        block.scale = w[form.s + number];
        break;
    case Q5_1:
        block.codes[0] = wide[0];
        block.codes[1].x = w[form.b + number];
        block.scale = w[form.s + number];
        break;
    case MXFP4:
        block.codes[0] = wide[0];
        block.scale = reinterpret_cast<const unsigned char*>(w + form.s)[number];
        break;
    case Q4_K:
        block.codes[0] = wide[1u + group / 2u * 2u];
        block.codes[1] = wide[2u + group / 2u * 2u];
        block.codes[2] = wide[0];
        block.at = group;
        break;
    case Q5_K:
        block.codes[0] = wide[3u + group / 2u * 2u];
        block.codes[1] = wide[4u + group / 2u * 2u];
        block.codes[2] = wide[0];
        block.codes[3] = wide[1];
        block.codes[4] = wide[2];
        block.at = group;
        break;
    case Q6_K: {
        u32 first = group / 4u * 4u + (group & 1u) * 2u;
        block.codes[0] = wide[first];
        block.codes[1] = wide[first + 1u];
        block.codes[2] = wide[8u + group / 4u * 2u];
        block.codes[3] = wide[9u + group / 4u * 2u];
        // Scales of the two groups of 16, and that of the block.
        block.scale = short_at(at, 48u, group) | (short_at(w, form.s, number / 8u) << 16);
        block.at = group;
        break;
    }
    default:
        block.w = w;
        block.form = form;
        block.row = row;
        block.at = b;
    }
    return block;
}

// ---- decoding

// Word i of a block's codes.
__device__ __forceinline__ u32 word_of(const uint4* codes, u32 i) {
    uint4 four = codes[i / 4u];
    return i % 4u == 0u ? four.x : i % 4u == 1u ? four.y : i % 4u == 2u ? four.z : four.w;
}

__device__ __forceinline__ void decode_block(const Block& block, float scale, uint4 (&out)[4]) {
    if (ENCODING == F16) {
#pragma unroll
        for (u32 i = 0u; i < 4u; i++) { out[i] = block.codes[i]; }
        return;
    }
    // scale2 codes + offset2, in q6_K with another scale for the second half
    u32 scale2 = 0u, upper2 = 0u, offset2 = 0u;
    float d = half_(block.scale & 0xffffu) * scale;
    switch (ENCODING) {
    case Q8_0: case Q4_0: case Q5_0: case IQ4_NL:
        scale2 = twice(d);
        break;
    case Q4_1: case Q5_1:
        scale2 = twice(d);
        offset2 = twice(half_(block.scale >> 16) * scale);
        break;
    case MXFP4:
        scale2 = twice(__uint_as_float(block.scale < 2u ? 0x00200000u << block.scale : (block.scale - 1u) << 23) * scale);
        break;
    case Q4_K: case Q5_K: {
        // Codes less the middle one: their offset is then small, and its rounding too.
        const u32 header[4] = {block.codes[2].x, block.codes[2].y, block.codes[2].z, block.codes[2].w};
        float2 sm = scale_min(header, block.at);
        float step = half_(header[0] & 0xffffu) * scale * sm.x;
        scale2 = twice(step);
        offset2 = twice(fmaf(step, ENCODING == Q4_K ? 8.0f : 16.0f, -(half_(header[0] >> 16) * scale * sm.y)));
        break;
    }
    case Q6_K:
        d = half_(block.scale >> 16) * scale;
        scale2 = twice(d * signed_byte(block.scale, 0u));
        upper2 = twice(d * signed_byte(block.scale, 1u));
        break;
    }
    u32 pairs[16];
#pragma unroll
    for (u32 i = 0u; i < 8u; i++) { // quads
        uint2 quad;
        u32 nibbles = (word_of(block.codes, i % 4u) >> (4u * (i / 4u))) & 0x0f0f0f0fu;
        u32 word = word_of(block.codes, i);
        switch (ENCODING) {
        case BF16:
            quad = make_uint2(word_of(block.codes, 2u * i), word_of(block.codes, 2u * i + 1u));
            quad.x = pack_half2(__uint_as_float(quad.x << 16) * scale, __uint_as_float(quad.x & 0xffff0000u) * scale);
            quad.y = pack_half2(__uint_as_float(quad.y << 16) * scale, __uint_as_float(quad.y & 0xffff0000u) * scale);
            break;
        case Q8_0: case INT8: quad = halves_of(word ^ 0x80808080u, 128u); break;
        case Q4_0: quad = halves_of(nibbles, 8u); break;
        case Q4_1: quad = halves_of(nibbles, 0u); break;
        case Q5_0: quad = halves_of(nibbles | spread(block.codes[1].x, 4u * i, 4u), 16u); break;
        case Q5_1: quad = halves_of(nibbles | spread(block.codes[1].x, 4u * i, 4u), 0u); break;
        // The tables of `iq4` and `fp4`, 128 above them.
        case IQ4_NL: quad = halves_of(looked_up(0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u, nibbles), 128u); break;
        case MXFP4: quad = halves_of(looked_up(0x83828180u, 0x8c888684u, 0x7d7e7f80u, 0x74787a7cu, nibbles), 128u); break;
        case Q4_K: quad = halves_of((word >> (4u * (block.at & 1u))) & 0x0f0f0f0fu, 8u); break;
        case Q5_K: {
            u32 low = (word >> (4u * (block.at & 1u))) & 0x0f0f0f0fu;
            u32 high = (word_of(block.codes + 3, i) >> block.at) & 0x01010101u;
            quad = halves_of(low | (high << 4), 16u);
            break;
        }
        case Q6_K: {
            u32 low = (word >> ((block.at & 3u) / 2u * 4u)) & 0x0f0f0f0fu;
            u32 high = (word_of(block.codes + 2, i) >> (2u * (block.at & 3u))) & 0x03030303u;
            quad = halves_of(low | (high << 4), 32u);
            break;
        }
        default: {
            float4 v = weights4(block.w, block.form, block.row, 8u * block.at + i);
            quad = make_uint2(pack_half2(v.x * scale, v.y * scale), pack_half2(v.z * scale, v.w * scale));
        }
        }
        if (ENCODING == Q4_1 || ENCODING == Q5_1 || ENCODING == Q4_K || ENCODING == Q5_K) {
            quad = make_uint2(fma_pairs(quad.x, scale2, offset2), fma_pairs(quad.y, scale2, offset2));
        } else if (ENCODING != BF16 && ENCODING != INT8 && !QUADS) {
            u32 factor = ENCODING == Q6_K && i >= 4u ? upper2 : scale2;
            quad = make_uint2(mul_pairs(quad.x, factor), mul_pairs(quad.y, factor));
        }
        pairs[2u * i] = quad.x;
        pairs[2u * i + 1u] = quad.y;
    }
#pragma unroll
    for (u32 i = 0u; i < 4u; i++) { out[i] = make_uint4(pairs[4u * i], pairs[4u * i + 1u], pairs[4u * i + 2u], pairs[4u * i + 3u]); }
}

// What undoes the scale in the sums of a row. f16 and int8 have not been scaled.
__device__ __forceinline__ float row_scale(const u32* w, const Form& form, u32 row, float scale) {
    if (ENCODING == INT8) { return __uint_as_float(w[form.s + row * (form.quads / 8u)]); }
    return ENCODING == F16 ? 1.0f : __uint_as_float(0x7f000000u - __float_as_uint(scale)); // 1 / scale
}

// Begins to bring a block closer that is loaded some steps later.
__device__ __forceinline__ void prefetch_block(const u32* w, const Form& form, u32 row, u32 b) {
    u32 number = row * (form.quads / 8u) + b;
    const u32* at = codes_at(w, form, row, b);
    switch (ENCODING) {
    case F16: case BF16:
        if (form.quads % 8u == 0u) { prefetch(at + 8); } // or the block may end before
        break;
    // Each thread another part of the 256 weights.
    case Q4_K: at += number % 8u * 5u; break;
    case Q5_K: at += number % 8u * 6u; break;
    case Q6_K: at += number % 8u * 7u; break;
    case Q8_0: case Q4_0: case Q5_0: case IQ4_NL: prefetch(w + form.s + number / 2u); break;
    case Q4_1: case Q5_1: prefetch(w + form.s + number); break;
    }
    prefetch(at);
}
