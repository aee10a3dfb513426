// Weights in blocks as the fast kernels read them: an invocation takes a unit of a row at a time, with loads of 16 bytes.
//
//   UNIT_QUADS quads are a unit: half a block of q8_0 and int8, a block of 32 elements of the others
//
// `fetch.wgsl` loads a unit, `quad_of` decodes a quad of it. The values are those of `weights4`.


// What was loaded of a unit.
struct Unit {
    a: vec4<u32>, // codes
    b: vec4<u32>, // more of them
    c: vec4<u32>, // further codes
    d: vec4<u32>, // more of them
    scales: vec4<f32>, // scale and minimum; of q6_K a scale for each half
    i: u32,       // which group of 32 elements of a block of 256
}

// Word i of eight.
fn word_of(low: vec4<u32>, high: vec4<u32>, i: u32) -> u32 {
    if (i < 4u) { return low[i]; }
    return high[i - 4u];
}

// Quad j of a unit; j is a constant wherever this is called.
fn quad_of(unit: Unit, j: u32) -> vec4<f32> {
    let scale = unit.scales.x;
    let minimum = unit.scales.y;
    switch (ENCODING) {
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
        default: {}
    }
    let low = four(unit.a[j & 3u], (j >> 2u) * 4u, 15u);
    switch (ENCODING) {
        case Q4_0: { return scale * (vec4<f32>(low) - 8.0); }
        case Q4_1: { return scale * vec4<f32>(low) + minimum; }
        case Q5_0: { return scale * (vec4<f32>(low | (bits4(unit.c.x, 4u * j) << vec4(4u))) - 16.0); }
        case Q5_1: { return scale * vec4<f32>(low | (bits4(unit.c.x, 4u * j) << vec4(4u))) + minimum; }
        case IQ4_NL: { return scale * vec4(iq4(low.x), iq4(low.y), iq4(low.z), iq4(low.w)); }
        case MXFP4: { return scale * vec4(fp4(low.x), fp4(low.y), fp4(low.z), fp4(low.w)); }
        default: { return vec4(0.0); }
    }
}
