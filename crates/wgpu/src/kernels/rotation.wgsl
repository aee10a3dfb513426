// A pair of elements turned by an angle.
fn rotated_pair(a: f32, b: f32, cos: f32, sin: f32) -> vec2<f32> {
    return vec2(a * cos - b * sin, b * cos + a * sin);
}
