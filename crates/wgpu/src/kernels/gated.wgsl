// The gate of an MLP: gate = activation(gate, up), see gate.wgsl.

struct Args {
    elements: u32,
    activation: u32, // 0 silu, 1 gelu, 2 clamped
    limit: f32,
}

@group(0) @binding(0) var<storage, read> up: array<f32>;
@group(0) @binding(1) var<storage, read_write> gate: array<f32>;
var<immediate> args: Args;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.y * 65535u * 64u + id.x;
    if (i >= args.elements) {
        return;
    }
    gate[i] = gated_(gate[i], up[i], args.activation, args.limit);
}
