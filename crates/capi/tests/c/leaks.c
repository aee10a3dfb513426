/* Ten thousand sessions, caches and steps, made and dropped: resident memory stays where it is. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "kvist.h"

static void check(kvist_status status, const char *what) {
    if (status != KVIST_OK) {
        fprintf(stderr, "%s: %s\n", what, kvist_last_error());
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

static long resident_kib(void) {
    long pages = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%ld %ld", &pages, &resident) != 2) exit(1);
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

/* The number of the next file that is opened. */
static int next_file(void) {
    int file = dup(2);
    if (file < 0) exit(1);
    close(file);
    return file;
}

static kvist_model *model;

static void once(int i) {
    const char *kinds[] = {"contiguous", "cells", "tree", "paged"};
    kvist_session_options options = {.kind = kinds[i % 4], .k = i % 3 ? "f16" : "q8", .context_tokens = 64, .max_step_tokens = 8};
    kvist_session *session;
    CHECK(kvist_session_new(model, &options, &session));
    if (i % 16 == 0) {
        CHECK(kvist_session_prompt_tokens(session, 0, (uint32_t[]){1, 2, 3}, 3, NULL));
        kvist_piece piece;
        CHECK(kvist_session_next(session, 0, &piece));
        kvist_prefix *prefix;
        kvist_session *begun;
        CHECK(kvist_session_share(session, 0, &prefix));
        CHECK(kvist_session_new(model, &options, &begun));
        CHECK(kvist_session_begin_with(begun, 0, prefix, NULL));
        CHECK(i % 32 ? kvist_session_free(begun) : kvist_prefix_free(prefix));
        CHECK(i % 32 ? kvist_prefix_free(prefix) : kvist_session_free(begun));
    }
    CHECK(kvist_session_free(session));
    if (i % 40 == 3) { /* drafts: a text that is left, and a sequence that drafters forget */
        const char *modes[] = {"suffix", "ngram", "auto", "draft"};
        options.drafts.speculate = modes[i / 40 % 4];
        if (i / 40 % 4 == 3) options.drafts.draft_model = model; /* itself: weights that are loaded again leave parts of pages */
        options.drafts.draft_tokens = 4;
        CHECK(kvist_session_new(model, &options, &session));
        CHECK(kvist_session_prompt_tokens(session, 0, (uint32_t[]){5, 6, 7, 5, 6, 7}, 6, NULL));
        kvist_piece piece;
        for (int n = 0; n < 3; n++) CHECK(kvist_session_next(session, 0, &piece));
        CHECK(kvist_session_free(session));
    }

    kvist_layer layer = {0, 0, 1, 16};
    kvist_group group = {.capacity_tokens = 64};
    kvist_cache_options alone = {.kind = kinds[i % 4], .backend = i % 2 ? "cpu" : NULL, .layers = &layer, .n_layers = 1,
                                 .groups = &group, .n_groups = 1, .n_heads = 2, .max_step_tokens = 8};
    kvist_cache *cache;
    CHECK(kvist_cache_new(&alone, &cache));
    if (i % 4 != 0) CHECK(kvist_cache_open(cache, 0));
    kvist_span span = {.seq = 0, .start = 0, .n_tokens = 8};
    CHECK(kvist_step_begin(cache, &span, 1)); /* freed with a step in flight */
    if (kvist_step_begin(cache, &span, 1) != KVIST_WRONG_ORDER) exit(1); /* and with the text of an error */
    CHECK(kvist_cache_free(cache));
}

int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 10000;
    CHECK(kvist_model_open(NULL, NULL, &model));
    for (int i = 0; i < n / 10; i++) once(i); /* the allocator and the threads have what they keep now */
    long before = resident_kib();
    int file = next_file();
    for (int i = 0; i < n; i++) once(i);
    long after = resident_kib();
    if (next_file() != file) return 2; /* files in memory are closed */
    CHECK(kvist_model_free(model));
    printf("%d sessions and caches: %ld KiB resident before, %ld after\n", n, before, after);
    /* 2 MiB: 200 bytes per session would show. Fewer sessions are for sanitizers, which find leaks themselves. */
    return n < 10000 || after - before < 2048 ? 0 : 1;
}
