// What sums over a row's cells are multiplied by at the end. A sink takes part in the softmax and has no value.
__device__ __forceinline__ float final_factor(const float* sinks, u32 has_sinks, float top, float norm, u32 head) {
    if (has_sinks == 0u) { return 1.0f / norm; }
    float sink = sinks[head] * LOG2_E;
    float peak = fmaxf(top, rintf(sink));
    float shrink = power(top - peak);
    return shrink / (norm * shrink + exp_2(sink - peak));
}
