// Which experts a token uses, and their weights. One thread per token.
//
//   p = softmax(odds);  the `used` largest, of equal ones the first;  RENORMALISE: their sum becomes 1
//   routes[t, e] = p[e], 0 for the others

struct Args {
    u32 tokens;
    u32 experts;
    u32 used;
    u32 renormalise;
};

extern "C" __global__ void route(
    const float* __restrict__ odds, // [tokens, experts]
    float* __restrict__ routes,     // [tokens, experts]
    Args args) {
    u32 token = blockIdx.x * 64u + threadIdx.x;
    if (token >= args.tokens) { return; }
    u32 first = token * args.experts;
    float largest = odds[first];
    for (u32 e = 1u; e < args.experts; e++) { largest = fmaxf(largest, odds[first + e]); }
    float sum = 0.0f;
    for (u32 e = 0u; e < args.experts; e++) {
        sum += exp_2((odds[first + e] - largest) * LOG2_E);
        routes[first + e] = 0.0f;
    }
    float kept = 0.0f;
    // The next largest after the last one, in order of (odds descending, number ascending).
    float last = 0.0f;
    u32 last_expert = 0u;
    for (u32 i = 0u; i < args.used; i++) {
        bool found = false;
        float next = 0.0f;
        u32 expert = 0u;
        for (u32 e = 0u; e < args.experts; e++) {
            float odd = odds[first + e];
            bool left = i == 0u || odd < last || (odd == last && e > last_expert);
            if (left && (!found || odd > next)) {
                found = true;
                next = odd;
                expert = e;
            }
        }
        if (!found) { break; }
        float p = exp_2((next - largest) * LOG2_E);
        kept += p;
        routes[first + expert] = p;
        last = next;
        last_expert = expert;
    }
    if (args.renormalise != 0u) { sum = kept; }
    for (u32 e = 0u; e < args.experts; e++) { routes[first + e] /= sum; }
}
