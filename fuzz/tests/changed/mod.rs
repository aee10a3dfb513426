//! Modified copies of real files: purely random bytes do not get past the first line of a format.

/// `original` with a few bytes changed, removed or repeated, or truncated.
pub fn changed(original: &[u8], seed: u64) -> Vec<u8> {
    let mut random = kvist_testing::SplitMix64(seed);
    let mut below = |n: usize| random.index(n);
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
