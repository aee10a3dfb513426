// Which experts a token uses, and their weights (see routes.wgsl). A workgroup has one token.
//
//   p = softmax(odds);  the `used` largest, of equal ones the first;  RENORMALISE: their sum becomes 1
//
// How many experts are before one, among all and among those that are used, says whether it is used, and which of them it is: no loop
// over the used ones, of which each waits for the last.

struct Args {
    tokens: u32,
    experts: u32,
    used: u32,
    renormalise: u32,
}

@group(0) @binding(0) var<storage, read> odds: array<f32>;         // [tokens, experts]
@group(0) @binding(1) var<storage, read_write> routes: array<u32>; // as routes.wgsl says
var<immediate> args: Args;

const THREADS: u32 = 128u;
// Experts of a token that are looked at together.
const KEPT: u32 = 512u;

var<workgroup> values: array<f32, KEPT>;
var<workgroup> counts: array<u32, KEPT>; // 1: used

// Whether expert a comes before expert b.
fn is_before(value_a: f32, a: u32, value_b: f32, b: u32) -> bool {
    return value_a > value_b || (value_a == value_b && a < b);
}

// Odds of expert e: of the first ones from workgroup memory.
fn odd_of(first: u32, e: u32) -> f32 {
    if (e < KEPT) { return values[e]; }
    return odds[first + e];
}

fn is_used(first: u32, e: u32) -> bool {
    if (e < KEPT) { return counts[e] != 0u; }
    return before_all(first, e) < args.used;
}

// How many experts are before e.
fn before_all(first: u32, e: u32) -> u32 {
    let value = odd_of(first, e);
    var n = 0u;
    for (var i = 0u; i < args.experts; i++) { n += u32(is_before(odd_of(first, i), i, value, e)); }
    return n;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let token = group.x;
    let first = token * args.experts;
    let rows = args.tokens * args.used;
    for (var e = thread; e < min(args.experts, KEPT); e += THREADS) { values[e] = odds[first + e]; }
    // With odds that are not numbers a row may find no expert: a compiler need not compare NaN as IEEE says.
    for (var i = thread; i < args.used; i += THREADS) {
        routes[token * args.used + i] = 0u;
        routes[weight_at(rows, token * args.used + i)] = 0x7fc00000u;
    }
    workgroupBarrier();
    var largest = odd_of(first, 0u);
    for (var e = 1u; e < args.experts; e++) { largest = max(largest, odd_of(first, e)); }
    for (var e = thread; e < min(args.experts, KEPT); e += THREADS) {
        counts[e] = u32(before_all(first, e) < args.used);
    }
    workgroupBarrier();
    storageBarrier();
    var sum = 0.0;
    for (var e = 0u; e < args.experts; e++) {
        if (args.renormalise == 0u || is_used(first, e)) { sum += exp_2((odd_of(first, e) - largest) * LOG2_E); }
    }
    for (var e = thread; e < args.experts; e += THREADS) {
        var n = 0u;
        for (var i = 0u; i < e; i++) { n += u32(is_used(first, i)); }
        // NaN is before nothing and nothing before it: then there are too many.
        if (is_used(first, e) && n < args.used) {
            let row = token * args.used + n;
            routes[row] = e;
            routes[weight_at(rows, row)] = bitcast<u32>(exp_2((odd_of(first, e) - largest) * LOG2_E) / sum);
        }
    }
}
