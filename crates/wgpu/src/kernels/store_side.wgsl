// What rows of one side, K or V, are stored as. Included once per side: `side_` and `SIDE_` become its name (see store_rows.wgsl).

const SIDE_GROUPS: u32 = (DIM + SIDE_GROUP - 1u) / SIDE_GROUP;

fn side_recent_element(i: u32) -> u32 {
    if (i >= DIM) { return 0u; }
    if (SIDE_PLAIN_RECENT) { return recent_half(bitcast<f32>(row[i])); }
    return recent_half(turned[i]);
}

// The elements SIDE_WIDE .. DIM as t4, by all invocations.
fn side_encode_t4(thread: u32, p: u32) {
    let n = DIM - SIDE_WIDE;
    var squares = 0.0;
    var finite = true;
    for (var i = SIDE_WIDE + thread; i < DIM; i += THREADS) {
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
        for (var i = SIDE_WIDE; i < DIM; i++) { largest = max(largest, abs(turned[i])); }
    }
    let unit = select(largest / 127.0, sqrt(squares / f32(max(n, 1u))) * (2.7326 / 127.0), sums_up);
    let inverse = select(0.0, 1.0 / unit, unit > 0.0);
    var levels = 0.0;
    for (var i = SIDE_WIDE + thread; i < DIM; i += THREADS) {
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

// Byte i < SIDE_CODES of the codes.
fn side_code_byte(i: u32) -> u32 {
    if (SIDE_DTYPE == 3u) { return codes[i]; }
    if (SIDE_DTYPE == 4u) {
        let g = i / (SIDE_GROUP / 2u);
        let len = min(SIDE_GROUP, DIM - g * SIDE_GROUP);
        let j = i - g * (SIDE_GROUP / 2u);
        return nibbles(g * SIDE_GROUP, len, j);
    }
    if (i < SIDE_WIDE) { return codes[i]; }
    return nibbles(SIDE_WIDE, DIM - SIDE_WIDE, i - SIDE_WIDE);
}

// Byte i of a packed row.
fn side_row_byte(i: u32) -> u32 {
    if (i < SIDE_CODES) { return side_code_byte(i); }
    let p = (i - SIDE_CODES) / 2u;
    if (p >= SIDE_SCALES) { return 0u; }
    return (scales[p] >> (8u * ((i - SIDE_CODES) & 1u))) & 255u;
}

fn side_float_element(i: u32) -> u32 {
    if (i >= DIM) { return 0u; }
    let bits = bitcast<u32>(turned[i]);
    if (SIDE_DTYPE == 1u) { return to_half(bits); }
    return to_bf16(bits);
}

// Stores the row. `channels`: first word of its head's order. `at`: first word in the pool. `newest`, `kept`: first words of its recent
// rows, `kept` NONE if there is but one.
fn side_store_row(thread: u32, channels: u32, at: u32, newest: u32, kept: u32) {
    if (SIDE_DTYPE == 0u && SIDE_TURN == 0u) {
        for (var i = thread; i < DIM; i += THREADS) { side_pool[at + i] = row[i]; }
        return;
    }
    for (var i = thread; i < DIM; i += THREADS) {
        var channel = i;
        if (SIDE_WIDE > 0u) { channel = order[channels + i]; }
        turned[i] = bitcast<f32>(row[channel]);
    }
    workgroupBarrier();
    turn_rows(thread, 1u, SIDE_TURN, SIDE_WIDE);
    if (SIDE_RECENT) {
        for (var i = thread; i < HALF_WORDS; i += THREADS) {
            let both = side_recent_element(2u * i) | (side_recent_element(2u * i + 1u) << 16u);
            recent[newest + i] = both;
            if (kept != NONE) { recent[kept + i] = both; }
        }
    }
    if (SIDE_DTYPE == 0u) {
        for (var i = thread; i < DIM; i += THREADS) { side_pool[at + i] = bitcast<u32>(turned[i]); }
        return;
    }
    if (SIDE_DTYPE < 3u) {
        for (var i = thread; i < SIDE_WORDS; i += THREADS) {
            side_pool[at + i] = side_float_element(2u * i) | (side_float_element(2u * i + 1u) << 16u);
        }
        return;
    }
    if (SIDE_DTYPE == 3u || SIDE_DTYPE == 4u) {
        for (var g = thread; g < SIDE_GROUPS; g += THREADS) {
            let n = min(SIDE_GROUP, DIM - g * SIDE_GROUP);
            if (SIDE_DTYPE == 3u) { encode_q8(g * SIDE_GROUP, n, g); } else { encode_q4(g * SIDE_GROUP, n, 2u * g); }
        }
    } else {
        if (SIDE_WIDE > 0u && thread == 0u) { encode_q8(0u, SIDE_WIDE, 0u); }
        side_encode_t4(thread, select(0u, 1u, SIDE_WIDE > 0u));
    }
    workgroupBarrier();
    for (var i = thread; i < SIDE_WORDS; i += THREADS) {
        let b = 4u * i;
        side_pool[at + i] = side_row_byte(b) | (side_row_byte(b + 1u) << 8u) | (side_row_byte(b + 2u) << 16u)
            | (side_row_byte(b + 3u) << 24u);
    }
}
