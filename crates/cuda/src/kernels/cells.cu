// Stored rows of K or V, decoded.
//
//   Rows<..>::quad(row, c)      elements 4c .. 4c + 3 of a row, for 4c + 3 < DIM
//   Rows<..>::element(row, i)   element i of it
//
// A row is BYTES bytes of codes, then scales of two bytes each, as docs/device.md has them, padded to words. Elements are in
// stored order: reordered and rotated, if the storage does that. TYPE: 0 f32, 1 f16, 2 bf16, 3 q8, 4 q4, 5 t4 with LONG
// elements in a byte each; EACH elements share a scale.
template <u32 TYPE, u32 EACH, u32 LONG, u32 BYTES>
struct Rows {
    __device__ __forceinline__ static float scale(const u32* row, u32 p) {
        if (BYTES % 2u == 0u) { return half_(reinterpret_cast<const unsigned short*>(row)[BYTES / 2u + p]); }
        // Rows of odd lengths have scales that lie across words.
        const unsigned char* at = reinterpret_cast<const unsigned char*>(row) + BYTES + 2u * p;
        return half_(at[0] | ((u32)at[1] << 8));
    }

    // Code of a nibble dtype: element j of a group of `len` whose codes begin at byte `first` of the row.
    __device__ __forceinline__ static u32 nibble(const u32* row, u32 first, u32 len, u32 j) {
        u32 low = (len + 1u) / 2u;
        u32 byte = reinterpret_cast<const unsigned char*>(row)[first + (j >= low ? j - low : j)];
        return j >= low ? byte >> 4 : byte & 15u;
    }

    __device__ __forceinline__ static float element(const u32* row, u32 i) {
        if (TYPE == 0u) { return __uint_as_float(row[i]); }
        if (TYPE == 1u) { return half_(reinterpret_cast<const unsigned short*>(row)[i]); }
        if (TYPE == 2u) { return __uint_as_float((u32) reinterpret_cast<const unsigned short*>(row)[i] << 16); }
        if (TYPE == 3u || (TYPE == 5u && i < LONG)) {
            float code = (float)reinterpret_cast<const unsigned char*>(row)[i] - 128.0f;
            return scale(row, TYPE == 3u ? i / EACH : 0u) * code;
        }
        if (TYPE == 4u) {
            u32 g = i / EACH;
            u32 code = nibble(row, g * EACH / 2u, min(EACH, DIM - g * EACH), i - g * EACH);
            return scale(row, 2u * g) * (float)code + scale(row, 2u * g + 1u);
        }
        return scale(row, LONG > 0u ? 1u : 0u) * t4_level(nibble(row, LONG, DIM - LONG, i - LONG));
    }

    __device__ __forceinline__ static float4 quad(const u32* row, u32 c) {
        // Groups whose halves are whole words: those of all usual models.
        if (TYPE >= 4u && DIM % 8u != 0u) {
            u32 i = 4u * c;
            return make_float4(element(row, i), element(row, i + 1u), element(row, i + 2u), element(row, i + 3u));
        }
        if (TYPE == 0u) {
            return make_float4(
                __uint_as_float(row[4u * c]), __uint_as_float(row[4u * c + 1u]), __uint_as_float(row[4u * c + 2u]),
                __uint_as_float(row[4u * c + 3u]));
        }
        if (TYPE == 1u || TYPE == 2u) {
            u32 a = row[2u * c];
            u32 b = row[2u * c + 1u];
            if (TYPE == 1u) {
                return make_float4(half_(a & 0xffffu), half_(a >> 16), half_(b & 0xffffu), half_(b >> 16));
            }
            return make_float4(
                __uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u), __uint_as_float(b << 16),
                __uint_as_float(b & 0xffff0000u));
        }
        if (TYPE == 3u || (TYPE == 5u && 4u * c < LONG)) {
            return centred(scale(row, TYPE == 3u ? 4u * c / EACH : 0u), four(row[c], 0u, 255u), 128.0f);
        }
        if (TYPE == 4u) {
            u32 g = 4u * c / EACH;
            u32 low = min(EACH, DIM - g * EACH) / 2u;
            u32 j = 4u * c - g * EACH;
            bool high = j >= low;
            u32 word = row[(g * EACH / 2u + (high ? j - low : j)) / 4u];
            return above(scale(row, 2u * g), four(word, high ? 4u : 0u, 15u), scale(row, 2u * g + 1u));
        }
        u32 low = (DIM - LONG) / 2u;
        u32 j = 4u * c - LONG;
        bool high = j >= low;
        uint4 codes = four(row[(LONG + (high ? j - low : j)) / 4u], high ? 4u : 0u, 15u);
        float s = scale(row, LONG > 0u ? 1u : 0u);
        return make_float4(s * t4_level(codes.x), s * t4_level(codes.y), s * t4_level(codes.z), s * t4_level(codes.w));
    }
};
