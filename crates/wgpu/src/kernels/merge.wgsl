// Adds up the states of the splits of a row, in order, as `attend` does within a work item.
//
//   M* = max M;  total = sum of state 2^(M - M*);  out = as in `attend`, rotated back if values are stored rotated
//
// `attend` rescales whenever a maximum rises. Maxima are integers, so rescaling is exact and the bits are the same, but for sums below
// 2^-126 of the largest one.

const THREADS: u32 = 64u;
const NO_SCORE: f32 = -1e30;

struct Args {
    heads: u32,
    order: u32,
    merges: u32, // first word of [slots] (slot, first word of the list of its partials, their number, 0)
    lists: u32,
    has_sinks: u32,
}

@group(0) @binding(0) var<storage, read> states: array<f32>;
@group(0) @binding(1) var<storage, read> plan: array<u32>;
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
var<immediate> args: Args;

const NOTHING: f32 = -1.0;

var<workgroup> turned: array<f32, DIM>;
var<workgroup> places: array<u32, PARTIAL_SLOTS>;  // of states
var<workgroup> factors: array<f32, PARTIAL_SLOTS>; // maxima, then 2^(M - M*), or NOTHING if a split has no cell that the row sees

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let merge = args.merges + 4u * group.x;
    let head = group.y;
    let token = plan[args.order + plan[merge]];
    let n = min(plan[merge + 2u], PARTIAL_SLOTS);
    for (var i = thread; i < n; i += THREADS) {
        let at = (plan[args.lists + plan[merge + 1u] + i] * args.heads + head) * (DIM + 2u);
        places[i] = at;
        factors[i] = states[at + DIM];
    }
    workgroupBarrier();
    var top = NO_SCORE;
    for (var i = 0u; i < n; i++) { top = max(top, factors[i]); }
    workgroupBarrier();
    for (var i = thread; i < n; i += THREADS) {
        factors[i] = select(power(factors[i] - top), NOTHING, factors[i] == NO_SCORE);
    }
    workgroupBarrier();
    var norm = 0.0;
    for (var i = 0u; i < n; i++) {
        let next = norm + states[places[i] + DIM + 1u] * factors[i];
        norm = select(next, norm, factors[i] == NOTHING);
    }
    for (var e = thread; e < DIM; e += THREADS) {
        var total = 0.0;
        for (var i = 0u; i < n; i++) {
            let next = total + states[places[i] + e] * factors[i];
            total = select(next, total, factors[i] == NOTHING);
        }
        turned[e] = total * final_factor(top, norm, head);
    }
    workgroupBarrier();
    turn_rows_back(thread, 1u, V_TURN, V_WIDE);
    for (var e = thread; e < DIM; e += THREADS) { out[(token * args.heads + head) * DIM + e] = turned[e]; }
}
