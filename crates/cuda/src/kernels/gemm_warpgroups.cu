// `gemm_fast` on the tensor cores of warpgroups (warpgroups.cu). There decoding and products take turns; here they run at the same time.
// The arguments, what is rounded and the errors are the same. Only for large tiles, and not for experts.
//
// A block has a tile of TILE_OUTPUTS outputs and TILE_TOKENS tokens: each of its two warpgroups half of the outputs with all tokens. It
// goes through the inputs in steps of STEP. While tensor cores compute step s, threads decode the weights of step s + 1, one block of
// 32 each. Then they ask for the weights of step s + 3 and the inputs of step s + AHEAD_INPUTS.
//
// What may be written when: at the barrier of step s, the products of step s - 2 have ended in both warpgroups, because each has waited
// for its own. Those of step s - 1 may still run. So three buffers of weights take turns (for s - 1, s and s + 1), and AHEAD_INPUTS + 2 of
// inputs. Because nothing waits for step s - 1 at that barrier, tensor cores have the next step before they have ended one.

#define THREADS 256u
#define STEP 64u  // inputs: rows of 128 bytes, as warpgroups.cu has them
#define CHUNKS 8u // of 16 bytes in shared memory, in a row
#define W_BYTES (TILE_OUTPUTS * STEP * 2u)
#define X_BYTES (TILE_TOKENS * STEP * 2u)
#define W_BUFFERS 3u
#define AHEAD_INPUTS (STAGES - 2u)
#define X_ROWS (THREADS / CHUNKS)      // rows of inputs that are copied at a time
#define SUM_STRIDE (TILE_OUTPUTS + 4u) // no two lanes that write meet in a bank
#define AHEAD 4u                       // steps that memory is asked for weights before they are loaded
#define BATCH 16u                      // results of a thread that are read and written together

static_assert(TILE_OUTPUTS == 128u && THREADS * 32u == TILE_OUTPUTS * STEP, "a thread decodes 32 weights of a step");
static_assert(AHEAD_INPUTS >= 2u, "the inputs of the next step are on their way before a step begins");

extern "C" __global__ void __launch_bounds__(256, 1) gemm(
    const u32* __restrict__ w,
    const uint4* __restrict__ x,      // [tokens, inputs] of halves.cu
    const float* __restrict__ bias,   // [width]
    float* __restrict__ out,          // [tokens, width]
    const u32* __restrict__ routes,   // none
    Args args) {
    MATRICES(shared);
    Corner corner = corner_of_tile();
    u32 tile_output = corner.output;
    u32 tile_token = corner.token;

    u32 lane = threadIdx.x % 32u;
    u32 warp = threadIdx.x / 32u;
    u32 warpgroup = warp / 4u;
    u32 steps = (args.inputs + 2u * STEP - 1u) / (2u * STEP) * 2u; // an even number: behind the end inputs are 0
    u32 x_stride = (args.inputs + 255u) / 256u * 32u;
    shared_address weights = shared_at(shared);            // [W_BUFFERS, TILE_OUTPUTS, CHUNKS]
    shared_address values = weights + W_BUFFERS * W_BYTES; // [STAGES, TILE_TOKENS, CHUNKS]
    float* backs = reinterpret_cast<float*>(shared + (W_BUFFERS * W_BYTES + STAGES * X_BYTES) / 16u); // [TILE_TOKENS]
    u32* kept = reinterpret_cast<u32*>(backs + TILE_TOKENS); // `last_block`
    // Tokens behind the last one compute it once more.
    auto token = [&](u32 t) { return (size_t)min(tile_token + t, args.tokens - 1u); };

    // This thread's block of weights in each step. Behind the end of a row it is the last one, because inputs are 0 there; of rows behind
    // the last one nothing is kept.
    u32 w_row = min(tile_output + threadIdx.x / 2u, args.outputs - 1u);
    u32 w_b = threadIdx.x % 2u;
    u32 last_block = (args.form.quads + 7u) / 8u - 1u;
    shared_address w_to[4];
#pragma unroll
    for (u32 j = 0u; j < 4u; j++) {
        w_to[j] = shared_at(shared + threadIdx.x / 2u * CHUNKS + swizzled(threadIdx.x / 2u, 4u * w_b + j));
    }
    Block even, odd; // of steps
    auto load = [&](u32 step, u32 last, Block& block) {
        block = load_block(w, args.form, w_row, min(step * 2u + w_b, last));
        prefetch_block(w, args.form, w_row, min((step + AHEAD) * 2u + w_b, last));
    };
    // Writes the weights of a step. Behind the last one no product reads them.
    auto decode = [&](u32 step, const Block& block) {
        uint4 halves[4];
        decode_block(block, args.scale, halves);
        u32 buffer = step % W_BUFFERS * W_BYTES;
#pragma unroll
        for (u32 j = 0u; j < 4u; j++) { put_shared(w_to[j] + buffer, halves[j]); }
    };

    // This thread's chunk of rows of inputs, X_ROWS from one row to the next.
    u32 x_row = threadIdx.x / CHUNKS;
    u32 x_chunk = threadIdx.x % CHUNKS;
    shared_address x_to = values + 16u * (x_row * CHUNKS + swizzled(x_row, x_chunk));
    const uint4* x_from[TILE_TOKENS / X_ROWS];
#pragma unroll
    for (u32 i = 0u; i < TILE_TOKENS / X_ROWS; i++) { x_from[i] = x + token(x_row + i * X_ROWS) * x_stride + x_chunk; }
    auto copy_inputs = [&](u32 step) {
        if (step < steps) {
            shared_address to = x_to + step % STAGES * X_BYTES;
#pragma unroll
            for (u32 i = 0u; i < TILE_TOKENS / X_ROWS; i++) {
                copy_16(to + i * (X_ROWS * CHUNKS * 16u), x_from[i] + step * CHUNKS);
            }
        }
        end_group(); // an empty one keeps the count
    };

    Sums<TILE_TOKENS> sums;
#pragma unroll
    for (u32 i = 0u; i < TILE_TOKENS / 2u; i++) { sums.d[i] = 0.0f; }
    Matrix a = matrix_at(weights + warpgroup * (W_BYTES / 2u));
    Matrix b = matrix_at(values);
    auto multiply_step = [&](u32 step) {
        Matrix a_step = moved(a, step % W_BUFFERS * W_BYTES);
        Matrix b_step = moved(b, step % STAGES * X_BYTES);
        begin_products();
#pragma unroll
        for (u32 k = 0u; k < STEP; k += 16u) { multiply(sums, columns(a_step, k), columns(b_step, k)); }
        end_products(sums);
    };

    // Tensor cores have products of one warpgroup while the other one decodes.
    bool early = warpgroup == 1u;
    // A step. `next`: the weights of the next one, and then those of two steps later.
    auto compute = [&](u32 step, Block& next) {
        __syncthreads(); // all threads' inputs and weights of this step are there
        if (early) { decode(step + 1u, next); }
        multiply_step(step);
        if (!early) { decode(step + 1u, next); }
        // The fence may wait for all that this thread has asked memory for: that was a step ago. The compiler would load weights before it,
        // if their addresses did not need what is read behind it.
        wait_groups<AHEAD_INPUTS - 2>();
        written_for_products();
        load(step + 3u, *const_cast<volatile u32*>(kept), next);
        copy_inputs(step + AHEAD_INPUTS);
        wait_products<1>(sums); // those of the step before
    };

    load(0u, last_block, even);
    load(1u, last_block, odd);
#pragma unroll
    for (u32 step = 0u; step < AHEAD_INPUTS; step++) { copy_inputs(step); }
    float back = __uint_as_float(x[args.tokens * (size_t)x_stride + token(threadIdx.x % TILE_TOKENS)].x);
    decode(0u, even);
    load(2u, last_block, even);
    *kept = last_block;
    backs[threadIdx.x % TILE_TOKENS] = back;
    wait_groups<AHEAD_INPUTS - 1>();
    written_for_products();
#pragma unroll 1
    for (u32 step = 0u; step < steps; step += 2u) {
        compute(step, odd);
        compute(step + 1u, even);
    }
    wait_products<0>(sums);
    wait_groups<0>();
    __syncthreads(); // no product reads shared memory any more
    float* totals = reinterpret_cast<float*>(shared); // [TILE_TOKENS, SUM_STRIDE]
#pragma unroll
    for (u32 i = 0u; i < TILE_TOKENS / 2u; i++) {
        u32 o = warp * 16u + i / 2u % 2u * 8u + lane / 4u;
        u32 t = i / 4u * 8u + lane % 4u * 2u + i % 2u;
        totals[t * SUM_STRIDE + o] = sums.d[i];
    }
    __syncthreads();
    // A thread has one output of every other token. Results that are added to are read some at a time: each read takes long.
    u32 row = threadIdx.x % TILE_OUTPUTS;
    u32 o = tile_output + row;
    if (o >= args.outputs) { return; }
    float undo = row_scale(w, args.form, o, args.scale);
    float offset = args.has_bias != 0u ? bias[args.first + o] : 0.0f;
    u32 n_tokens = min(TILE_TOKENS, args.tokens - tile_token);
    for (u32 first = threadIdx.x / TILE_OUTPUTS; first < n_tokens; first += 2u * BATCH) {
        u32 at = (tile_token + first) * args.width + args.first + o;
        float before[BATCH], y[BATCH];
#pragma unroll
        for (u32 i = 0u; i < BATCH; i++) {
            u32 t = first + 2u * i;
            before[i] = ADDED && t < n_tokens ? out[at + 2u * i * args.width] : 0.0f;
            y[i] = fmaf(totals[t * SUM_STRIDE + row] * undo * backs[t], args.factor, offset);
        }
        if (args.cap > 0.0f) {
#pragma unroll
            for (u32 i = 0u; i < BATCH; i++) { y[i] = capped(args, y[i]); }
        }
#pragma unroll
        for (u32 i = 0u; i < BATCH; i++) {
            if (first + 2u * i < n_tokens) { out[at + 2u * i * args.width] = ADDED ? before[i] + y[i] : y[i]; }
        }
    }
}
