// An element of K or V in f16.
fn element_(bits: u32) -> f32 {
    return half_(bits);
}
