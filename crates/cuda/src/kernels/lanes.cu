// Sums over neighbouring lanes.

#define WARP 0xffffffffu

// Adds up N sums over 2 HALF lanes, as a binary tree. At first each exchange also halves the sums that a lane is responsible
// for, so that all of them take about N shuffles. Lane l ends with sums l * N / (2 HALF) and those behind it, or lanes that
// share one have it alike. The order in which lanes are added does not depend on N.
template <u32 N, u32 HALF>
__device__ __forceinline__ void add_up(float* acc, u32 lane) {
    if constexpr (HALF > 0u && N == 1u) {
        acc[0] += __shfl_xor_sync(WARP, acc[0], HALF);
        add_up<1u, HALF / 2u>(acc, lane);
    } else if constexpr (HALF > 0u) {
        bool upper = (lane & HALF) != 0u;
#pragma unroll
        for (u32 i = 0u; i < N / 2u; i++) {
            float mine = upper ? acc[i + N / 2u] : acc[i];
            float sent = upper ? acc[i] : acc[i + N / 2u];
            acc[i] = mine + __shfl_xor_sync(WARP, sent, HALF);
        }
        add_up<N / 2u, HALF / 2u>(acc, lane);
    }
}
