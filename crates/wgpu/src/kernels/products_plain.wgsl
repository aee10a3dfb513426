// The products of `gemm_halves` by every invocation for itself: OUTPUTS_EACH outputs of TOKENS_EACH tokens.

alias Quad = vec2<u32>;

fn rounded(x: vec4<f32>) -> Quad {
    return vec2(pack2x16float(x.xy), pack2x16float(x.zw));
}

fn quad_from(bits: vec2<u32>) -> Quad {
    return bits;
}

fn floats(x: Quad) -> vec4<f32> {
    return vec4(unpack2x16float(x.x), unpack2x16float(x.y));
}
