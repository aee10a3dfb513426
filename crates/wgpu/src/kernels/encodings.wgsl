// Encodings of weights, and what their codes stand for.

const F32: u32 = 0u;
const F16: u32 = 1u;
const BF16: u32 = 2u;
const Q8_0: u32 = 3u;
const Q4_0: u32 = 4u;
const Q4_1: u32 = 5u;
const Q5_0: u32 = 6u;
const Q5_1: u32 = 7u;
const IQ4_NL: u32 = 8u;
const MXFP4: u32 = 9u;
const Q2_K: u32 = 10u;
const Q3_K: u32 = 11u;
const Q4_K: u32 = 12u;
const Q5_K: u32 = 13u;
const Q6_K: u32 = 14u;
const IQ4_XS: u32 = 15u;
const FEW: u32 = 16u;
const INT8: u32 = 17u;

const IS_FLOAT: bool = ENCODING <= BF16;

struct Form {
    quads: u32, // elements of a row / 4, rounded up
    b: u32,     // first word of the further codes
    s: u32,     // first word of the scales
}

// iq4_nl and iq4_xs: -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
const IQ4: array<u32, 4> = array(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);
// fp4, doubled: 0, 1, 2, 3, 4, 6, 8, 12, and the same negated
const FP4: array<u32, 4> = array(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);

// Bits `i .. i + 3` of a word, as 0 or 1.
fn bits4(word: u32, i: u32) -> vec4<u32> {
    return (vec4(word) >> vec4(i, i + 1u, i + 2u, i + 3u)) & vec4(1u);
}

fn iq4(code: u32) -> f32 {
    var table = IQ4;
    return signed_byte(table[code >> 2u], code & 3u);
}

fn fp4(code: u32) -> f32 {
    var table = FP4;
    return signed_byte(table[code >> 2u], code & 3u);
}
