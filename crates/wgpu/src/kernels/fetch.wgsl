// Units of one matrix, loaded. Included once per matrix: `matrix_` becomes a name of it.

fn matrix_word(i: u32) -> u32 {
    return matrix_words[i >> 2u][i & 3u];
}

fn matrix_half(first: u32, i: u32) -> f32 {
    return half_((matrix_word(first + (i >> 1u)) >> (16u * (i & 1u))) & 0xffffu);
}

fn matrix_fetch(form: Form, row: u32, unit: u32) -> Unit {
    var out: Unit;
    let n = row * (form.quads / UNIT_QUADS) + unit;
    switch (ENCODING) {
        case Q8_0: {
            out.a = matrix_words[n];
            out.scales.x = matrix_half(form.s, n / 2u);
        }
        case INT8: {
            out.a = matrix_words[n];
            out.scales.x = bitcast<f32>(matrix_word(form.s + n / 2u));
        }
        case Q4_0, IQ4_NL: {
            out.a = matrix_words[n];
            out.scales.x = matrix_half(form.s, n);
        }
        case MXFP4: {
            out.a = matrix_words[n];
            let e = byte_of(matrix_word(form.s + n / 4u), n & 3u);
            // 2^(e - 128): the codes are doubled. Subnormal below e = 2.
            out.scales.x = bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u));
        }
        case Q4_1, Q5_0, Q5_1: {
            out.a = matrix_words[n];
            if (ENCODING != Q4_1) { out.c.x = matrix_word(form.b + n); }
            if (ENCODING == Q5_0) {
                out.scales.x = matrix_half(form.s, n);
            } else {
                let both = matrix_word(form.s + n);
                out.scales.x = half_(both & 0xffffu);
                out.scales.y = half_(both >> 16u);
            }
        }
        case Q4_K, Q5_K: {
            let group = n & 7u;
            let at = n / 8u * select(9u, 11u, ENCODING == Q5_K); // of 16 bytes
            let head = matrix_words[at];
            let codes = at + select(1u, 3u, ENCODING == Q5_K) + group / 2u * 2u;
            out.a = matrix_words[codes];
            out.b = matrix_words[codes + 1u];
            if (ENCODING == Q5_K) {
                out.c = matrix_words[at + 1u];
                out.d = matrix_words[at + 2u];
            }
            let low = byte_of(head.y, group & 3u);
            let mid = byte_of(head.z, group & 3u);
            let high = byte_of(head.w, group & 3u);
            let scale = select((high & 15u) | ((low >> 6u) << 4u), low & 63u, group < 4u);
            let minimum = select((high >> 4u) | ((mid >> 6u) << 4u), mid & 63u, group < 4u);
            out.scales.x = half_(head.x & 0xffffu) * f32(scale);
            out.scales.y = half_(head.x >> 16u) * f32(minimum);
            out.i = group;
        }
        case Q6_K: {
            let group = n & 7u;
            let at = n / 8u * 13u; // of 16 bytes
            let low = at + group / 4u * 4u + (group & 1u) * 2u;
            out.a = matrix_words[low];
            out.b = matrix_words[low + 1u];
            let high = at + 8u + group / 4u * 2u;
            out.c = matrix_words[high];
            out.d = matrix_words[high + 1u];
            let scales = matrix_words[at + 12u][group / 2u];
            let d = matrix_half(form.s, n / 8u);
            out.scales.x = d * signed_byte(scales, 2u * (group & 1u));
            out.scales.y = d * signed_byte(scales, 2u * (group & 1u) + 1u);
            out.i = group;
        }
        default: {}
    }
    return out;
}
