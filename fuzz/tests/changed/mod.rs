//! Modified copies of real files: purely random bytes do not get past the first line of a format.

/// `original` with a few bytes changed, removed or repeated, or truncated.
pub fn changed(original: &[u8], seed: u64) -> Vec<u8> {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let mut below = |n: usize| {
        z = z.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (z >> 33) as usize % n.max(1)
    };
    let mut bytes = original.to_vec();
    for _ in 0..1 + below(4) {
        let (at, len) = (below(bytes.len()), below(16));
        let end = (at + len).min(bytes.len());
        match below(5) {
            0 | 1 if at < bytes.len() => bytes[at] = below(256) as u8,
            2 => _ = bytes.drain(at..end),
            3 => bytes.extend_from_within(at..end),
            4 if below(8) == 0 => bytes.truncate(at),
            _ if at < bytes.len() => bytes[at] = [0, 0xff, b'"', b'0'][below(4)],
            _ => {}
        }
    }
    bytes
}
