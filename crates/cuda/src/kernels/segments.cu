// Weights of encodings in blocks, decoded for tensor cores.
//
// Every encoding has whole numbers of at most eight bits, with a scale and perhaps an offset for at least 16 elements. A tile is
// 256 elements of a row, 16 segments of 16 elements. Four lanes share it; lane t decodes four segments, k = 0 .. 3, chosen so
// that the four lanes load bytes that lie together. Whole numbers become f16, exactly; scale and offset are for the sum.
//
// A whole number n >= 0 becomes an f16 by nothing but its place: the bits of n are those of the subnormal number 2^-24 n. Numbers
// that may be negative are made from 1024 + n, whose bits are 0x6400 | n. q4_0 takes the first way, and its 8 are a part of the
// offset: a sum of 16 products loses less than three bits by that. Larger numbers would lose more.

#if ENCODING == Q4_0 || ENCODING == Q4_1 || ENCODING == Q5_1 || ENCODING == Q2_K || ENCODING == Q4_K || ENCODING == Q5_K
#define HAS_OFFSET 1
#else
#define HAS_OFFSET 0
#endif

// What a lane has loaded of a tile. An encoding uses a part of it.
struct Raw {
    uint4 codes[4];
    uint4 high[2];
    uint4 head;
    u32 scales[4];

    __device__ __forceinline__ Raw() : scales{0u, 0u, 0u, 0u} {}
};

// Segment k of lane t: which of its tile, and back.
__device__ __forceinline__ uint2 place_of(u32 segment) {
    u32 group = segment / 2u; // of 32 elements
    u32 odd = segment % 2u;
    switch (ENCODING) {
    case Q8_0:
    case INT8: return make_uint2(segment % 4u, segment / 4u);
    case Q2_K:
    case Q3_K: return make_uint2(group / 4u * 2u + odd, group % 4u);
    case Q4_K:
    case Q5_K: return make_uint2(group / 2u % 2u * 2u + odd, group / 4u * 2u + group % 2u);
    case Q6_K: return make_uint2(group % 2u * 2u + odd, group / 4u * 2u + group % 4u / 2u);
    default: return make_uint2(group % 4u, group / 4u * 2u + odd);
    }
}

// Loads what segment k of a tile needs. To be called for k = 0 .. 3, each when that segment of the tile before is done: what several
// segments share is loaded at the last of them. `before`: quads of the rows before this one. Behind the end of a row codes and
// scales stay as they are: inputs are 0 there.
__device__ __forceinline__ void fetch(Raw& raw, const u32* __restrict__ w, Form form, u32 before, u32 tile, u32 k, u32 t) {
    u32 m = k / 2u;
    u32 super_block = before / 64u + tile;
    switch (ENCODING) {
    case Q8_0:
    case INT8: {
        u32 quad = tile * 64u + 16u * k + 4u * t; // of the row
        if (quad >= form.quads) { return; }
        quad += before;
        raw.codes[k] = load4(w, quad);
        raw.scales[k] = ENCODING == Q8_0 ? load_half(w, form.s, quad / 8u) : load1(w, form.s + quad / 8u);
        return;
    }
    case Q2_K: {
        if (k < 3u) { return; }
        u32 at = super_block * 20u;
        raw.codes[0] = load4(w, at + 4u + 4u * t);
        raw.scales[0] = load1(w, at + t / 2u * 2u);
        raw.scales[1] = load1(w, at + t / 2u * 2u + 1u);
        raw.scales[2] = load1(w, form.s + super_block);
        return;
    }
    case Q3_K: {
        if (k < 3u) { return; }
        u32 at = super_block * 24u;
        u32 scales = form.b + super_block * 3u;
        raw.codes[0] = load4(w, at + 8u + 4u * t);
        raw.high[0] = load4(w, at + t % 2u * 4u);
        raw.scales[0] = load1(w, scales);
        raw.scales[1] = load1(w, scales + 1u);
        raw.scales[2] = load1(w, scales + 2u);
        raw.scales[3] = load_half(w, form.s, super_block);
        return;
    }
    case Q4_K: {
        u32 at = super_block * 36u;
        if (k % 2u == 1u) { raw.codes[m] = load4(w, at + 4u + 16u * m + 4u * t); }
        if (k == 3u) { raw.head = load4(w, at); }
        return;
    }
    case Q5_K: {
        u32 at = super_block * 44u;
        if (k % 2u == 1u) { raw.codes[m] = load4(w, at + 12u + 16u * m + 4u * t); }
        if (k == 3u) {
            raw.high[0] = load4(w, at + 4u + t % 2u * 4u);
            raw.head = load4(w, at);
        }
        return;
    }
    case Q6_K: {
        u32 at = super_block * 52u;
        if (k % 2u == 1u) {
            raw.codes[m] = load4(w, at + 16u * m + 4u * t);
            raw.high[m] = load4(w, at + 32u + 8u * m + t % 2u * 4u);
        }
        if (k == 3u) {
            raw.head = load4(w, at + 48u);
            raw.scales[0] = load_half(w, form.s, super_block);
        }
        return;
    }
    case IQ4_XS: {
        if (k % 2u == 1u) { raw.codes[m] = load4(w, super_block * 32u + 4u * (4u * m + t)); }
        if (k == 3u) {
            uint2 head = load2(w, form.s + super_block * 2u);
            raw.scales[0] = head.x;
            raw.scales[1] = head.y;
        }
        return;
    }
    case FEW: {
        u32 table = form.b + super_block * 8u; // and scales
        if (k % 2u == 1u) {
            raw.codes[m] = load4(w, super_block * 32u + 4u * (4u * m + t));
            raw.scales[1u + m] = load1(w, table + 4u + 2u * m + t / 2u);
        }
        if (k == 3u) {
            raw.head = load4(w, table);
            raw.scales[0] = load1(w, form.s + super_block);
        }
        return;
    }
    default: { // blocks of 32 elements, four bits of each in 16 bytes
        if (k % 2u == 0u) { return; }
        u32 block = tile * 8u + 4u * m + t; // of the row
        if (block >= form.quads / 8u) { return; }
        block += before / 8u;
        raw.codes[m] = load4(w, block * 4u);
        if (ENCODING == Q5_0 || ENCODING == Q5_1) { raw.scales[2u + m] = load1(w, form.b + block); }
        if (ENCODING == Q4_1 || ENCODING == Q5_1) {
            raw.scales[m] = load1(w, form.s + block);
        } else if (ENCODING == MXFP4) {
            raw.scales[m] = load_byte(w, form.s, block);
        } else {
            raw.scales[m] = load_half(w, form.s, block);
        }
    }
    }
}

// A decoded segment: of each of its quads the f16 of elements 0 and 2, then of 1 and 3.
struct Segment {
    u32 codes[8];
    float scale;
    float offset;
};

// -(1024 + n) in both halves
#define F16_LESS(n) (0xe400e400u + 0x10001u * (n))

// What puts 1024 before a byte, in both halves, and flips the sign bit of a signed one, which then is 128 more.
#define BEFORE_BYTES (ENCODING == Q8_0 || ENCODING == INT8 ? 0x64806480u : 0x64006400u)

// Four bytes less `middle`. `base`: BEFORE_BYTES in a register, or the compiler copies it to one for each use.
__device__ __forceinline__ void put_centred(u32* to, u32 word, u32 middle, u32 base) {
    to[0] = add_pairs((word & 0x00ff00ffu) ^ base, F16_LESS(middle));
    to[1] = add_pairs(((word >> 8) & 0x00ff00ffu) ^ base, F16_LESS(middle));
}

// The bits of `mask` of four bytes, times 2^-24.
__device__ __forceinline__ void put_small(u32* to, u32 word, u32 mask) {
    to[0] = word & mask;
    to[1] = (word >> 8) & mask;
}

// Entries of a table of 16 bytes for the low or high four bits of four bytes. The table's bytes are 128 more than its entries.
__device__ __forceinline__ void put_entries(u32* to, u32 word, bool high, uint4 table, u32 base) {
    u32 low_bits = word & 0x77777777u;
    u32 high_bit = (word & 0x88888888u) >> 1;
    // Entries for nibbles 0 .. 3 of the word, which are of bytes 0, 0, 1, 1; then of the others.
    u32 first = __byte_perm(
        __byte_perm(table.x, table.y, low_bits), __byte_perm(table.z, table.w, low_bits), 0x3210u | (high_bit & 0xffffu));
    u32 second = __byte_perm(
        __byte_perm(table.x, table.y, low_bits >> 16), __byte_perm(table.z, table.w, low_bits >> 16),
        0x3210u | (high_bit >> 16));
    u32 even = __byte_perm(first, second, high ? 0x0501u : 0x0400u);
    u32 odd = __byte_perm(first, second, high ? 0x0703u : 0x0602u);
    to[0] = add_pairs((even & 0x00ff00ffu) ^ base, F16_LESS(128u));
    to[1] = add_pairs((odd & 0x00ff00ffu) ^ base, F16_LESS(128u));
}

// fp4 in the low or high four bits of four bytes, times 2^-14: sign, exponent and mantissa are moved to their places in an f16, and
// the exponents of 0 are those of subnormal numbers in both.
__device__ __forceinline__ void put_fp4(u32* to, u32 word, bool high) {
    if (high) {
        to[0] = ((word << 8) & 0x80008000u) | ((word << 5) & 0x0e000e00u);
        to[1] = (word & 0x80008000u) | ((word >> 3) & 0x0e000e00u);
    } else {
        to[0] = ((word << 12) & 0x80008000u) | ((word << 9) & 0x0e000e00u);
        to[1] = ((word << 4) & 0x80008000u) | ((word << 1) & 0x0e000e00u);
    }
}

// n times 2^24, or 2^20 if the codes are 16 times too large: undoes what `put_small` divides by.
__device__ __forceinline__ float scaled(u32 n, bool high) {
    u32 power = high ? 0x0a000000u : 0x0c000000u;
    return __uint_as_float((0x4b000000u + power) | n) - __uint_as_float(0x4b000000u + power);
}
#define SCALED(x, high) ((x) * ((high) ? 1048576.0f : 16777216.0f))

// Scale and minimum of a group of q4_K and q5_K: m is which half of the block it is in, `group` which one of that half.
__device__ __forceinline__ void put_scale_min(Segment& to, uint4 head, u32 m, u32 group, bool is_high) {
    u32 low = head.y >> (8u * group), mid = head.z >> (8u * group), high = head.w >> (8u * group);
    u32 scale = m == 0u ? low & 63u : (high & 15u) | ((low >> 2) & 48u);
    u32 minimum = m == 0u ? mid & 63u : ((high >> 4) & 15u) | ((mid >> 2) & 48u);
    float2 d = unpair(head.x);
    to.scale = d.x * scaled(scale, is_high);
    to.offset = -(d.y * small(minimum));
}

__device__ __forceinline__ Segment decode(const Raw& raw, u32 k, u32 t, u32 base) {
    Segment to;
    to.offset = 0.0f;
    u32 m = k / 2u;
    bool high = k % 2u == 1u;
    u32 shift = k % 2u * 4u;
    u32 odd = t % 2u;
#pragma unroll
    for (u32 i = 0u; i < 4u; i++) {
        u32* codes = to.codes + 2u * i;
        u32 word = word_of(raw.codes[m], i);
        switch (ENCODING) {
        case Q8_0:
        case INT8: put_centred(codes, word_of(raw.codes[k], i), 128u, base); break;
        case Q4_0:
        case Q4_1:
        case Q4_K: put_small(codes, word, high ? 0x00f000f0u : 0x000f000fu); break;
        case Q5_0:
        case Q5_1: {
            // Four bits of four elements, each to bit 4 of a byte.
            u32 bits = (raw.scales[2u + m] >> (4u * shift + 4u * i)) & 15u;
            bits = ((bits * 0x00204081u) & 0x01010101u) << 4;
            word = ((word >> shift) & 0x0f0f0f0fu) | bits;
            if (ENCODING == Q5_0) {
                put_centred(codes, word, 16u, base);
            } else {
                put_small(codes, word, 0x00ff00ffu);
            }
            break;
        }
        case IQ4_NL:
        case IQ4_XS:
            put_entries(codes, word, high, make_uint4(0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u), base);
            break;
        case MXFP4: put_fp4(codes, word, high); break;
        case FEW: put_entries(codes, word, high, raw.head, base); break;
        case Q2_K: put_small(codes, word_of(raw.codes[0], i) >> (2u * k), 0x00030003u); break;
        case Q3_K: {
            u32 group = t / 2u * 4u + k;
            u32 bits = ((word_of(raw.high[0], i) >> group) & 0x01010101u) << 2;
            put_centred(codes, ((word_of(raw.codes[0], i) >> (2u * k)) & 0x03030303u) | bits, 4u, base);
            break;
        }
        case Q5_K: {
            u32 group = 4u * m + t / 2u * 2u + k % 2u;
            u32 bits = ((word_of(raw.high[0], i) >> group) & 0x01010101u) << 4;
            put_small(codes, ((word >> shift) & 0x0f0f0f0fu) | bits, 0x00ff00ffu);
            break;
        }
        case Q6_K: {
            u32 quarter = t / 2u + k % 2u * 2u;
            u32 bits = ((word_of(raw.high[m], i) >> (2u * quarter)) & 0x03030303u) << 4;
            put_centred(codes, ((word >> shift) & 0x0f0f0f0fu) | bits, 32u, base);
            break;
        }
        }
    }
    switch (ENCODING) {
    case Q8_0: to.scale = half_(raw.scales[k]); break;
    case INT8: to.scale = __uint_as_float(raw.scales[k]); break;
    case Q4_0: {
        float scale = half_(raw.scales[m]);
        to.scale = SCALED(scale, high);
        to.offset = -8.0f * scale;
        break;
    }
    case Q4_1:
    case Q5_1: {
        float2 both = unpair(raw.scales[m]);
        to.scale = SCALED(both.x, ENCODING == Q4_1 && high);
        to.offset = both.y;
        break;
    }
    case MXFP4: {
        // 2^(e - 127 + 14), infinite from e = 241 on, which no weights have; 2^(e - 128) is subnormal below e = 2.
        u32 e = raw.scales[m];
        to.scale = 32768.0f * __uint_as_float(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
        break;
    }
    case Q2_K: {
        u32 both = byte_of(raw.scales[m], k % 2u * 2u + odd);
        float2 d = unpair(raw.scales[2]);
        to.scale = d.x * scaled(both & 15u, false);
        to.offset = -(d.y * small(both >> 4));
        break;
    }
    case Q3_K: {
        u32 g = k % 2u * 2u + odd;
        u32 low_scale = (byte_of(raw.scales[m], g) >> (t / 2u * 4u)) & 15u;
        u32 high_scale = (byte_of(raw.scales[2], g) >> (2u * (t / 2u * 2u + m))) & 3u;
        to.scale = half_(raw.scales[3]) * (small(low_scale | (high_scale << 4)) - 32.0f);
        break;
    }
    case Q4_K:
    case Q5_K: put_scale_min(to, raw.head, m, t / 2u * 2u + k % 2u, ENCODING == Q4_K && high); break;
    case Q6_K: {
        // Byte 2 group + odd, with group = 4 m + t / 2 + 2 (k % 2), of which t / 2 and odd are the lane's.
        u32 word = word_of(raw.head, k);
        to.scale = half_(raw.scales[0]) * (small(byte_of(word, t) ^ 128u) - 128.0f);
        break;
    }
    case IQ4_XS: {
        u32 group = 4u * m + t;
        u32 low = (raw.scales[1] >> (4u * group)) & 15u;
        u32 high_bits = (raw.scales[0] >> (16u + 2u * group)) & 3u;
        to.scale = half_(raw.scales[0] & 0xffffu) * (small(low | (high_bits << 4)) - 32.0f);
        break;
    }
    case FEW: {
        u32 byte = byte_of(raw.scales[1u + m], odd * 2u + k % 2u);
        to.scale = __uint_as_float(raw.scales[0]) * (small(byte ^ 128u) - 128.0f);
        break;
    }
    default: to.scale = half_(raw.scales[m]);
    }
    return to;
}
