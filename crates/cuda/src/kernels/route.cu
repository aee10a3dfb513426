// Which experts a token uses, and their weights (see routes.cu). A block has one token.
//
//   p = softmax(odds);  the `used` largest, of equal ones the first;  RENORMALISE: their sum becomes 1
//
// How many experts are before one, among all and among those that are used, says whether it is used, and which of them it is: no loop
// over the used ones, of which each waits for the last.

struct Args {
    u32 tokens;
    u32 experts;
    u32 used;
    u32 renormalise;
};

#define THREADS 128u
// Experts of a token that are looked at together.
#define KEPT 512u

// Whether expert a comes before expert b.
__device__ __forceinline__ bool is_before(float value_a, u32 a, float value_b, u32 b) {
    return value_a > value_b || (value_a == value_b && a < b);
}

// The experts of a token; of the first ones shared memory has the odds and whether they are used.
struct Experts {
    const float* odds;
    const float* values;
    const u32* flags;
    u32 n;
    u32 used;

    __device__ __forceinline__ float odd(u32 e) const {
        return e < KEPT ? values[e] : odds[e];
    }
    // How many experts are before e.
    __device__ __forceinline__ u32 before(u32 e) const {
        float value = odd(e);
        u32 n_before = 0u;
        for (u32 i = 0u; i < n; i++) { n_before += is_before(odd(i), i, value, e) ? 1u : 0u; }
        return n_before;
    }
    __device__ __forceinline__ bool is_used(u32 e) const {
        return e < KEPT ? flags[e] != 0u : before(e) < used;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) route(
    const float* __restrict__ odds, // [tokens, experts]
    u32* __restrict__ routes,       // as routes.cu says
    Args args) {
    __shared__ float values[KEPT];
    __shared__ u32 flags[KEPT];
    u32 token = blockIdx.x;
    Experts experts = {odds + token * args.experts, values, flags, args.experts, args.used};
    u32 kept = min(args.experts, KEPT);
    u32 rows = args.tokens * args.used;
    for (u32 e = threadIdx.x; e < kept; e += THREADS) { values[e] = experts.odds[e]; }
    // With odds that are not numbers a row may find no expert, if a compiler does not compare NaN as IEEE says.
    for (u32 i = threadIdx.x; i < args.used; i += THREADS) {
        routes[token * args.used + i] = 0u;
        routes[weight_at(rows, token * args.used + i)] = 0x7fc00000u;
    }
    __syncthreads();
    float largest = experts.odd(0u);
    for (u32 e = 1u; e < args.experts; e++) { largest = fmaxf(largest, experts.odd(e)); }
    for (u32 e = threadIdx.x; e < kept; e += THREADS) { flags[e] = experts.before(e) < args.used ? 1u : 0u; }
    __syncthreads();
    float sum = 0.0f;
    for (u32 e = 0u; e < args.experts; e++) {
        if (args.renormalise == 0u || experts.is_used(e)) { sum += exp_2((experts.odd(e) - largest) * LOG2_E); }
    }
    for (u32 e = threadIdx.x; e < args.experts; e += THREADS) {
        u32 n = 0u;
        for (u32 i = 0u; i < e; i++) { n += experts.is_used(i) ? 1u : 0u; }
        // NaN is before nothing and nothing before it: then there are too many.
        if (experts.is_used(e) && n < args.used) {
            u32 row = token * args.used + n;
            routes[row] = e;
            routes[weight_at(rows, row)] = __float_as_uint(exp_2((experts.odd(e) - largest) * LOG2_E) / sum);
        }
    }
}
