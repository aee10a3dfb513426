// The gate of an MLP.
//
//   gate = activation(gate, up)      silu: g * sigmoid(g) * u;  gelu (tanh): g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)) * u;
//                                    clamped: g' = min(g, limit), u' = clamp(u, limit): g' * sigmoid(1.702 g') * (u' + 1)

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
    var g = gate[i];
    var u = up[i];
    var y = g;
    if (args.activation == 1u) {
        y = 1.5957691216057308 * (g + 0.044715 * g * g * g);
    } else if (args.activation == 2u) {
        g = min(g, args.limit);
        u = clamp(u, -args.limit, args.limit) + 1.0;
        y = 1.702 * g;
    }
    gate[i] = g * sigmoid(y) * u;
}
