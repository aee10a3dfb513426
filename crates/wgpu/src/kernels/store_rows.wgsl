// New rows of K or V as a pool stores them. All THREADS invocations of a workgroup store one row, which lies in `row`.
//
//   y = row                                                      in the order of `order`, if WIDE > 0; rotated, see turn.wgsl
//   pool row = codes(y), scales(y)                               see cells.wgsl
//   recent row = f16(y)                                          keys before order and rotation, values after them
//
//   q8: scale = max |y| / 127 of a group;  code = round(y / scale) + 128
//   q4: minimum = min y, scale = (max y - minimum) / 15;  code = round((y - minimum) / scale)
//   t4: unit = root mean square * 2.7326 / 127;  code = number of the nearest level;  scale so that the length of y is kept
//
// Scales are rounded to f16 first, and codes are computed from what is stored. A group with NaN or infinity gets a
// scale of NaN, so that the error stays visible.
// `store_side.wgsl` has what depends on the side's form.

const THREADS: u32 = 64u;
const NONE: u32 = 0xffffffffu;
const LARGEST_HALF: f32 = 65504.0;
const NAN_HALF: u32 = 0x7e00u;
const HALF_WORDS: u32 = (DIM + 1u) / 2u; // of a row in f16

var<workgroup> row: array<u32, DIM>;                   // the new row, f32 bits: NaN must stay NaN
var<workgroup> turned: array<f32, DIM>;
var<workgroup> codes: array<u32, DIM>;
var<workgroup> scales: array<u32, SCALE_WORDS>; // f16 bits, in stored order
var<workgroup> sums: array<f32, THREADS>;
var<workgroup> odd: array<u32, THREADS>;               // nonzero: an element that is not finite

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}

// An f16 for a recent row: saturated, but NaN and infinity stay.
fn recent_half(x: f32) -> u32 {
    let near = select(x, clamp(x, -LARGEST_HALF, LARGEST_HALF), is_finite(x));
    return to_half(bitcast<u32>(near));
}

// Scale and codes of the elements from .. from + n as q8, by one invocation.
fn encode_q8(from_: u32, n: u32, p: u32) {
    var largest = 0.0;
    var finite = true;
    for (var i = 0u; i < n; i++) {
        largest = max(largest, abs(turned[from_ + i]));
        finite = finite && is_finite(turned[from_ + i]);
    }
    let bits = select(NAN_HALF, to_half(bitcast<u32>(min(largest / 127.0, LARGEST_HALF))), finite);
    let stored = half_(bits & 0x7fffu);
    let inverse = select(0.0, 1.0 / stored, finite && stored > 0.0);
    for (var i = 0u; i < n; i++) {
        let code = i32(clamp(round(turned[from_ + i] * inverse), -127.0, 127.0));
        codes[from_ + i] = select(128u, u32(code + 128), finite);
    }
    scales[p] = bits;
}

fn encode_q4(from_: u32, n: u32, p: u32) {
    var least = turned[from_];
    var largest = turned[from_];
    var finite = true;
    for (var i = 0u; i < n; i++) {
        least = min(least, turned[from_ + i]);
        largest = max(largest, turned[from_ + i]);
        finite = finite && is_finite(turned[from_ + i]);
    }
    let minimum_bits = to_half(bitcast<u32>(clamp(least, -LARGEST_HALF, LARGEST_HALF)));
    let minimum = half_(minimum_bits);
    let scale_bits = to_half(bitcast<u32>(clamp((largest - minimum) / 15.0, 0.0, LARGEST_HALF)));
    let stored = half_(scale_bits);
    let inverse = select(0.0, 1.0 / stored, stored > 0.0);
    for (var i = 0u; i < n; i++) {
        let code = u32(clamp(round((turned[from_ + i] - minimum) * inverse), 0.0, 15.0));
        codes[from_ + i] = select(0u, code, finite);
    }
    scales[p] = select(NAN_HALF, scale_bits, finite);
    scales[p + 1u] = select(NAN_HALF, minimum_bits, finite);
}

// The number of the level nearest to x.
fn t4_code(x: f32) -> u32 {
    let a = abs(x);
    let magnitude = u32(a >= 12.0) + u32(a >= 24.5) + u32(a >= 37.5) + u32(a >= 51.0) + u32(a >= 66.5)
        + u32(a >= 85.5) + u32(a >= 111.5);
    return select(8u + magnitude, 7u - magnitude, x < 0.0);
}

// The sum of what every invocation passes, in a fixed order.
fn total(thread: u32, x: f32) -> f32 {
    workgroupBarrier();
    sums[thread] = x;
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < THREADS; i++) { sum += sums[i]; }
    return sum;
}

// The byte of a nibble dtype that stores elements j and j + half of a group.
fn nibbles(from_: u32, len: u32, j: u32) -> u32 {
    let low = (len + 1u) / 2u;
    var byte = codes[from_ + j];
    if (j + low < len) { byte |= codes[from_ + j + low] << 4u; }
    return byte;
}
