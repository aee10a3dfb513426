// Which experts a token uses, and their weights. One invocation per token.
//
//   p = softmax(odds);  the `used` largest, of equal ones the first;  RENORMALISE: their sum becomes 1
//   routes[t, e] = p[e], 0 for the others

struct Args {
    tokens: u32,
    experts: u32,
    used: u32,
    renormalise: u32,
}

@group(0) @binding(0) var<storage, read> odds: array<f32>;         // [tokens, experts]
@group(0) @binding(1) var<storage, read_write> routes: array<f32>; // [tokens, experts]
var<immediate> args: Args;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= args.tokens) {
        return;
    }
    let first = id.x * args.experts;
    var largest = odds[first];
    for (var e = 1u; e < args.experts; e++) { largest = max(largest, odds[first + e]); }
    var sum = 0.0;
    for (var e = 0u; e < args.experts; e++) {
        sum += exp_2((odds[first + e] - largest) * LOG2_E);
        routes[first + e] = 0.0;
    }
    var kept = 0.0;
    // The next largest after the last one, in order of (odds descending, number ascending).
    var last = 0.0;
    var last_expert = 0u;
    for (var i = 0u; i < args.used; i++) {
        var found = false;
        var next = 0.0;
        var expert = 0u;
        for (var e = 0u; e < args.experts; e++) {
            let odd = odds[first + e];
            let left = i == 0u || odd < last || (odd == last && e > last_expert);
            if (left && (!found || odd > next)) {
                found = true;
                next = odd;
                expert = e;
            }
        }
        if (!found) { break; }
        let p = exp_2((next - largest) * LOG2_E);
        kept += p;
        routes[first + expert] = p;
        last = next;
        last_expert = expert;
    }
    if (args.renormalise != 0u) { sum = kept; }
    for (var e = 0u; e < args.experts; e++) { routes[first + e] /= sum; }
}
