// An element of K or V in f16, by the driver: one instruction instead of ten. It may make subnormal numbers 0, so scales go another way.
fn element_(bits: u32) -> f32 {
    return unpack2x16float(bits).x;
}
