// Weights and inputs of a linear layer whose rows may be of any length (see product.wgsl).

@group(0) @binding(0) var<storage, read> w: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;          // [tokens, inputs]

fn inputs4(token: u32, c: u32) -> vec4<f32> {
    let at = token * args.inputs + 4u * c;
    let left = args.inputs - 4u * c;
    if (left >= 4u) {
        return vec4(x[at], x[at + 1u], x[at + 2u], x[at + 3u]);
    }
    // The end of a row that is not whole quads: what follows belongs to another token.
    var tail = vec4(x[at], 0.0, 0.0, 0.0);
    if (left > 1u) { tail.y = x[at + 1u]; }
    if (left > 2u) { tail.z = x[at + 2u]; }
    return tail;
}
