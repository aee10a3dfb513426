// The most likely tokens of a row of logits: the largest first, equal ones in order of their numbers.
//
//   answers[r] = (how many; 0xffffffff if a logit is NaN), then that many (token, logit)
//
// One token takes one pass over the row. More take two: the k-th largest of the threads' own maxima is a bound that at least k logits reach
// and few exceed; those are collected and sorted. If too many reach it (many equal ones), k passes find one token after the other.
// Rows that want 0 tokens are skipped.

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

// A number whose order is that of logits; both zeros have the same. 0 is none.
__device__ __forceinline__ u32 key_of(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return bits ^ ((bits >> 31) == 1u ? 0xffffffffu : 0x80000000u);
}

// Logits on their way into order.
struct Found {
    u32 keys[THREADS];
    u32 tokens[THREADS];
    u32 n;

    // The largest first, equal ones by their tokens (bitonic: Batcher, 1968). All threads must call it, after a barrier.
    __device__ __forceinline__ void sort() {
        u32 thread = threadIdx.x;
        for (u32 size = 2u; size <= THREADS; size *= 2u) {
            for (u32 stride = size / 2u; stride > 0u; stride /= 2u) {
                u32 other = thread ^ stride;
                if (other > thread) {
                    u32 a = keys[thread], b = keys[other], i = tokens[thread], j = tokens[other];
                    bool in_order = a > b || (a == b && i < j);
                    if (in_order != ((thread & size) == 0u)) {
                        keys[thread] = b;
                        keys[other] = a;
                        tokens[thread] = j;
                        tokens[other] = i;
                    }
                }
                __syncthreads();
            }
        }
    }
};

// Finds k tokens at once. Whether it has: the same for all threads.
__device__ __forceinline__ bool find_all(Found& found, u32* broken, u32 k, const float* row, u32 vocab, u32* answer) {
    u32 thread = threadIdx.x;
    u32 most = 0u, nan = 0u;
    for (u32 t = thread; t < vocab; t += THREADS) {
        float x = row[t];
        nan |= is_nan(x) ? 1u : 0u;
        most = max(most, key_of(x));
    }
    found.keys[thread] = most;
    found.tokens[thread] = thread;
    if (thread == 0u) { found.n = 0u; }
    for (u32 half = 16u; half > 0u; half /= 2u) { nan |= __shfl_xor_sync(0xffffffffu, nan, half); }
    if (thread % 32u == 0u) { broken[thread / 32u] = nan; }
    __syncthreads();
    for (u32 warp = 0u; warp < WARPS; warp++) { nan |= broken[warp]; }
    if (nan != 0u) {
        if (thread == 0u) { answer[0] = NONE; }
        return true;
    }
    found.sort();
    u32 bound = found.keys[k - 1u];
    __syncthreads();
    found.keys[thread] = 0u;
    found.tokens[thread] = NONE;
    __syncthreads();
    for (u32 t = thread; t < vocab; t += THREADS) {
        u32 key = key_of(row[t]);
        if (key >= bound) {
            u32 at = atomicAdd(&found.n, 1u);
            if (at < THREADS) {
                found.keys[at] = key;
                found.tokens[at] = t;
            }
        }
    }
    __syncthreads();
    u32 n = found.n;
    if (n < k || n > THREADS) { return false; }
    found.sort();
    if (thread < k) {
        answer[1u + 2u * thread] = found.tokens[thread];
        answer[2u + 2u * thread] = __float_as_uint(row[found.tokens[thread]]);
    }
    if (thread == 0u) { answer[0] = k; }
    return true;
}

extern "C" __global__ void __launch_bounds__(512) top(
    const float* __restrict__ logits, // [rows, vocab]
    const u32* __restrict__ wanted,
    u32* __restrict__ answers,
    Args args) {
    __shared__ float values[WARPS];
    __shared__ u32 tokens[WARPS];
    __shared__ u32 broken[WARPS];
    __shared__ Found found;
    u32 lane = threadIdx.x;
    u32 k = wanted[args.wanted + blockIdx.x];
    const float* row = logits + blockIdx.x * args.vocab;
    u32* answer = answers + blockIdx.x * args.stride;
    if (k > 1u && k <= THREADS) {
        if (find_all(found, broken, k, row, args.vocab, answer)) { return; }
        __syncthreads();
    }
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
