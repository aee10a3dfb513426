// A linear layer for many tokens (see product.cu). A block has a tile of 32 outputs and 32 tokens. For 64 inputs at a time, a
// quad per lane, it decodes the tile's weights once to shared memory, beside the tokens' inputs. A thread has one lane of
// eight outputs and eight tokens.

#define THREADS 256u
#define EACH 8u // outputs of a thread, and tokens

extern "C" __global__ void __launch_bounds__(256) gemm(
    const u32* __restrict__ w,
    const float* __restrict__ x,      // [tokens, inputs]
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const u32* __restrict__ routes,   // as routes.cu says
    Args args) {
    __shared__ float4 weights[TILE * LANES];
    __shared__ float4 values[TILE * LANES];
    u32 lane = threadIdx.x % LANES;
    u32 first_output = threadIdx.x / LANES % 4u * EACH;
    u32 first_token = threadIdx.x / LANES / 4u * EACH;
    u32 tile_output = blockIdx.x * TILE;
    u32 tile_token = blockIdx.y * TILE;
    u32 quads = args.form.quads;
    Work work = work_of(routes, args, blockIdx.z);
    if (ROUTED && (tile_token >= work.tokens || tile_output >= work.outputs)) { return; } // the whole block
    float acc[EACH * EACH]; // [outputs, tokens]
#pragma unroll
    for (u32 i = 0u; i < EACH * EACH; i++) { acc[i] = 0.0f; }
    for (u32 first = 0u; first < quads; first += LANES) {
        for (u32 i = threadIdx.x; i < TILE * LANES; i += THREADS) {
            u32 c = first + i % LANES;
            u32 row = tile_output + i / LANES;
            u32 token = work.inputs(args, tile_token + i / LANES);
            float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            weights[i] = c < quads && row < work.outputs ? weights4(w, args.form, work.before + row, c) : none;
            values[i] = c < quads ? inputs4(x + token * args.inputs, args.inputs, c) : none;
        }
        __syncthreads();
        if (first + lane < quads) {
#pragma unroll
            for (u32 o = 0u; o < EACH; o++) {
                float4 weight = weights[(first_output + o) * LANES + lane];
#pragma unroll
                for (u32 t = 0u; t < EACH; t++) {
                    acc[o * EACH + t] =
                        add_product(acc[o * EACH + t], weight, values[(first_token + t) * LANES + lane]);
                }
            }
        }
        __syncthreads();
    }
    // Each lane ends up with four sums.
    add_lanes<EACH * EACH>(acc, lane);
#pragma unroll
    for (u32 i = 0u; i < EACH * EACH / LANES; i++) {
        u32 sum = lane * (EACH * EACH / LANES) + i;
        put(args, work, bias, out, tile_output + first_output + sum / EACH, tile_token + first_token + sum % EACH, acc[i]);
    }
}
