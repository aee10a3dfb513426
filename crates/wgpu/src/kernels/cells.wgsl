// Stored rows of one side, K or V, decoded. Included once per side: `side_` becomes `k_` or `v_`.
//
//   side_quad(at, c)      elements 4c .. 4c + 3 of the row that begins at word `at`, for 4c + 3 < DIM
//   side_element(at, i)   element i of it
//
// A row is SIDE_CODES bytes of codes, then scales of two bytes each, as docs/device.md has them, padded to words. Elements
// are in stored order: reordered and rotated, if the storage does that.

fn side_scale(at: u32, p: u32) -> f32 {
    let byte = SIDE_CODES + 2u * p;
    var bits = side_pool[at + byte / 4u] >> (8u * (byte & 3u));
    // Only rows of odd lengths have scales that reach into the next word.
    if (SIDE_CODES % 2u == 1u && (byte & 3u) == 3u) { bits |= side_pool[at + byte / 4u + 1u] << 8u; }
    return half_(bits & 0xffffu);
}

// Code of a nibble dtype: element j of a group of `len` whose codes begin at byte `first` of the row.
fn side_nibble(at: u32, first: u32, len: u32, j: u32) -> u32 {
    let low = (len + 1u) / 2u;
    let high = j >= low;
    let byte = first + select(j, j - low, high);
    return (side_pool[at + byte / 4u] >> (8u * (byte & 3u) + select(0u, 4u, high))) & 15u;
}

fn side_element(at: u32, i: u32) -> f32 {
    switch (SIDE_DTYPE) {
        case 0u: { return bitcast<f32>(side_pool[at + i]); }
        case 1u: { return element_((side_pool[at + i / 2u] >> (16u * (i & 1u))) & 0xffffu); }
        case 2u: { return bitcast<f32>((side_pool[at + i / 2u] >> (16u * (i & 1u))) << 16u); }
        case 3u: {
            let code = f32(byte_of(side_pool[at + i / 4u], i & 3u)) - 128.0;
            return side_scale(at, i / SIDE_GROUP) * code;
        }
        case 4u: {
            let g = i / SIDE_GROUP;
            let len = min(SIDE_GROUP, DIM - g * SIDE_GROUP);
            let code = side_nibble(at, g * SIDE_GROUP / 2u, len, i - g * SIDE_GROUP);
            return side_scale(at, 2u * g) * f32(code) + side_scale(at, 2u * g + 1u);
        }
        default: {
            if (i < SIDE_WIDE) {
                return side_scale(at, 0u) * (f32(byte_of(side_pool[at + i / 4u], i & 3u)) - 128.0);
            }
            let code = side_nibble(at, SIDE_WIDE, DIM - SIDE_WIDE, i - SIDE_WIDE);
            return side_scale(at, select(0u, 1u, SIDE_WIDE > 0u)) * t4_level(code);
        }
    }
}

fn side_quad(at: u32, c: u32) -> vec4<f32> {
    // Groups whose halves are whole words: those of all usual models.
    if (SIDE_DTYPE >= 4u && DIM % 8u != 0u) {
        let i = 4u * c;
        return vec4(side_element(at, i), side_element(at, i + 1u), side_element(at, i + 2u), side_element(at, i + 3u));
    }
    switch (SIDE_DTYPE) {
        case 0u: {
            let i = at + 4u * c;
            return bitcast<vec4<f32>>(vec4(side_pool[i], side_pool[i + 1u], side_pool[i + 2u], side_pool[i + 3u]));
        }
        case 1u: {
            let a = side_pool[at + 2u * c];
            let b = side_pool[at + 2u * c + 1u];
            return vec4(element_(a & 0xffffu), element_(a >> 16u), element_(b & 0xffffu), element_(b >> 16u));
        }
        case 2u: {
            let a = side_pool[at + 2u * c];
            let b = side_pool[at + 2u * c + 1u];
            return bitcast<vec4<f32>>(vec4(a << 16u, a & 0xffff0000u, b << 16u, b & 0xffff0000u));
        }
        case 3u: {
            let codes = vec4<f32>(four(side_pool[at + c], 0u, 255u)) - 128.0;
            return side_scale(at, 4u * c / SIDE_GROUP) * codes;
        }
        case 4u: {
            let g = 4u * c / SIDE_GROUP;
            let low = min(SIDE_GROUP, DIM - g * SIDE_GROUP) / 2u;
            let j = 4u * c - g * SIDE_GROUP;
            let high = j >= low;
            let word = side_pool[at + (g * SIDE_GROUP / 2u + select(j, j - low, high)) / 4u];
            let codes = vec4<f32>(four(word, select(0u, 4u, high), 15u));
            return side_scale(at, 2u * g) * codes + side_scale(at, 2u * g + 1u);
        }
        default: {
            if (4u * c < SIDE_WIDE) {
                return side_scale(at, 0u) * (vec4<f32>(four(side_pool[at + c], 0u, 255u)) - 128.0);
            }
            let low = (DIM - SIDE_WIDE) / 2u;
            let j = 4u * c - SIDE_WIDE;
            let high = j >= low;
            let codes = four(side_pool[at + (SIDE_WIDE + select(j, j - low, high)) / 4u], select(0u, 4u, high), 15u);
            let levels = vec4(t4_level(codes.x), t4_level(codes.y), t4_level(codes.z), t4_level(codes.w));
            return side_scale(at, select(0u, 1u, SIDE_WIDE > 0u)) * levels;
        }
    }
}
