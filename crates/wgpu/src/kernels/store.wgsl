// Writes new rows of K or V to the cells of the plan, as the pool stores them. One workgroup per row.
//
//   y = x[t, first_head + head]                                  in the order of `order`, if WIDE > 0; rotated, see turn.wgsl
//   pool[head, cell[t]] = codes(y), scales(y)                    see cells.wgsl
//   RECENT: recent[n_slots + t] = recent[kept[t]] = f16(y)       keys before order and rotation, values after them
//
//   q8: scale = max |y| / 127 of a group;  code = round(y / scale) + 128
//   q4: minimum = min y, scale = (max y - minimum) / 15;  code = round((y - minimum) / scale)
//   t4: unit = root mean square * 2.7326 / 127;  code = number of the nearest level;  scale so that the length of y is kept
//
// Scales are rounded to f16 first, and codes are computed from what is stored. A group with NaN or infinity gets a
// scale of NaN, so that the error stays visible.

struct Args {
    cells: u32,        // of the pool
    first_head: u32,   // of this part of the pool
    all_heads: u32,    // of x
    written: u32,      // first word of [tokens] cells in the plan
    kept: u32,         // first word of [tokens] slots or NONE
    n_slots: u32,
    recent_row: u32,   // words of a row of `recent`
    recent_first: u32, // first word of this side in it
}

@group(0) @binding(0) var<storage, read> x: array<u32>; // [tokens, all_heads, DIM] f32 bits: NaN must stay NaN
@group(0) @binding(1) var<storage, read> plan: array<u32>;
@group(0) @binding(2) var<storage, read> order: array<u32>;        // [all_heads, DIM]
@group(0) @binding(3) var<storage, read_write> pool: array<u32>;   // [heads, cells, WORDS]
@group(0) @binding(4) var<storage, read_write> recent: array<u32>; // [n_slots + tokens, recent_row]
var<immediate> args: Args;

const THREADS: u32 = 64u;
const NONE: u32 = 0xffffffffu;
const LARGEST_HALF: f32 = 65504.0;
const NAN_HALF: u32 = 0x7e00u;
const N_GROUPS: u32 = (DIM + GROUP - 1u) / GROUP;

var<workgroup> turned: array<f32, DIM>;
var<workgroup> codes: array<u32, DIM>;
var<workgroup> scales: array<u32, 2u * N_GROUPS + 2u>; // f16 bits, in stored order
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

fn recent_element(first: u32, i: u32) -> u32 {
    if (i >= DIM) { return 0u; }
    if (PLAIN_RECENT) { return recent_half(bitcast<f32>(x[first + i])); }
    return recent_half(turned[i]);
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

// The elements WIDE .. DIM as t4, by all invocations.
fn encode_t4(thread: u32, p: u32) {
    let n = DIM - WIDE;
    var squares = 0.0;
    var finite = true;
    for (var i = WIDE + thread; i < DIM; i += THREADS) {
        squares += turned[i] * turned[i];
        finite = finite && is_finite(turned[i]);
    }
    odd[thread] = u32(!finite);
    squares = total(thread, squares);
    var largest = 0.0;
    var any_odd = false;
    for (var i = 0u; i < THREADS; i++) { any_odd = any_odd || odd[i] != 0u; }
    // Squares may overflow where elements do not: then the largest level represents the largest element.
    let sums_up = is_finite(squares);
    if (!sums_up) {
        for (var i = WIDE; i < DIM; i++) { largest = max(largest, abs(turned[i])); }
    }
    let unit = select(largest / 127.0, sqrt(squares / f32(max(n, 1u))) * (2.7326 / 127.0), sums_up);
    let inverse = select(0.0, 1.0 / unit, unit > 0.0);
    var levels = 0.0;
    for (var i = WIDE + thread; i < DIM; i += THREADS) {
        let code = select(t4_code(turned[i] * inverse), 0u, any_odd);
        codes[i] = code;
        let level = t4_level(code);
        levels += level * level;
    }
    levels = total(thread, levels);
    // The stored row gets the length of the original, which avoids a bias.
    let scale = select(unit, sqrt(squares / levels), sums_up && levels > 0.0);
    if (thread == 0u) {
        scales[p] = select(to_half(bitcast<u32>(min(scale, LARGEST_HALF))), NAN_HALF, any_odd);
    }
}

// The byte of a nibble dtype that stores elements j and j + half of a group.
fn nibbles(from_: u32, len: u32, j: u32) -> u32 {
    let low = (len + 1u) / 2u;
    var byte = codes[from_ + j];
    if (j + low < len) { byte |= codes[from_ + j + low] << 4u; }
    return byte;
}

// Byte i < CODES of the codes.
fn code_byte(i: u32) -> u32 {
    if (DTYPE == 3u) { return codes[i]; }
    if (DTYPE == 4u) {
        let g = i / (GROUP / 2u);
        let len = min(GROUP, DIM - g * GROUP);
        let j = i - g * (GROUP / 2u);
        return nibbles(g * GROUP, len, j);
    }
    if (i < WIDE) { return codes[i]; }
    return nibbles(WIDE, DIM - WIDE, i - WIDE);
}

// Byte i of a packed row.
fn row_byte(i: u32) -> u32 {
    if (i < CODES) { return code_byte(i); }
    let p = (i - CODES) / 2u;
    if (p >= SCALES) { return 0u; }
    return (scales[p] >> (8u * ((i - CODES) & 1u))) & 255u;
}

fn float_element(i: u32) -> u32 {
    if (i >= DIM) { return 0u; }
    let bits = bitcast<u32>(turned[i]);
    if (DTYPE == 1u) { return to_half(bits); }
    return to_bf16(bits);
}

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let token = group.y;
    let head = args.first_head + group.x;
    let first = (token * args.all_heads + head) * DIM;
    let at = (group.x * args.cells + plan[args.written + token]) * WORDS;
    if (DTYPE == 0u && TURN == 0u) {
        for (var i = thread; i < DIM; i += THREADS) { pool[at + i] = x[first + i]; }
        return;
    }
    for (var i = thread; i < DIM; i += THREADS) {
        var channel = i;
        if (WIDE > 0u) { channel = order[head * DIM + i]; }
        turned[i] = bitcast<f32>(x[first + channel]);
    }
    workgroupBarrier();
    turn_rows(thread, 1u, TURN, WIDE);
    if (RECENT) {
        let words = (DIM + 1u) / 2u;
        let fresh = (args.n_slots + token) * args.recent_row + args.recent_first + head * words;
        let slot = plan[args.kept + token];
        let kept = slot * args.recent_row + args.recent_first + head * words;
        for (var i = thread; i < words; i += THREADS) {
            let both = recent_element(first, 2u * i) | (recent_element(first, 2u * i + 1u) << 16u);
            recent[fresh + i] = both;
            if (slot != NONE) { recent[kept + i] = both; }
        }
    }
    if (DTYPE == 0u) {
        for (var i = thread; i < DIM; i += THREADS) { pool[at + i] = bitcast<u32>(turned[i]); }
        return;
    }
    if (DTYPE < 3u) {
        for (var i = thread; i < WORDS; i += THREADS) {
            pool[at + i] = float_element(2u * i) | (float_element(2u * i + 1u) << 16u);
        }
        return;
    }
    if (DTYPE == 3u || DTYPE == 4u) {
        for (var g = thread; g < N_GROUPS; g += THREADS) {
            let n = min(GROUP, DIM - g * GROUP);
            if (DTYPE == 3u) { encode_q8(g * GROUP, n, g); } else { encode_q4(g * GROUP, n, 2u * g); }
        }
    } else {
        if (WIDE > 0u && thread == 0u) { encode_q8(0u, WIDE, 0u); }
        encode_t4(thread, select(0u, 1u, WIDE > 0u));
    }
    workgroupBarrier();
    for (var i = thread; i < WORDS; i += THREADS) {
        let b = 4u * i;
        pool[at + i] = row_byte(b) | (row_byte(b + 1u) << 8u) | (row_byte(b + 2u) << 16u) | (row_byte(b + 3u) << 24u);
    }
}
