/* Attention over rows in the caller's memory, compared with attention in plain loops: a prompt, then tokens one by one, with K and
 * V in f32. q and out lie as [heads, tokens, dim], K and V as [tokens, heads, dim]. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "kvist.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 16, LAYERS = 2, MAX = 32 };

static void check(kvist_status status, const char *what) {
    if (status != KVIST_OK) {
        fprintf(stderr, "%s: %s\n", what, kvist_last_error());
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

static float number(void) { /* from -1 to 1 */
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) / (1 << 23) - 1;
}

static float keys[LAYERS][MAX][KV_HEADS][DIM], values[LAYERS][MAX][KV_HEADS][DIM]; /* of the plain loops */

static float plain(int layer, int head, int position, const float *q, float scale, float *out) {
    float scores[MAX], sum = 0, largest = -INFINITY;
    int kv = head / (HEADS / KV_HEADS);
    for (int p = 0; p <= position; p++) {
        scores[p] = 0;
        for (int d = 0; d < DIM; d++) scores[p] += q[d] * keys[layer][p][kv][d] * scale;
        largest = fmaxf(largest, scores[p]);
    }
    for (int p = 0; p <= position; p++) sum += scores[p] = expf(scores[p] - largest);
    float worst = 0;
    for (int d = 0; d < DIM; d++) {
        float expected = 0;
        for (int p = 0; p <= position; p++) expected += scores[p] / sum * values[layer][p][kv][d];
        worst = fmaxf(worst, fabsf(expected - out[d]));
    }
    return worst;
}

int main(void) {
    kvist_layer layers[LAYERS];
    for (int l = 0; l < LAYERS; l++) layers[l] = (kvist_layer){.group = 0, .owner = (uint16_t)l, .n_kv_heads = KV_HEADS, .head_dim = DIM};
    kvist_group group = {.capacity_tokens = MAX};
    kvist_cache_options options = {
        .kind = "contiguous", .backend = "cpu", .k = "f32", .layers = layers, .n_layers = LAYERS,
        .groups = &group, .n_groups = 1, .n_heads = HEADS, .max_step_tokens = 16, .threads = 1,
    };
    kvist_cache *cache;
    CHECK(kvist_cache_new(&options, &cache));

    float worst = 0, scale = 1 / sqrtf(DIM);
    int start = 0, steps[] = {9, 1, 1, 4};
    for (int s = 0; s < 4; s++) {
        int n = steps[s];
        kvist_span span = {.seq = 0, .start = (uint32_t)start, .n_tokens = (uint32_t)n};
        CHECK(kvist_step_begin(cache, &span, 1));
        for (int l = 0; l < LAYERS; l++) {
            float q[HEADS][16][DIM], out[HEADS][16][DIM];
            for (int t = 0; t < n; t++) {
                for (int h = 0; h < HEADS; h++)
                    for (int d = 0; d < DIM; d++) q[h][t][d] = number();
                for (int h = 0; h < KV_HEADS; h++)
                    for (int d = 0; d < DIM; d++) keys[l][start + t][h][d] = number(), values[l][start + t][h][d] = number();
            }
            kvist_rows_view heads_first = {.dtype = KVIST_F32, .sizes = {1, n, HEADS, DIM}, .strides = {0, DIM, 16 * DIM, 1}};
            kvist_rows_view tokens_first = {.dtype = KVIST_F32, .sizes = {1, n, KV_HEADS, DIM}, .strides = {0, KV_HEADS * DIM, DIM, 1}};
            kvist_attend call = {.layer = (uint32_t)l, .scale = scale, .q = heads_first, .k = tokens_first, .v = tokens_first, .out = heads_first};
            call.q.data = q, call.out.data = out;
            call.k.data = keys[l][start], call.v.data = values[l][start];
            CHECK(kvist_step_attend(cache, &call));
            for (int h = 0; h < HEADS; h++)
                for (int t = 0; t < n; t++) worst = fmaxf(worst, plain(l, h, start + t, q[h][t], scale, out[h][t]));
        }
        CHECK(kvist_step_commit(cache, NULL, 0));
        start += n;
    }
    printf("%d tokens, largest difference to plain loops: %g\n", start, worst);
    CHECK(kvist_cache_free(cache));
    return worst < 1e-5f ? 0 : 1;
}
