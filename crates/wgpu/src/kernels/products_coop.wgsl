// The products of `gemm_halves` by cooperative matrices: 16 x 16 products of a subgroup, on tensor cores where a GPU has them.

alias Quad = vec4<f16>;

fn rounded(x: vec4<f32>) -> Quad {
    return vec4<f16>(x);
}

fn quad_from(bits: vec2<u32>) -> Quad {
    return vec4<f16>(vec4(unpack2x16float(bits.x), unpack2x16float(bits.y)));
}
