// Units of one matrix, loaded. Included once per matrix: `matrix_` becomes a name of it.

fn matrix_word(i: u32) -> u32 {
    return matrix_words[i >> 2u][i & 3u];
}

fn matrix_half(first: u32, i: u32) -> f32 {
    return half_((matrix_word(first + (i >> 1u)) >> (16u * (i & 1u))) & 0xffffu);
}

// Units of a row: the last one of floats can be a part of one.
fn matrix_units(form: Form) -> u32 {
    return (form.quads + UNIT_QUADS - 1u) / UNIT_QUADS;
}

fn matrix_fetch(form: Form, row: u32, unit: u32) -> Unit {
    var out: Unit;
    let n = row * (form.quads / UNIT_QUADS) + unit; // in blocks of whole units
    switch (ENCODING) {
        case F32: { out.a = matrix_words[n]; }
        case F16, BF16: {
            if (form.quads % 2u == 0u) {
                out.a = matrix_words[n];
            } else {
                // Every other row begins within 16 bytes.
                let word = 2u * (row * form.quads + 2u * unit);
                out.a = vec4(matrix_word(word), matrix_word(word + 1u), 0u, 0u);
                if (2u * unit + 1u < form.quads) {
                    out.a.z = matrix_word(word + 2u);
                    out.a.w = matrix_word(word + 3u);
                }
            }
        }
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
        case Q2_K: {
            let group = n & 7u;
            let at = n / 8u * 5u; // of 16 bytes
            let codes = at + 1u + group / 4u * 2u;
            out.a = matrix_words[codes];
            out.b = matrix_words[codes + 1u];
            let both = matrix_word(4u * at + group / 2u) >> (16u * (group & 1u));
            let d = matrix_word(form.s + n / 8u);
            let scale = half_(d & 0xffffu);
            let minimum = half_(d >> 16u);
            out.scales = vec4(
                scale * f32(both & 15u), minimum * f32((both >> 4u) & 15u),
                scale * f32((both >> 8u) & 15u), minimum * f32((both >> 12u) & 15u));
            out.i = group;
        }
        case Q3_K: {
            let group = n & 7u;
            let at = n / 8u * 6u; // of 16 bytes
            let codes = at + 2u + group / 4u * 2u;
            out.a = matrix_words[codes];
            out.b = matrix_words[codes + 1u];
            out.c = matrix_words[at];
            out.d = matrix_words[at + 1u];
            let scales = form.b + n / 8u * 3u;
            // Bytes 2 group and 2 group + 1 of 16, each with four bits here and two there.
            let low = matrix_word(scales + (group & 3u) / 2u) >> (16u * (group & 1u) + 4u * (group / 4u));
            let high = matrix_word(scales + 2u) >> (16u * (group & 1u) + 2u * (group / 2u));
            let d = matrix_half(form.s, n / 8u);
            out.scales.x = d * (f32((low & 15u) | ((high & 3u) << 4u)) - 32.0);
            out.scales.y = d * (f32(((low >> 8u) & 15u) | (((high >> 8u) & 3u) << 4u)) - 32.0);
            out.i = group;
        }
        case IQ4_XS: {
            let group = n & 7u;
            out.a = matrix_words[n];
            let head = matrix_word(form.s + n / 8u * 2u);
            let low = (matrix_word(form.s + n / 8u * 2u + 1u) >> (4u * group)) & 15u;
            let high = (head >> (16u + 2u * group)) & 3u;
            out.scales.x = half_(head & 0xffffu) * (f32(low | (high << 4u)) - 32.0);
        }
        case FEW: {
            let group = n & 7u;
            let table = form.b + n / 8u * 8u; // and scales
            out.a = matrix_words[n];
            out.b = matrix_words[table >> 2u];
            let scales = matrix_word(table + 4u + group / 2u);
            let d = bitcast<f32>(matrix_word(form.s + n / 8u));
            out.scales.x = d * signed_byte(scales, 2u * (group & 1u));
            out.scales.y = d * signed_byte(scales, 2u * (group & 1u) + 1u);
        }
        default: {}
    }
    return out;
}
