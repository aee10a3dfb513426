// Weights as the fast kernels read them: an invocation takes a unit of a row at a time, with loads of 16 bytes.
//
//   UNIT_QUADS quads are a unit: 16 bytes of floats, half a block of q8_0 and int8, 32 elements of the others
//
// `fetch.wgsl` loads a unit, `quad_of` decodes a quad of it. The values are those of `weights4`, but for
// what F16 says.


// What was loaded of a unit.
struct Unit {
    a: vec4<u32>, // codes
    b: vec4<u32>, // more of them; of `few` the table
    c: vec4<u32>, // further codes
    d: vec4<u32>, // more of them
    scales: vec4<f32>, // scale and minimum; of q3_K, q6_K and `few` a scale for each half, of q2_K both for each half
    i: u32,       // which group of 32 elements of a block of 256
}

// Word i of eight.
fn word_of(low: vec4<u32>, high: vec4<u32>, i: u32) -> u32 {
    if (i < 4u) { return low[i]; }
    return high[i - 4u];
}

// Byte `code` of 16.
fn entry(table: vec4<u32>, code: u32) -> u32 {
    let low = select(table.x, table.y, (code & 4u) != 0u);
    let high = select(table.z, table.w, (code & 4u) != 0u);
    return byte_of(select(low, high, code >= 8u), code & 3u);
}

// Quad j of a unit; j is a constant wherever this is called.
fn quad_of(unit: Unit, j: u32) -> vec4<f32> {
    let scale = unit.scales.x;
    let minimum = unit.scales.y;
    switch (ENCODING) {
        case F32: { return bitcast<vec4<f32>>(unit.a); }
        case F16: {
            // By the driver, in a tenth of the instructions of `half_`. It may make subnormal numbers 0, which scales must not become.
            let words = select(unit.a.xy, unit.a.zw, j == 1u);
            return vec4(unpack2x16float(words.x), unpack2x16float(words.y));
        }
        case BF16: {
            let words = select(unit.a.xy, unit.a.zw, j == 1u);
            return bitcast<vec4<f32>>(vec4(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
        }
        case Q8_0, INT8: { return scale * signed4(unit.a[j & 3u]); }
        case Q4_K, Q5_K: {
            var codes = four(word_of(unit.a, unit.b, j), 4u * (unit.i & 1u), 15u);
            if (ENCODING == Q5_K) { codes |= four(word_of(unit.c, unit.d, j), unit.i, 1u) << vec4(4u); }
            return scale * vec4<f32>(codes) - minimum;
        }
        case Q6_K: {
            let quarter = unit.i & 3u;
            let low = four(word_of(unit.a, unit.b, j), (quarter / 2u) * 4u, 15u);
            let codes = low | (four(word_of(unit.c, unit.d, j), 2u * quarter, 3u) << vec4(4u));
            return select(minimum, scale, j < 4u) * (vec4<f32>(codes) - 32.0);
        }
        case Q2_K: {
            let codes = four(word_of(unit.a, unit.b, j), 2u * (unit.i & 3u), 3u);
            let both = select(unit.scales.zw, unit.scales.xy, j < 4u);
            return both.x * vec4<f32>(codes) - both.y;
        }
        case Q3_K: {
            let low = four(word_of(unit.a, unit.b, j), 2u * (unit.i & 3u), 3u);
            let codes = low | (four(word_of(unit.c, unit.d, j), unit.i, 1u) << vec4(2u));
            return select(minimum, scale, j < 4u) * (vec4<f32>(codes) - 4.0);
        }
        default: {}
    }
    let low = four(unit.a[j & 3u], (j >> 2u) * 4u, 15u);
    switch (ENCODING) {
        case Q4_0: { return scale * (vec4<f32>(low) - 8.0); }
        case Q4_1: { return scale * vec4<f32>(low) + minimum; }
        case Q5_0: { return scale * (vec4<f32>(low | (bits4(unit.c.x, 4u * j) << vec4(4u))) - 16.0); }
        case Q5_1: { return scale * vec4<f32>(low | (bits4(unit.c.x, 4u * j) << vec4(4u))) + minimum; }
        case IQ4_NL, IQ4_XS: { return scale * vec4(iq4(low.x), iq4(low.y), iq4(low.z), iq4(low.w)); }
        case MXFP4: { return scale * vec4(fp4(low.x), fp4(low.y), fp4(low.z), fp4(low.w)); }
        case FEW: {
            let values = vec4(entry(unit.b, low.x), entry(unit.b, low.y), entry(unit.b, low.z), entry(unit.b, low.w));
            return select(minimum, scale, j < 4u) * (vec4<f32>(values) - 128.0);
        }
        default: { return vec4(0.0); }
    }
}
