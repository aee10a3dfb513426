// Arithmetic that every kernel shares. Drivers' own exp2 and tanh differ in accuracy, so these are spelled out.

const LOG2_E: f32 = 1.44269504088896340736;

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

// 2^n for integral n, 0 below -126.
fn power(n: f32) -> f32 {
    let exponent = bitcast<f32>(u32(i32(clamp(n, -126.0, 127.0)) + 127) << 23u);
    return select(exponent, 0.0, n < -126.0);
}

// 2^f for |f| <= 1/2. Its series up to f^7; the next term is 5e-9 at f = 1/2.
fn exp_2_part(f: f32) -> f32 {
    var p = 1.5252734e-5;
    p = fma(p, f, 1.5403530e-4);
    p = fma(p, f, 1.3333558e-3);
    p = fma(p, f, 9.6181291e-3);
    p = fma(p, f, 5.5504109e-2);
    p = fma(p, f, 2.4022651e-1);
    p = fma(p, f, 6.9314718e-1);
    return fma(p, f, 1.0);
}

// 2^x within 2e-7 of its value, 0 below -126.
fn exp_2(x: f32) -> f32 {
    let y = clamp(x, -1000.0, 127.0);
    let n = round(y);
    let result = exp_2_part(y - n) * power(n);
    return select(result, x, is_nan(x));
}

// 2^(x - n) for an integral n >= x - 1/2. The same bits for every n, times a power of two: x - n is never rounded.
fn exp_2_less(x: f32, n: f32) -> f32 {
    let whole = round(x);
    let result = exp_2_part(x - whole) * power(whole - n);
    return select(result, x, is_nan(x));
}

// 1 / (1 + e^-x)
fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp_2(-x * LOG2_E));
}

// Within 3e-7 of its value. Near 0 its series: the quotient would lose bits there.
fn tanh_(x: f32) -> f32 {
    let t = exp_2(-2.0 * LOG2_E * abs(x));
    let far = sign(x) * ((1.0 - t) / (1.0 + t));
    let s = x * x;
    var p = -8.8632355e-3;
    p = fma(p, s, 2.1869488e-2);
    p = fma(p, s, -5.3968254e-2);
    p = fma(p, s, 1.3333333e-1);
    p = fma(p, s, -3.3333333e-1);
    let near = fma(p * s, x, x);
    return select(select(far, near, abs(x) < 0.4), x, is_nan(x));
}

// f16 bits to f32, exactly: a driver's own conversion may flush subnormal numbers.
fn half_(bits: u32) -> f32 {
    let exponent = bits & 0x7c00u;
    let sign = (bits & 0x8000u) << 16u;
    let normal = bitcast<f32>((((bits & 0x7fffu) << 13u) + 0x38000000u) | sign);
    let small = bitcast<f32>(bitcast<u32>(f32(bits & 0x3ffu) * 5.9604644775390625e-8) | sign);
    let special = bitcast<f32>(0x7f800000u | ((bits & 0x3ffu) << 13u) | sign);
    return select(select(normal, small, exponent == 0u), special, exponent == 0x7c00u);
}

// The bits of the nearest f16, ties to even; too large becomes infinite, NaN stays NaN.
fn to_half(x: u32) -> u32 {
    let sign = (x >> 16u) & 0x8000u;
    let magnitude = x & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return sign | 0x7e00u;
    }
    if (magnitude >= 0x477ff000u) {
        return sign | 0x7c00u;
    }
    if (magnitude < 0x38800000u) {
        // Subnormal: multiples of 2^-24. Adding 0.5 leaves the rounded number in the lowest bits.
        let rounded = bitcast<u32>(bitcast<f32>(magnitude) + 0.5) - 0x3f000000u;
        return sign | rounded;
    }
    let rounded = magnitude + 0xfffu + ((magnitude >> 13u) & 1u);
    return sign | ((rounded - 0x38000000u) >> 13u);
}

// The bits of the nearest bf16, ties to even; NaN stays NaN.
fn to_bf16(x: u32) -> u32 {
    if ((x & 0x7fffffffu) > 0x7f800000u) {
        return (x >> 16u) | 0x40u;
    }
    return (x + 0x7fffu + ((x >> 16u) & 1u)) >> 16u;
}
