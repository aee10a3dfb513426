// Routed rows in order of expert (see routes.wgsl). A workgroup has one expert: it counts the rows of those before, and lists its own.

struct Args {
    rows: u32,
    experts: u32,
}

@group(0) @binding(0) var<storage, read_write> routes: array<u32>;
var<immediate> args: Args;

const THREADS: u32 = 256u;

// Of each invocation's rows: how many are of experts before, and how many of this one.
var<workgroup> before: array<u32, THREADS>;
var<workgroup> own: array<u32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let expert = group.x;
    let each = (args.rows + THREADS - 1u) / THREADS;
    let begin = min(thread * each, args.rows);
    let end = min(begin + each, args.rows);
    var n_before = 0u;
    var n_own = 0u;
    for (var row = begin; row < end; row++) {
        n_before += u32(routes[row] < expert);
        n_own += u32(routes[row] == expert);
    }
    before[thread] = n_before;
    own[thread] = n_own;
    workgroupBarrier();
    var first = 0u; // of the expert
    var next = 0u;  // of this invocation, among those of the expert
    for (var i = 0u; i < THREADS; i++) {
        first += before[i];
        if (i < thread) { next += own[i]; }
    }
    if (thread == 0u) {
        routes[begin_at(args.rows, expert)] = first;
        if (expert + 1u == args.experts) { routes[begin_at(args.rows, args.experts)] = args.rows; }
    }
    next += first;
    for (var row = begin; row < end; row++) {
        if (routes[row] == expert) {
            routes[sorted_at(args.rows, args.experts, next)] = row;
            next++;
        }
    }
}
