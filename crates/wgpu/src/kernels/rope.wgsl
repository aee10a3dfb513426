// Rotary position embedding in place. The host computes cos and sin, as exactly as on any other device.
//
//   for each token, head and pair i:  (a, b) = (x[i], x[i + pairs])
//     x[i] = a cos - b sin;  x[i + pairs] = b cos + a sin

struct Args {
    heads: u32,
    head_dim: u32,
    pairs: u32,
    angles: u32, // first element of this embedding's angles: cos [tokens, pairs], then sin
    tokens: u32,
}

@group(0) @binding(0) var<storage, read> angles: array<f32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>; // [tokens, heads, head_dim]
var<immediate> args: Args;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= args.heads * args.pairs) {
        return;
    }
    let head = id.x / args.pairs;
    let i = id.x % args.pairs;
    let cos = angles[args.angles + id.y * args.pairs + i];
    let sin = angles[args.angles + (args.tokens + id.y) * args.pairs + i];
    let low = (id.y * args.heads + head) * args.head_dim + i;
    let high = low + args.pairs;
    let y = rotated_pair(x[low], x[high], cos, sin);
    x[low] = y.x;
    x[high] = y.y;
}
