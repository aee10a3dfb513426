// A linear layer, or a part of its outputs, as `matmul`, `gemm`, `gemm_fast` and `gemm_warpgroups` compute it.
//
//   for each output row o of this part, for each token t:
//     y = factor * (x[t] . W[o]) + bias[o];  with a softcap: y = cap * tanh(y / cap)
//     out[t, first + o] = y
//   ADDED: out[t, first + o] += y
//   ROUTED: the same layer of every expert, one behind the other. A row of `out` is a routed row (see routes.cu): `out[r]` is what its
//   expert makes of x[r / share]. Biases
//   are [experts, width] and inputs [tokens / share, inputs]. TILED: rows are those that `sort` lists, otherwise any.
//
// In `matmul` and `gemm` x[t] . W[o] has 16 lanes. Lane l adds up the quads l, l + 16, ... of the row, one fma after the other; the lanes are
// added as a binary tree. So a token's result is the same in both kernels, and in every batch.
// The fast kernels add up in other orders, which depend on the number of tokens.

struct Args {
    Form form;
    u32 inputs;
    u32 outputs; // of this part
    u32 first;   // output of the layer, or ROUTED of all experts' layers, that is this part's first
    u32 width;   // outputs of the layer
    u32 tokens;  // rows of `out`
    float factor;
    float cap; // 0: none
    u32 has_bias;
    u32 experts;
    u32 share;   // rows of `out` for each row of `x`, one behind the other
    float scale; // a power of two that brings every weight into the range of f16, for the fast ones
};

// sum + a . b, one after the other
__device__ __forceinline__ float add_product(float sum, float4 a, float4 b) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
}

// Adds up N sums over 16 lanes. For N <= 16 sum i ends in `acc[0]` of lane i * 16 / N; for more, lane l has sums l * N / 16 and
// those behind it.
template <u32 N>
__device__ __forceinline__ void add_lanes(float* acc, u32 lane) {
    add_up<N, LANES / 2u>(acc, lane);
}

// What a block computes: outputs of a layer, for tokens.
struct Work {
    u32 before;        // rows of this part that belong to earlier experts
    u32 outputs;       // of the layer that are in this part
    u32 first;         // the first one of them
    u32 bias;          // where the layer's biases begin
    const u32* sorted; // the expert's rows, as `sort` has listed them
    u32 tokens;        // how many

    // The row of `out` of a token, which is one of those that there are.
    __device__ __forceinline__ u32 row(u32 token) const {
        return ROUTED && TILED ? sorted[token] : token;
    }
    // The row of `x`.
    __device__ __forceinline__ u32 inputs(const Args& args, u32 token) const {
        u32 of = row(min(token, tokens - 1u));
        return ROUTED ? of / args.share : of;
    }
};

// For tiles: there is nothing to do if the first token of one is not below `tokens`.
__device__ __forceinline__ Work work_of(const u32* routes, const Args& args, u32 expert) {
    Work work = {0u, args.outputs, args.first, 0u, nullptr, args.tokens};
    if (ROUTED) {
        u32 begin = expert * args.width;
        u32 low = max(begin, args.first);
        work.outputs = max(low, min(begin + args.width, args.first + args.outputs)) - low;
        work.before = low - args.first;
        work.first = low - begin;
        work.bias = begin;
        if (TILED) {
            u32 first = routes[begin_at(args.tokens, expert)];
            work.sorted = routes + sorted_at(args.tokens, args.experts, first);
            work.tokens = routes[begin_at(args.tokens, expert + 1u)] - first;
        }
    }
    return work;
}

__device__ __forceinline__ float capped(const Args& args, float y) {
    return args.cap * tanh_(y / args.cap);
}

// Finishes output o for a token.
__device__ __forceinline__ void put(
    const Args& args, const Work& work, const float* bias, float* out, u32 o, u32 token, float sum) {
    if (o >= work.outputs || token >= work.tokens) { return; }
    float y = args.has_bias != 0u ? fmaf(sum, args.factor, bias[work.bias + work.first + o]) : sum * args.factor;
    if (args.cap > 0.0f) { y = capped(args, y); }
    u32 at = work.row(token) * args.width + work.first + o;
    out[at] = ADDED ? out[at] + y : y;
}
