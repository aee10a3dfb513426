// The outputs of each token's experts, weighted and added in order of expert number.
//
//   out[t] = sum over i of weight(t, i) * y[t * used + i]

struct Args {
    width: u32,
    used: u32,
    tokens: u32,
}

@group(0) @binding(0) var<storage, read> routes: array<u32>; // as routes.wgsl says
@group(0) @binding(1) var<storage, read> y: array<f32>;      // [tokens * used, width]
@group(0) @binding(2) var<storage, read_write> out: array<f32>; // [tokens, width]
var<immediate> args: Args;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= args.width) { return; }
    var sum = 0.0;
    for (var i = 0u; i < args.used; i++) {
        let row = id.y * args.used + i;
        sum = fma(bitcast<f32>(routes[weight_at(args.tokens * args.used, row)]), y[row * args.width + id.x], sum);
    }
    out[id.y * args.width + id.x] = sum;
}
