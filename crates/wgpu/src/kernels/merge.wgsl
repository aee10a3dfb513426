// Adds up the states of the splits of a row, in order, as `attend` does within a work item.
//
//   total = state 0;  total = total 2^(Mt - M*) + state 2^(M - M*) for the others;  out = as in `attend`,
//   rotated back if values are stored rotated

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

var<workgroup> turned: array<f32, DIM>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let merge = args.merges + 4u * group.x;
    let head = group.y;
    let token = plan[args.order + plan[merge]];
    let n = plan[merge + 2u];
    for (var e = thread; e < DIM; e += THREADS) {
        var total_max = NO_SCORE;
        var total_norm = 0.0;
        var total = 0.0;
        for (var i = 0u; i < n; i++) {
            let at = (plan[args.lists + plan[merge + 1u] + i] * args.heads + head) * (DIM + 2u);
            let top = states[at + DIM];
            if (top == NO_SCORE) { continue; }
            if (total_max == NO_SCORE) {
                total = states[at + e];
                total_norm = states[at + DIM + 1u];
                total_max = top;
            } else {
                let peak = max(total_max, top);
                let a = power(total_max - peak);
                let b = power(top - peak);
                total = total * a + states[at + e] * b;
                total_norm = total_norm * a + states[at + DIM + 1u] * b;
                total_max = peak;
            }
        }
        turned[e] = total * final_factor(total_max, total_norm, head);
    }
    workgroupBarrier();
    turn_rows_back(thread, 1u, V_TURN, V_WIDE);
    for (var e = thread; e < DIM; e += THREADS) { out[(token * args.heads + head) * DIM + e] = turned[e]; }
}
