/* Many texts at once, and a tier below their cache: a prompt is computed, evicted by others, and loaded from memory.
 *
 *     cc -I crates/capi/include crates/capi/examples/tiers.c target/dist/libkvist.a -lm -lpthread -ldl
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "kvist.h"

static void check(kvist_status status, const char *what) {
    if (status != KVIST_OK) {
        fprintf(stderr, "%s: %s\n", what, kvist_last_error());
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

static kvist_job *submit(kvist_batch *batch, const char *prompt) {
    kvist_text_options text = kvist_greedy();
    text.max_tokens = 12;
    kvist_job_options options = {.text = &text};
    kvist_job *job;
    CHECK(kvist_batch_submit(batch, prompt, &options, &job));
    return job;
}

/* Writes the text of a job, and where its prompt came from. */
static void finish(kvist_job *job, const char *what) {
    kvist_piece piece;
    printf("%s:", what);
    do {
        CHECK(kvist_job_next(job, KVIST_FOREVER, &piece));
        fwrite(piece.text, 1, piece.text_bytes, stdout);
    } while (piece.finish == KVIST_GOES_ON);
    kvist_job_info info;
    CHECK(kvist_job_describe(job, &info));
    uint32_t loaded = info.loaded_tokens[0];
    printf("\n%s of %" PRIu32 " tokens: %" PRIu32 " from the cache, %" PRIu32 " from the tier\n", what, info.prompt_tokens,
           info.cached_tokens - loaded, loaded);
    CHECK(kvist_job_free(job));
}

/* Blocks go to the tier beside the steps: waits until the tier has so many more, and no more are on their way. */
static void wait_until_stored(kvist_batch *batch, uint64_t n_blocks) {
    kvist_batch_stats stats;
    do {
        struct timespec a_millisecond = {.tv_nsec = 1000000};
        nanosleep(&a_millisecond, NULL);
        CHECK(kvist_batch_describe(batch, &stats));
    } while (stats.copied_blocks < n_blocks || stats.store_bytes > 0);
}

int main(void) {
    kvist_model *model;
    CHECK(kvist_model_open(NULL, NULL, &model));

    /* A cache for 512 tokens, and a tier in memory. The model is small, so to compute is faster than to load: load always. */
    kvist_batch *batch;
    kvist_batch_options options = {
        .k = "f32",
        .context_tokens = 512,
        .tier_ram_bytes = 64 << 20,
        .tier_load_always = true,
        .tier_grace_ms = 60000,
    };
    CHECK(kvist_batch_new(model, &options, &batch));
    CHECK(kvist_model_free(model)); /* the batch keeps what it needs */

    char guide[1024] = "";
    for (int i = 0; i < 20; i++) strcat(guide, "Every value in Rust has one owner. ");
    finish(submit(batch, guide), "first");
    wait_until_stored(batch, 8);

    /* Other prompts, at the same time, take its room. */
    kvist_job *others[6];
    char text[1024];
    for (int i = 0; i < 6; i++) {
        snprintf(text, sizeof text, "%d", i);
        for (int j = 0; j < 20; j++) strcat(text, " A slice is a view into a vector.");
        others[i] = submit(batch, text);
    }
    for (int i = 0; i < 6; i++) {
        kvist_piece piece;
        do CHECK(kvist_job_next(others[i], KVIST_FOREVER, &piece));
        while (piece.finish == KVIST_GOES_ON);
        CHECK(kvist_job_free(others[i]));
    }

    finish(submit(batch, guide), "again");
    kvist_batch_stats stats;
    CHECK(kvist_batch_describe(batch, &stats));
    printf("the %s holds %" PRIu64 " bytes; %" PRIu64 " blocks were evicted\n", stats.tiers[0].name, stats.tiers[0].bytes,
           stats.evicted_blocks);
    CHECK(kvist_batch_free(batch));
    return 0;
}
