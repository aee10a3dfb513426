// Adds up the states of the splits of a row, in order, as `attend` does within a work item.
//
//   peak = max Mi;  total = sum of state i 2^(Mi - peak), in order;  out = as in `attend`, rotated back if values are stored rotated
//
// The maxima are integers, so the factors are exact, and the sum has the bits of one that is rescaled state by state. A block brings
// the states to shared memory all at once, so that it waits for memory once. Which states these are is in the plan, which no kernel
// writes: it reads that before it waits for the kernel before.

#define NO_SCORE -1e30f
#define THREADS 128u
// States in shared memory at the same time: 33 KB, or one.
#define CHUNK (DIM <= 128u ? 64u : (DIM <= 4096u ? 8192u / DIM : 1u))
#define STATE (DIM + 2u) // elements, maximum, norm
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
    __shared__ u32 numbers[CHUNK];
    __shared__ uint2 chunk[CHUNK * STATE / 2u + 1u];
    __shared__ float turned[DIM];
    float* near = reinterpret_cast<float*>(chunk); // [CHUNK, STATE]
    const u32* merge = plan + args.merges + 4u * blockIdx.x;
    u32 head = blockIdx.y;
    const u32* list = plan + args.lists + merge[1];
    u32 n = merge[2];
    u32 token = plan[args.order + merge[0]];
    auto state = [&](u32 number) { return states + (size_t)(number * args.heads + head) * STATE; };
    auto find = [&](u32 first) {
        if (threadIdx.x < min(CHUNK, n - first)) { numbers[threadIdx.x] = list[first + threadIdx.x]; }
        __syncthreads();
    };
    // Starts to copy states; all threads have to pass a barrier after the wait.
    auto copy = [&](u32 first) {
        constexpr u32 AT_ONCE = DIM % 2u == 0u ? 2u : 1u; // words: states lie at multiples of that
        constexpr u32 EACH = STATE / AT_ONCE;
        for (u32 i = threadIdx.x; i < min(CHUNK, n - first) * EACH; i += THREADS) {
            u32 word = i % EACH * AT_ONCE;
            copy_words<AT_ONCE>(
                reinterpret_cast<u32*>(near + i / EACH * STATE + word),
                reinterpret_cast<const u32*>(state(numbers[i / EACH]) + word));
        }
        end_group();
        wait_groups<0>();
    };

    find(0u);
    after_the_kernel_before();
    float peak = NO_SCORE;
    for (u32 i = CHUNK + threadIdx.x; i < n; i += THREADS) { peak = fmaxf(peak, state(list[i])[DIM]); }
    copy(0u);
    __syncthreads();
    for (u32 i = threadIdx.x; i < min(CHUNK, n); i += THREADS) { peak = fmaxf(peak, near[i * STATE + DIM]); }
    for (u32 lanes = 16u; lanes > 0u; lanes /= 2u) { peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, lanes)); }
    if (threadIdx.x % 32u == 0u) { tops[threadIdx.x / 32u] = peak; }
    __syncthreads();
    for (u32 i = 0u; i < THREADS / 32u; i++) { peak = fmaxf(peak, tops[i]); }

    float total[PER_THREAD];
    for (u32 j = 0u; j < PER_THREAD; j++) { total[j] = 0.0f; }
    float norm = 0.0f;
    for (u32 first = 0u; first < n; first += CHUNK) {
        if (first > 0u) {
            __syncthreads(); // no thread reads the states before
            find(first);
            copy(first);
            __syncthreads();
        }
        u32 here = min(CHUNK, n - first);
        if (threadIdx.x < here) {
            float top = near[threadIdx.x * STATE + DIM];
            factors[threadIdx.x] = top == NO_SCORE ? -1.0f : power(top - peak);
        }
        __syncthreads();
#pragma unroll 8
        for (u32 i = 0u; i < here; i++) {
            float factor = factors[i];
            const float* x = near + i * STATE;
#pragma unroll
            for (u32 j = 0u; j < PER_THREAD; j++) {
                u32 e = min(threadIdx.x + THREADS * j, DIM - 1u);
                total[j] = factor < 0.0f ? total[j] : total[j] + x[e] * factor;
            }
            norm = factor < 0.0f ? norm : norm + x[DIM + 1u] * factor;
        }
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
