// Routed rows in order of expert (see routes.cu). A block has one expert: it counts the rows of those before, and lists its own.

struct Args {
    u32 rows;
    u32 experts;
};

#define THREADS 256u

extern "C" __global__ void __launch_bounds__(THREADS) sort(u32* routes, Args args) {
    // Of each thread's rows: how many are of experts before, and how many of this one.
    __shared__ u32 before[THREADS];
    __shared__ u32 own[THREADS];
    u32 expert = blockIdx.x;
    u32 each = (args.rows + THREADS - 1u) / THREADS;
    u32 begin = min(threadIdx.x * each, args.rows);
    u32 end = min(begin + each, args.rows);
    u32 n_before = 0u, n_own = 0u;
#pragma unroll 4
    for (u32 row = begin; row < end; row++) {
        n_before += routes[row] < expert ? 1u : 0u;
        n_own += routes[row] == expert ? 1u : 0u;
    }
    before[threadIdx.x] = n_before;
    own[threadIdx.x] = n_own;
    __syncthreads();
    u32 first = 0u; // of the expert
    u32 next = 0u;  // of this thread, among those of the expert
    for (u32 i = 0u; i < THREADS; i++) {
        first += before[i];
        next += i < threadIdx.x ? own[i] : 0u;
    }
    if (threadIdx.x == 0u) {
        routes[begin_at(args.rows, expert)] = first;
        if (expert + 1u == args.experts) { routes[begin_at(args.rows, args.experts)] = args.rows; }
    }
    next += first;
    for (u32 row = begin; row < end; row++) {
        if (routes[row] == expert) {
            routes[sorted_at(args.rows, args.experts, next)] = row;
            next++;
        }
    }
}
