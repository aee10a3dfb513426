// The most likely tokens of a row of logits: the largest first, equal ones in order of their numbers.
//
//   answers[r] = (how many; 0xffffffff if a logit is NaN), then that many (token, logit)
//
// k passes over the row, each of which finds the next token after the last one. Rows that want 0 tokens are skipped.

struct Args {
    u32 vocab;
    u32 wanted; // first word of [rows] numbers of tokens
    u32 stride; // words of an answer
};

#define THREADS 512u
#define WARPS (THREADS / 32u)
#define NONE 0xffffffffu

__device__ __forceinline__ bool better(float a, u32 i, float b, u32 j) {
    return i != NONE && (j == NONE || a > b || (a == b && i < j));
}

extern "C" __global__ void __launch_bounds__(512) top(
    const float* __restrict__ logits, // [rows, vocab]
    const u32* __restrict__ wanted,
    u32* __restrict__ answers,
    Args args) {
    __shared__ float values[WARPS];
    __shared__ u32 tokens[WARPS];
    __shared__ u32 broken[WARPS];
    u32 lane = threadIdx.x;
    u32 k = wanted[args.wanted + blockIdx.x];
    const float* row = logits + blockIdx.x * args.vocab;
    u32* answer = answers + blockIdx.x * args.stride;
    float last = 0.0f;
    u32 last_token = NONE;
    for (u32 i = 0u; i < k; i++) {
        float best = 0.0f;
        u32 token = NONE;
        u32 nan = 0u;
        for (u32 t = lane; t < args.vocab; t += THREADS) {
            float x = row[t];
            nan |= is_nan(x) ? 1u : 0u;
            bool left = last_token == NONE || x < last || (x == last && t > last_token);
            if (left && better(x, t, best, token)) {
                best = x;
                token = t;
            }
        }
        for (u32 half = 16u; half > 0u; half /= 2u) {
            nan |= __shfl_xor_sync(0xffffffffu, nan, half);
            float other = __shfl_xor_sync(0xffffffffu, best, half);
            u32 other_token = __shfl_xor_sync(0xffffffffu, token, half);
            if (better(other, other_token, best, token)) {
                best = other;
                token = other_token;
            }
        }
        if (lane % 32u == 0u) {
            values[lane / 32u] = best;
            tokens[lane / 32u] = token;
            broken[lane / 32u] = nan;
        }
        __syncthreads();
        last = values[0];
        last_token = tokens[0];
        nan = broken[0];
        for (u32 warp = 1u; warp < WARPS; warp++) {
            nan |= broken[warp];
            if (better(values[warp], tokens[warp], last, last_token)) {
                last = values[warp];
                last_token = tokens[warp];
            }
        }
        if (lane == 0u) {
            answer[0] = nan != 0u ? NONE : i + 1u;
            answer[1u + 2u * i] = last_token;
            answer[2u + 2u * i] = __float_as_uint(last);
        }
        __syncthreads();
    }
}
