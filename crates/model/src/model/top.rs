//! What is read off logits.

/// The largest value's index and its distance from the second largest. `None` if nothing compares: no logits,
/// or a NaN among them.
pub fn top_two(logits: &[f32]) -> Option<(u32, f32)> {
    let (mut best, mut second) = (None::<(usize, f32)>, f32::NEG_INFINITY);
    for (i, &x) in logits.iter().enumerate() {
        if x.is_nan() {
            return None;
        }
        match best {
            Some((_, b)) if x <= b => second = second.max(x),
            _ => {
                second = best.map_or(second, |(_, b)| b);
                best = Some((i, x));
            }
        }
    }
    best.map(|(i, x)| (i as u32, x - second))
}
