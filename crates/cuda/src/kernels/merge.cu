// Adds up the states of the splits of a row, in order, as `attend` does within a work item.
//
//   peak = max Mi;  total = sum of state i 2^(Mi - peak), in order;  out = as in `attend`, rotated back if values are stored rotated
//
// The maxima are integers, so the factors are exact, and the sum has the bits of one that is rescaled state by state. The loads of a
// thread do not depend on each other, so that many are on their way at the same time.

#define NO_SCORE -1e30f
#define THREADS 128u
#define CHUNK 64u // states whose factors are in shared memory
#define AHEAD 8u  // states whose elements are loaded before their factors are known
#define PER_THREAD ((DIM + THREADS - 1u) / THREADS)

struct Args {
    u32 heads;
    u32 order;
    u32 merges; // first word of [slots] (slot, first word of the list of its partials, their number, 0)
    u32 lists;
    u32 has_sinks;
};

extern "C" __global__ void __launch_bounds__(128) merge(
    const float* __restrict__ states,
    const u32* __restrict__ plan,
    const float* __restrict__ sinks,
    float* __restrict__ out,
    Args args) {
    __shared__ float tops[THREADS / 32u];
    __shared__ float factors[CHUNK]; // below 0: a state without cells
    __shared__ float norms[CHUNK];
    __shared__ u32 numbers[CHUNK];
    __shared__ float turned[DIM];
    const u32* merge = plan + args.merges + 4u * blockIdx.x;
    u32 head = blockIdx.y;
    u32 token = plan[args.order + merge[0]];
    const u32* list = plan + args.lists + merge[1];
    u32 n = merge[2];
    auto state = [&](u32 number) { return states + (size_t)(number * args.heads + head) * (DIM + 2u); };
    auto element = [&](u32 number, u32 j) {
        u32 e = threadIdx.x + THREADS * j;
        return e < DIM ? state(number)[e] : 0.0f;
    };

    float ahead[AHEAD][PER_THREAD];
#pragma unroll
    for (u32 i = 0u; i < AHEAD; i++) {
        u32 number = list[min(i, n - 1u)];
#pragma unroll
        for (u32 j = 0u; j < PER_THREAD; j++) { ahead[i][j] = i < n ? element(number, j) : 0.0f; }
    }
    float peak = NO_SCORE;
    for (u32 i = threadIdx.x; i < n; i += THREADS) { peak = fmaxf(peak, state(list[i])[DIM]); }
    for (u32 lanes = 16u; lanes > 0u; lanes /= 2u) { peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, lanes)); }
    if (threadIdx.x % 32u == 0u) { tops[threadIdx.x / 32u] = peak; }
    __syncthreads();
    for (u32 i = 0u; i < THREADS / 32u; i++) { peak = fmaxf(peak, tops[i]); }

    float total[PER_THREAD];
    for (u32 j = 0u; j < PER_THREAD; j++) { total[j] = 0.0f; }
    float norm = 0.0f;
    for (u32 first = 0u; first < n; first += CHUNK) {
        u32 here = min(CHUNK, n - first);
        if (threadIdx.x < here) {
            numbers[threadIdx.x] = list[first + threadIdx.x];
            const float* from = state(numbers[threadIdx.x]);
            float top = from[DIM];
            factors[threadIdx.x] = top == NO_SCORE ? -1.0f : power(top - peak);
            norms[threadIdx.x] = from[DIM + 1u];
        }
        __syncthreads();
        auto add = [&](u32 i, const float(&x)[PER_THREAD]) {
            float factor = factors[i];
#pragma unroll
            for (u32 j = 0u; j < PER_THREAD; j++) { total[j] = factor < 0.0f ? total[j] : total[j] + x[j] * factor; }
            norm = factor < 0.0f ? norm : norm + norms[i] * factor;
        };
        if (first == 0u) {
#pragma unroll
            for (u32 i = 0u; i < AHEAD; i++) {
                if (i < here) { add(i, ahead[i]); }
            }
        }
#pragma unroll 8
        for (u32 i = first == 0u ? AHEAD : 0u; i < here; i++) {
            float x[PER_THREAD];
#pragma unroll
            for (u32 j = 0u; j < PER_THREAD; j++) { x[j] = element(numbers[i], j); }
            add(i, x);
        }
        __syncthreads();
    }
    float factor = final_factor(sinks, args.has_sinks, peak, norm, head);
    for (u32 j = 0u; j < PER_THREAD; j++) {
        u32 e = threadIdx.x + THREADS * j;
        if (e < DIM) { turned[e] = total[j] * factor; }
    }
    __syncthreads();
    turn_rows_back(turned, DIM, 1u, V_TURN, V_WIDE);
    for (u32 e = threadIdx.x; e < DIM; e += THREADS) { out[(size_t)(token * args.heads + head) * DIM + e] = turned[e]; }
}
