// Bytes and halves of words.

fn byte_of(word: u32, i: u32) -> u32 {
    return (word >> (8u * i)) & 0xffu;
}

fn signed_byte(word: u32, i: u32) -> f32 {
    return f32(i32(word << (24u - 8u * i)) >> 24u);
}

fn signed4(word: u32) -> vec4<f32> {
    return vec4(signed_byte(word, 0u), signed_byte(word, 1u), signed_byte(word, 2u), signed_byte(word, 3u));
}

// The bits of `mask` in each of four bytes.
fn four(word: u32, shift: u32, mask: u32) -> vec4<u32> {
    return (vec4(word) >> vec4(shift, shift + 8u, shift + 16u, shift + 24u)) & vec4(mask);
}
