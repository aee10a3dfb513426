// Copies rows to columns of other rows.
//
//   out[r, column ..] = x[index[r]]      without GATHER: index[r] = r;  with ZERO: 0

struct Args {
    width: u32,     // of x
    out_width: u32,
    column: u32,
    index: u32,     // first word of the indices
}

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> indices: array<u32>;
var<immediate> args: Args;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= args.width) {
        return;
    }
    let at = id.y * args.out_width + args.column + id.x;
    if (ZERO) {
        out[at] = 0.0;
        return;
    }
    var row = id.y;
    if (GATHER) { row = indices[args.index + id.y]; }
    out[at] = x[row * args.width + id.x];
}
