// Weights as they lie in memory, decoded four at a time.
//
//   weights4(row, c) = elements 4c .. 4c + 3 of a row
//
// A block's codes, then further codes (b), then scales (s) lie in regions of their own, so that every code is in an
// aligned word, and codes of blocks begin at multiples of 16 bytes. q4_K and q5_K lie block by block as in their files.
// The values are those of `kvist_device::weights`, in the same order of operations.

fn half_at(first: u32, i: u32) -> f32 {
    return half_((w[first + (i >> 1u)] >> (16u * (i & 1u))) & 0xffffu);
}

// Scale and minimum of group i of q4_K and q5_K, whose block begins at word `at`.
fn scale_min(at: u32, i: u32) -> vec2<f32> {
    let j = i & 3u;
    let low = byte_of(w[at + 1u], j);
    let mid = byte_of(w[at + 2u], j);
    let high = byte_of(w[at + 3u], j);
    if (i < 4u) {
        return vec2(f32(low & 63u), f32(mid & 63u));
    }
    return vec2(f32((high & 15u) | ((low >> 6u) << 4u)), f32((high >> 4u) | ((mid >> 6u) << 4u)));
}

fn weights4(form: Form, row: u32, c: u32) -> vec4<f32> {
    let quad = row * form.quads + c;
    let block = quad / 8u; // of 32 elements
    let i = quad % 8u;
    let super_block = quad / 64u; // of 256 elements
    let group = (quad / 8u) % 8u; // of 32 elements in it
    switch (ENCODING) {
        case F32: {
            let at = quad * 4u;
            return bitcast<vec4<f32>>(vec4(w[at], w[at + 1u], w[at + 2u], w[at + 3u]));
        }
        case F16: {
            let a = w[quad * 2u];
            let b = w[quad * 2u + 1u];
            return vec4(half_(a & 0xffffu), half_(a >> 16u), half_(b & 0xffffu), half_(b >> 16u));
        }
        case BF16: {
            let a = w[quad * 2u];
            let b = w[quad * 2u + 1u];
            return bitcast<vec4<f32>>(vec4(a << 16u, a & 0xffff0000u, b << 16u, b & 0xffff0000u));
        }
        case Q8_0: {
            return half_at(form.s, block) * signed4(w[quad]);
        }
        case Q4_0: {
            let codes = four(w[block * 4u + (i & 3u)], (i >> 2u) * 4u, 15u);
            return half_at(form.s, block) * (vec4<f32>(codes) - 8.0);
        }
        case Q4_1: {
            let codes = four(w[block * 4u + (i & 3u)], (i >> 2u) * 4u, 15u);
            return half_at(form.s, 2u * block) * vec4<f32>(codes) + half_at(form.s, 2u * block + 1u);
        }
        case Q5_0: {
            let low = four(w[block * 4u + (i & 3u)], (i >> 2u) * 4u, 15u);
            let codes = low | (bits4(w[form.b + block], 4u * i) << vec4(4u));
            return half_at(form.s, block) * (vec4<f32>(codes) - 16.0);
        }
        case Q5_1: {
            let low = four(w[block * 4u + (i & 3u)], (i >> 2u) * 4u, 15u);
            let codes = low | (bits4(w[form.b + block], 4u * i) << vec4(4u));
            return half_at(form.s, 2u * block) * vec4<f32>(codes) + half_at(form.s, 2u * block + 1u);
        }
        case IQ4_NL: {
            let codes = four(w[block * 4u + (i & 3u)], (i >> 2u) * 4u, 15u);
            return half_at(form.s, block) * vec4(iq4(codes.x), iq4(codes.y), iq4(codes.z), iq4(codes.w));
        }
        case MXFP4: {
            let codes = four(w[block * 4u + (i & 3u)], (i >> 2u) * 4u, 15u);
            let e = byte_of(w[form.s + block / 4u], block & 3u);
            // 2^(e - 128): the codes are doubled. Subnormal below e = 2.
            let scale = bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u));
            return scale * vec4(fp4(codes.x), fp4(codes.y), fp4(codes.z), fp4(codes.w));
        }
        case Q2_K: {
            let at = super_block * 20u;
            let codes = four(w[at + 4u + group / 4u * 8u + i], 2u * (group & 3u), 3u);
            let g = 2u * group + i / 4u;
            let scale = byte_of(w[at + g / 4u], g & 3u);
            let d = w[form.s + super_block];
            return half_(d & 0xffffu) * f32(scale & 15u) * vec4<f32>(codes) - half_(d >> 16u) * f32(scale >> 4u);
        }
        case Q3_K: {
            let at = super_block * 24u;
            let scales = form.b + super_block * 3u;
            let low = four(w[at + 8u + group / 4u * 8u + i], 2u * (group & 3u), 3u);
            let codes = low | (four(w[at + i], group, 1u) << vec4(2u));
            let g = 2u * group + i / 4u;
            let low_scale = (byte_of(w[scales + (g & 7u) / 4u], g & 3u) >> (4u * (g / 8u))) & 15u;
            let high_scale = (byte_of(w[scales + 2u], g & 3u) >> (2u * (g / 4u))) & 3u;
            let scale = f32(low_scale | (high_scale << 4u)) - 32.0;
            return half_at(form.s, super_block) * scale * (vec4<f32>(codes) - 4.0);
        }
        case Q4_K: {
            let at = super_block * 36u;
            let codes = four(w[at + 4u + group / 2u * 8u + i], 4u * (group & 1u), 15u);
            let sm = scale_min(at, group);
            let d = w[at];
            return half_(d & 0xffffu) * sm.x * vec4<f32>(codes) - half_(d >> 16u) * sm.y;
        }
        case Q5_K: {
            let at = super_block * 44u;
            let low = four(w[at + 12u + group / 2u * 8u + i], 4u * (group & 1u), 15u);
            let codes = low | (four(w[at + 4u + i], group, 1u) << vec4(4u));
            let sm = scale_min(at, group);
            let d = w[at];
            return half_(d & 0xffffu) * sm.x * vec4<f32>(codes) - half_(d >> 16u) * sm.y;
        }
        case Q6_K: {
            let at = super_block * 52u;
            let h = group / 4u;
            let quarter = group & 3u;
            let low = four(w[at + h * 16u + (quarter & 1u) * 8u + i], (quarter / 2u) * 4u, 15u);
            let codes = low | (four(w[at + 32u + h * 8u + i], 2u * quarter, 3u) << vec4(4u));
            let g = 2u * group + i / 4u;
            let scale = signed_byte(w[at + 48u + g / 4u], g & 3u);
            return half_at(form.s, super_block) * scale * (vec4<f32>(codes) - 32.0);
        }
        case IQ4_XS: {
            let codes = four(w[block * 4u + (i & 3u)], (i >> 2u) * 4u, 15u);
            let head = w[form.s + 2u * super_block];
            let low = (w[form.s + 2u * super_block + 1u] >> (4u * group)) & 15u;
            let high = (head >> (16u + 2u * group)) & 3u;
            let scale = f32(low | (high << 4u)) - 32.0;
            let values = vec4(iq4(codes.x), iq4(codes.y), iq4(codes.z), iq4(codes.w));
            return half_(head & 0xffffu) * scale * values;
        }
        case FEW: {
            let t = form.b + super_block * 8u; // the table, then scales
            let codes = four(w[block * 4u + (i & 3u)], (i >> 2u) * 4u, 15u);
            let g = 2u * group + i / 4u;
            let scale = signed_byte(w[t + 4u + g / 4u], g & 3u);
            let values = vec4(
                f32(byte_of(w[t + codes.x / 4u], codes.x & 3u)), f32(byte_of(w[t + codes.y / 4u], codes.y & 3u)),
                f32(byte_of(w[t + codes.z / 4u], codes.z & 3u)), f32(byte_of(w[t + codes.w / 4u], codes.w & 3u)));
            return bitcast<f32>(w[form.s + super_block]) * scale * (values - 128.0);
        }
        case INT8: {
            // Every block repeats the scale of its row.
            return bitcast<f32>(w[form.s + block]) * signed4(w[quad]);
        }
        default: {
            return vec4(0.0);
        }
    }
}
