// A linear layer for many tokens (see product.cu) on tensor cores: `gemm` where a row's last bits may depend on its batch.
//
// A block has a tile of TILE_OUTPUTS outputs and TILE_TOKENS tokens. It goes through the inputs in steps of STEP, so that a thread
// decodes 32 weights per step (blocks.cu), to f16 in shared memory, beside the tokens' inputs, which are f16 already (halves.cu).
// The warps share the tile, and the inputs of a step: WARPS_M x WARPS_N parts of the tile times WARPS_K parts of each step. The latter
// have sums of their own, which are added at the end: with large parts of the tile, shared memory is read less often.
//
// While one step is computed, the words of the next weights are on their way to registers, and inputs of the next STAGES - 1
// steps to shared memory. Of two warps that share a tensor core, one decodes before it multiplies and the other one after.
//
// Numbers: f16 has 11 bits, as tf32, at twice its speed. Its range is no limit here. Each row of inputs has a power of two of its own
// (halves.cu), the matrix has one, too (`args.scale`), and both are undone in the sums. So no product overflows, and what is lost to
// underflow is below 2^-39 of the row's, or 2^-30 of the matrix', largest magnitude. Two roundings to 11 bits make about 2e-4 of a
// result's norm. bf16 would need two products for that, and rounds decoded weights to 8 bits. Sums are f32.

#define THREADS 256u
#define STEP (8192u / TILE_OUTPUTS) // inputs
#define BLOCKS (STEP / 32u)         // of weights, in a row
#define CHUNKS (STEP / 8u)          // of 16 bytes in shared memory, in a row
#define M_TILES (TILE_OUTPUTS / WARPS_M / 16u) // of a warp: 16 outputs each
#define N_TILES (TILE_TOKENS / WARPS_N / 8u)   // 8 tokens each
#define PART (STEP / WARPS_K)                  // inputs of a step that a warp has
#define SUMS (M_TILES * N_TILES * 4u)          // of a thread
#define X_ROWS (THREADS / CHUNKS)              // rows of inputs that are copied at a time
#define SUM_STRIDE (TILE_OUTPUTS + 4u)         // no two lanes that write meet in a bank
#define AHEAD 4u                               // steps that memory is asked for weights before they are loaded

// Where chunk c of a row lies among the row's: neither what ldmatrix reads (one chunk of eight rows) nor what is written at the same
// time (the chunks of one row, or the j-th of every four in neighbouring rows) meets in a bank.
__device__ __forceinline__ u32 place(u32 row, u32 c) {
    return c ^ ((row ^ (c / 8u * (256u / STEP))) & 7u);
}

// Adds up the sums of warps that have the same part of the tile. At first each exchange also halves the sums that a warp is
// responsible for: warp k of WARPS_K ends with sums k * SUMS / WARPS_K and those behind it, in the first places of `acc`.
template <u32 N, u32 HALF>
__device__ __forceinline__ void add_warps(float* acc, u32 k, u32 warp, float* shared) {
    if constexpr (HALF > 0u) {
        bool upper = (k & HALF) != 0u;
        u32 lane = threadIdx.x % 32u;
        __syncthreads();
#pragma unroll
        for (u32 i = 0u; i < N / 2u; i++) {
            shared[(warp * (N / 2u) + i) * 32u + lane] = upper ? acc[i] : acc[i + N / 2u];
        }
        __syncthreads();
        u32 other = warp ^ (HALF * WARPS_M * WARPS_N);
#pragma unroll
        for (u32 i = 0u; i < N / 2u; i++) {
            acc[i] = (upper ? acc[i + N / 2u] : acc[i]) + shared[(other * (N / 2u) + i) * 32u + lane];
        }
        add_warps<N / 2u, HALF / 2u>(acc, k, warp, shared);
    }
}

// The rows of `x` of the tile's tokens, those from number `first` on. Returns how many there are. What is left of the tile computes the last
// one once more.
__device__ __forceinline__ u32 find_tokens(const Work& work, const Args& args, u32 first, u32* tokens) {
    for (u32 i = threadIdx.x; i < TILE_TOKENS; i += THREADS) { tokens[i] = work.inputs(args, first + i); }
    return min(TILE_TOKENS, work.tokens - first);
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS_PER_SM) gemm(
    const u32* __restrict__ w,
    const uint4* __restrict__ x,      // [tokens, inputs] of halves.cu
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const u32* __restrict__ routes,   // as routes.cu says
    Args args) {
    DYNAMIC_SHARED(shared);
    __shared__ u32 tokens[TILE_TOKENS];
    Corner corner = corner_of_tile();
    u32 tile_output = corner.output;
    u32 tile_token = corner.token;
    Work work = work_of(routes, args, blockIdx.z);
    if (ROUTED && (tile_token >= work.tokens || tile_output >= work.outputs)) { return; } // the whole block
    u32 n_tokens = find_tokens(work, args, tile_token, tokens);
    __syncthreads();

    u32 lane = threadIdx.x % 32u;
    u32 warp = threadIdx.x / 32u;
    u32 warp_k = warp / (WARPS_M * WARPS_N);
    u32 first_output = warp % WARPS_M * (TILE_OUTPUTS / WARPS_M);
    u32 first_token = warp / WARPS_M % WARPS_N * (TILE_TOKENS / WARPS_N);
    u32 steps = (args.inputs + STEP - 1u) / STEP;
    u32 x_stride = (args.inputs + 255u) / 256u * 32u;
    uint4* weights = shared;                             // [2, TILE_OUTPUTS, CHUNKS]
    uint4* values = shared + 2u * TILE_OUTPUTS * CHUNKS; // [STAGES, TILE_TOKENS, CHUNKS]

    // This thread's block of weights in each step. Behind the end of a row it is the last one, because inputs are 0 there; of rows behind
    // the last one nothing is kept.
    u32 w_row = work.before + min(tile_output + threadIdx.x / BLOCKS, work.outputs - 1u);
    u32 w_b = threadIdx.x % BLOCKS;
    u32 last_block = (args.form.quads + 7u) / 8u - 1u;
    shared_address w_to[4];
#pragma unroll
    for (u32 j = 0u; j < 4u; j++) {
        w_to[j] = shared_at(weights + threadIdx.x / BLOCKS * CHUNKS + place(threadIdx.x / BLOCKS, 4u * w_b + j));
    }
    Block block;
    auto load = [&](u32 step) {
        block = load_block(w, args.form, w_row, min(step * BLOCKS + w_b, last_block));
        prefetch_block(w, args.form, w_row, min((step + AHEAD) * BLOCKS + w_b, last_block));
    };
    // Writes the weights of a step, and loads those of the next one. Behind the last step it writes what no thread reads.
    auto decode = [&](u32 step) {
        uint4 halves[4];
        decode_block(block, args.scale, halves);
#pragma unroll
        for (u32 j = 0u; j < 4u; j++) { put_shared(w_to[j] + step % 2u * (TILE_OUTPUTS * CHUNKS * 16u), halves[j]); }
        load(step + 1u);
    };

    // This thread's chunk of rows of inputs, X_ROWS from one row to the next.
    u32 x_row = threadIdx.x / CHUNKS;
    u32 x_chunk = threadIdx.x % CHUNKS;
    shared_address x_to = shared_at(values + x_row * CHUNKS + place(x_row, x_chunk));
    auto copy_inputs = [&](u32 step) {
        if (step < steps) {
            shared_address to = x_to + step % STAGES * (TILE_TOKENS * CHUNKS * 16u);
            const uint4* from = x + step * CHUNKS + x_chunk;
#pragma unroll
            for (u32 i = 0u; i < (TILE_TOKENS + X_ROWS - 1u) / X_ROWS; i++) {
                if (TILE_TOKENS % X_ROWS == 0u || x_row + i * X_ROWS < TILE_TOKENS) {
                    copy_16(to + i * (X_ROWS * CHUNKS * 16u), from + (size_t)tokens[x_row + i * X_ROWS] * x_stride);
                }
            }
        }
        end_group(); // an empty one keeps the count
    };

    float acc[M_TILES][N_TILES][4];
#pragma unroll
    for (u32 m = 0u; m < M_TILES; m++) {
#pragma unroll
        for (u32 n = 0u; n < N_TILES; n++) {
#pragma unroll
            for (u32 i = 0u; i < 4u; i++) { acc[m][n][i] = 0.0f; }
        }
    }
    // What this lane gives to ldmatrix: a row of each, and a chunk, of which further ones differ in bits of their own.
    u32 w_at = first_output + lane % 16u;
    u32 x_at = first_token + lane % 8u + lane / 16u * 8u;
    shared_address w_rows = shared_at(weights + w_at * CHUNKS);
    shared_address x_rows = shared_at(values + x_at * CHUNKS);
    u32 w_chunk = 16u * place(w_at, warp_k * (PART / 8u) + lane / 16u);
    u32 x_chunks = 16u * place(x_at, warp_k * (PART / 8u) + lane / 8u % 2u);
    auto multiply = [&](u32 step) {
        shared_address w_step = w_rows + step % 2u * (TILE_OUTPUTS * CHUNKS * 16u);
        shared_address x_step = x_rows + step % STAGES * (TILE_TOKENS * CHUNKS * 16u);
#pragma unroll
        for (u32 k = 0u; k < PART / 16u; k++) {
            shared_address w_from = w_step + (w_chunk ^ (32u * k));
            shared_address x_from = x_step + (x_chunks ^ (32u * k));
            u32 a[M_TILES][4];
#pragma unroll
            for (u32 m = 0u; m < M_TILES; m++) { ldmatrix_x4(a[m], w_from + m * (16u * CHUNKS * 16u)); }
#pragma unroll
            for (u32 n = 0u; n < N_TILES; n += 2u) {
                u32 b[4];
                ldmatrix_x4(b, x_from + n * (8u * CHUNKS * 16u));
                u32 low[2] = {b[0], b[1]};
                u32 high[2] = {b[2], b[3]};
#pragma unroll
                for (u32 m = 0u; m < M_TILES; m++) {
                    mma_f16_16816(acc[m][n], a[m], low);
                    mma_f16_16816(acc[m][n + 1u], a[m], high);
                }
            }
        }
    };

    load(0u);
#pragma unroll
    for (u32 step = 0u; step + 1u < STAGES; step++) { copy_inputs(step); }
    decode(0u);
    bool early = warp < 4u; // warps w and w + 4 share a tensor core
    for (u32 step = 0u; step < steps; step++) {
        wait_groups<STAGES - 2>();
        // The copies and weights of all threads for this step are there, and no thread reads those of the last step any more.
        __syncthreads();
        copy_inputs(step + STAGES - 1u);
        if (early) { decode(step + 1u); }
        multiply(step);
        if (!early) { decode(step + 1u); }
    }

    wait_groups<0>();
    float* sums = reinterpret_cast<float*>(shared); // [TILE_TOKENS, SUM_STRIDE]
    add_warps<SUMS, WARPS_K / 2u>(&acc[0][0][0], warp_k, warp, sums);
    __syncthreads();
#pragma unroll
    for (u32 i = 0u; i < SUMS / WARPS_K; i++) {
        u32 sum = warp_k * (SUMS / WARPS_K) + i;
        u32 tile = sum / 4u;
        u32 o = first_output + tile / N_TILES * 16u + sum / 2u % 2u * 8u + lane / 4u;
        u32 t = first_token + tile % N_TILES * 8u + lane % 4u * 2u + sum % 2u;
        sums[t * SUM_STRIDE + o] = (&acc[0][0][0])[i];
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < n_tokens * TILE_OUTPUTS; i += THREADS) {
        u32 o = tile_output + i % TILE_OUTPUTS;
        if (o >= work.outputs) { continue; }
        u32 rows = ROUTED ? args.tokens / args.share : args.tokens;
        float back = __uint_as_float(x[(size_t)rows * x_stride + tokens[i / TILE_OUTPUTS]].x);
        float sum = sums[i / TILE_OUTPUTS * SUM_STRIDE + i % TILE_OUTPUTS];
        float scale = row_scale(w, args.form, work.before + o, args.scale) * back;
        put(args, work, bias, out, o, tile_token + i / TILE_OUTPUTS, sum * scale);
    }
}
