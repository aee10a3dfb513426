// The rows of the step's tokens that lie in this part of the table.
//
//   out[t] = scale * table[token[t]]

struct Args {
    form: Form,
    first: u32, // row of the table that is this part's first
    rows: u32,  // of this part
    width: u32,
    scale: f32,
}

@group(0) @binding(0) var<storage, read> w: array<u32>;
@group(0) @binding(1) var<storage, read> tokens: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>; // [tokens, width]
var<immediate> args: Args;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let row = tokens[id.y] - args.first;
    if (id.x >= args.form.quads || row >= args.rows) {
        return;
    }
    let values = weights4(args.form, row, id.x) * args.scale;
    for (var i = 0u; i < 4u; i++) {
        let column = 4u * id.x + i;
        if (column < args.width) { out[id.y * args.width + column] = values[i]; }
    }
}
