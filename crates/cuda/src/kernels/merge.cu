// Adds up the states of the splits of a row, in order, as `attend` does within a work item.
//
//   total = state 0;  total = total 2^(Mt - M*) + state 2^(M - M*) for the others;  out = as in `attend`,
//   rotated back if values are stored rotated

#define NO_SCORE -1e30f

struct Args {
    u32 heads;
    u32 order;
    u32 merges; // first word of [slots] (slot, first word of the list of its partials, their number, 0)
    u32 lists;
    u32 has_sinks;
};

extern "C" __global__ void merge(
    const float* __restrict__ states,
    const u32* __restrict__ plan,
    const float* __restrict__ sinks,
    float* __restrict__ out,
    Args args) {
    const u32* merge = plan + args.merges + 4u * blockIdx.x;
    u32 head = blockIdx.y;
    u32 token = plan[args.order + merge[0]];
    u32 n = merge[2];
    __shared__ float turned[DIM];
    for (u32 e = threadIdx.x; e < DIM; e += 64u) {
        float total_max = NO_SCORE;
        float total_norm = 0.0f;
        float total = 0.0f;
        for (u32 i = 0u; i < n; i++) {
            const float* state = states + (plan[args.lists + merge[1] + i] * args.heads + head) * (DIM + 2u);
            float top = state[DIM];
            if (top == NO_SCORE) { continue; }
            if (total_max == NO_SCORE) {
                total = state[e];
                total_norm = state[DIM + 1u];
                total_max = top;
            } else {
                float peak = fmaxf(total_max, top);
                float a = power(total_max - peak);
                float b = power(top - peak);
                total = total * a + state[e] * b;
                total_norm = total_norm * a + state[DIM + 1u] * b;
                total_max = peak;
            }
        }
        turned[e] = total * final_factor(sinks, args.has_sinks, total_max, total_norm, head);
    }
    __syncthreads();
    turn_rows_back(turned, DIM, 1u, V_TURN, V_WIDE);
    for (u32 e = threadIdx.x; e < DIM; e += 64u) { out[(token * args.heads + head) * DIM + e] = turned[e]; }
}
