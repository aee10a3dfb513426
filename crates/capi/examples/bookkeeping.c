/* The bookkeeping alone, for an engine with K, V and kernels of its own: two sequences with a common prefix in a paged cache.
 * The "kernel" here only notes which token every cell holds, and checks that each query would read its own history. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kvist.h"

#define CAPACITY 64
#define BLOCK 16

static void check(kvist_status status, const char *what) {
    if (status != KVIST_OK) {
        fprintf(stderr, "%s: %s\n", what, kvist_last_error());
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

static uint32_t memory[CAPACITY]; /* what each cell holds: a token */

/* One step: writes the tokens of the batch, and prints what every query sees through its block table. */
static void step(kvist_cache *cache, const kvist_span *spans, size_t n_spans, const uint32_t *tokens) {
    CHECK(kvist_step_begin(cache, spans, n_spans));

    const kvist_copy *copies;
    size_t n_copies;
    CHECK(kvist_step_copies(cache, 0, &copies, &n_copies)); /* copy on write of a shared block */
    for (size_t i = 0; i < n_copies; i++)
        memmove(memory + copies[i].to, memory + copies[i].from, copies[i].len * sizeof *memory);

    kvist_tables t;
    CHECK(kvist_step_tables(cache, 0, BLOCK, &t));
    for (size_t i = 0; i < t.n_tokens; i++) memory[t.slots[i]] = tokens[i];
    for (size_t span = 0; span < t.n_spans; span++) {
        printf("  sequence %" PRIu32 " reads", spans[span].seq);
        const uint32_t *blocks = t.blocks + t.table_start[span];
        for (uint32_t c = 0; c < t.kv_len[span]; c++) printf(" %" PRIu32, memory[blocks[c / BLOCK] * BLOCK + c % BLOCK]);
        printf("\n");
    }
    CHECK(kvist_step_layer_ran(cache, 0));
    CHECK(kvist_step_commit(cache, NULL, 0));
}

int main(void) {
    kvist_layer layer = {.group = 0, .owner = 0, .n_kv_heads = 1, .head_dim = 8};
    kvist_group group = {.capacity_tokens = CAPACITY};
    kvist_cache_options options = {.kind = "paged", .layers = &layer, .n_layers = 1, .groups = &group, .n_groups = 1};
    kvist_cache *cache;
    CHECK(kvist_cache_new(&options, &cache));
    CHECK(kvist_cache_open(cache, 0));

    printf("a prompt of three tokens\n");
    step(cache, (kvist_span[]){{.seq = 0, .start = 0, .n_tokens = 3}}, 1, (uint32_t[]){100, 101, 102});
    CHECK(kvist_cache_copy(cache, 0, 1, 0, UINT32_MAX)); /* a fork: no byte is copied */
    printf("one token of each branch\n");
    step(cache, (kvist_span[]){{.seq = 0, .start = 3, .n_tokens = 1}, {.seq = 1, .start = 3, .n_tokens = 1}}, 2,
         (uint32_t[]){200, 300});

    kvist_span next = {.seq = 0, .start = 4, .n_tokens = 40};
    printf("forty more tokens: %s\n", kvist_step_can_begin(cache, &next, 1) == KVIST_OK ? "there is room" : kvist_last_error());
    CHECK(kvist_step_begin(cache, &next, 1));
    CHECK(kvist_step_drop(cache)); /* nothing has changed */
    uint32_t n_tokens, position;
    CHECK(kvist_cache_length(cache, 0, &n_tokens, &position));
    printf("after a dropped step sequence 0 still has %" PRIu32 " tokens\n", n_tokens);
    CHECK(kvist_cache_free(cache));
    return n_tokens == 4 ? 0 : 1;
}
