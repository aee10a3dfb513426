//! Greedy selection from logits.

/// Index of the largest value, and its distance from the second largest. `None` if there are no logits or any is NaN.
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
