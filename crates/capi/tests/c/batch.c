/* Batches: the texts of sessions, jobs that are read, cancelled and left, and every refusal.
 *
 *     batch DIR: an empty folder.
 */
#include <math.h>
#include <pthread.h>
#include "batch.h"

static void texts(void) {
    kvist_batch_options options = {.k = "f32", .context_tokens = 2048, .max_batch = 3, .batch_tokens = 64};
    kvist_batch *batch = start(&options);
    kvist_job *jobs[5];
    for (uint32_t i = 0; i < 5; i++) jobs[i] = submit(batch, i, TEXT, NULL);
    for (uint32_t i = 0; i < 5; i++) {
        uint32_t found[TEXT];
        size_t n;
        /* Waits, and looks. */
        MUST(read_all(jobs[i], i % 2 ? 0 : KVIST_FOREVER, found, TEXT, &n) == KVIST_MAX_TOKENS && n == TEXT);
        OK(kvist_job_free(jobs[i]));

        uint32_t prompt[PROMPT];
        for (uint32_t j = 0; j < PROMPT; j++) prompt[j] = 5 + (some[j] + i * (j + 1)) % 200;
        kvist_session *session;
        kvist_session_options alone = {.kind = "cells", .k = "f32", .context_tokens = 256};
        OK(kvist_session_new(model, &alone, &session));
        kvist_text_options text = kvist_greedy();
        text.ignore_end = true;
        OK(kvist_session_prompt_tokens(session, 0, prompt, PROMPT, &text));
        for (size_t j = 0; j < TEXT; j++) {
            kvist_piece piece;
            OK(kvist_session_next(session, 0, &piece));
            MUST(piece.token == found[j]);
        }
        OK(kvist_session_free(session));
    }

    /* A text is text, and stop strings end it; a cache that is full, too. */
    kvist_text_options text = kvist_greedy();
    kvist_job_options wanted = {.text = &text};
    text.max_tokens = 40;
    char whole[4096] = "";
    for (int stops = 0; stops < 2; stops++) {
        const char *stop = whole + strlen(whole) / 2;
        text.stop = &stop;
        text.n_stop = stops;
        kvist_job *job;
        OK(kvist_batch_submit(batch, "The borrow checker", &wanted, &job));
        char now[4096] = "";
        kvist_piece piece;
        do {
            OK(kvist_job_next(job, KVIST_FOREVER, &piece));
            strncat(now, piece.text, sizeof now - strlen(now) - 1);
        } while (piece.finish == KVIST_GOES_ON);
        MUST(strlen(now) > 8);
        if (stops) {
            MUST(piece.finish == KVIST_STOP_STRING);
            MUST(strstr(now, stop) == NULL && strncmp(now, whole, strlen(now)) == 0);
        }
        strcpy(whole, now);
        OK(kvist_job_free(job));
    }
    kvist_batch *small = start(&(kvist_batch_options){.context_tokens = 128});
    kvist_job *job = submit(small, 0, 0, NULL);
    size_t n;
    MUST(read_all(job, KVIST_FOREVER, NULL, 0, &n) == KVIST_NO_ROOM && n == 128 - PROMPT + 1);
    OK(kvist_job_free(job));
    OK(kvist_batch_free(small));
    OK(kvist_batch_free(batch));

    /* The same seed is the same text, another one mostly another. */
    batch = start(NULL);
    uint32_t drawn[3][40];
    for (int i = 0; i < 3; i++) {
        text = kvist_greedy();
        text.temperature = 3;
        text.seed = i / 2;
        text.max_tokens = 40;
        text.ignore_end = true;
        OK(kvist_batch_submit_tokens(batch, some, PROMPT, &wanted, &job));
        MUST(read_all(job, KVIST_FOREVER, drawn[i], 40, &n) == KVIST_MAX_TOKENS && n == 40);
        OK(kvist_job_free(job));
    }
    MUST(memcmp(drawn[0], drawn[1], sizeof drawn[0]) == 0 && memcmp(drawn[0], drawn[2], sizeof drawn[0]) != 0);
    OK(kvist_batch_free(batch));
}

static void keeps_prompts(void) {
    kvist_batch_options options = {.k = "f32", .context_tokens = 1024};
    kvist_batch *batch = start(&options);
    uint32_t first[TEXT], again[TEXT];
    MUST(text_of(batch, 1, "ann", first).cached_tokens == 0);
    MUST(text_of(batch, 1, "bob", again).cached_tokens == 0);
    MUST(memcmp(first, again, sizeof first) == 0);
    MUST(text_of(batch, 1, "ann", again).cached_tokens == PROMPT / 16 * 16);
    MUST(memcmp(first, again, sizeof first) == 0);
    size_t deleted, pending;
    OK(kvist_batch_forget(batch, "ann", &deleted, &pending));
    MUST(deleted >= PROMPT / 16 && pending == 0);
    MUST(text_of(batch, 1, "ann", again).cached_tokens == 0);
    MUST(text_of(batch, 1, "bob", again).cached_tokens == PROMPT / 16 * 16);
    OK(kvist_batch_forget(batch, NULL, NULL, NULL));

    /* A prompt that is retained stays, while others fill the cache. */
    kvist_text_options text = kvist_greedy();
    text.max_tokens = 1;
    kvist_job_options wanted = {.text = &text, .salt = "cat", .retain_s = 3600, .retain_priority = 2, .retain_pin = true};
    for (int before = 0; before < 2; before++) {
        kvist_job *job;
        OK(kvist_batch_submit_tokens(batch, some, PROMPT, &wanted, &job));
        size_t n;
        MUST(read_all(job, KVIST_FOREVER, NULL, 0, &n) == KVIST_MAX_TOKENS || n <= 1);
        kvist_job_info info;
        OK(kvist_job_describe(job, &info));
        MUST(info.cached_tokens == (before ? PROMPT / 16 * 16 : 0));
        OK(kvist_job_free(job));
        for (uint32_t i = 0; i < 20; i++) text_of(batch, 10 + i, NULL, again);
    }
    kvist_batch_stats stats;
    OK(kvist_batch_describe(batch, &stats));
    MUST(stats.retained_tokens > 0 && stats.evicted_blocks > 0 && stats.capacity_cells == 1024 && stats.n_tiers == 0);
    MUST(stats.used_cells + stats.evictable_cells + stats.free_cells == 1024 && stats.busy_s > 0 && stats.kv_bytes > 0);

    /* Another capacity, and texts go on. */
    uint64_t capacity;
    OK(kvist_batch_resize(batch, 250, 1000, &capacity));
    MUST(capacity == 256);
    text_of(batch, 1, "bob", again);
    MUST(memcmp(first, again, sizeof first) == 0);
    EXPECT(kvist_batch_resize(batch, 0, 0, NULL), KVIST_INVALID_ARGUMENT, "tokens is 0");
    EXPECT(kvist_batch_resize(batch, UINT32_MAX, 0, NULL), KVIST_INVALID_ARGUMENT, "use 1 to");
    OK(kvist_batch_resize(batch, 4096, 0, NULL));
    for (int refused = 0; !refused;) {
        kvist_job *job = submit(batch, 2, LONG, NULL);
        kvist_status status = kvist_batch_resize(batch, 256, 1000, &capacity);
        if (status == KVIST_REFUSED) {
            MUST(strstr(kvist_last_error(), "the cache keeps its 4096 tokens: ") != NULL);
            refused = 1;
        } else {
            OK(status); /* the text had ended before */
            OK(kvist_batch_resize(batch, 4096, 0, NULL));
        }
        OK(kvist_job_free(job));
    }
    OK(kvist_batch_free(batch));
}

static void *reads(void *job) {
    kvist_piece piece;
    kvist_status status;
    do {
        status = kvist_job_next(job, KVIST_FOREVER, &piece);
    } while (status == KVIST_BUSY || (status == KVIST_OK && piece.finish == KVIST_GOES_ON));
    OK(status);
    return (void *)(intptr_t)piece.finish;
}

/* A job that another thread waits for: a second reader is refused, a free too; a cancel ends it. */
static void cancels(void) {
    kvist_batch *batch = start(&(kvist_batch_options){.max_batch = 1, .max_queue = 16});
    for (int seen = 0; !seen;) {
        /* So many that the last one still waits, however slow this thread is. */
        kvist_job *ahead[15];
        for (uint32_t i = 0; i < 15; i++) ahead[i] = submit(batch, i, LONG, NULL);
        kvist_job *second = submit(batch, 15, LONG, NULL);
        pthread_t thread;
        MUST(pthread_create(&thread, NULL, reads, second) == 0);
        kvist_piece piece;
        kvist_status status;
        do {
            status = kvist_job_next(second, 0, &piece);
        } while (status == KVIST_OK && piece.finish == KVIST_GOES_ON);
        int busy = status == KVIST_BUSY;
        if (busy) {
            MUST(strstr(kvist_last_error(), "in use") != NULL);
            /* Its thread waits, mostly. */
            status = kvist_job_free(second);
            if (status == KVIST_OK) {
                fprintf(stderr, "a job that is read was freed\n");
                exit(1);
            }
            MUST(status == KVIST_BUSY);
        }
        OK(kvist_job_cancel(second));
        void *finish;
        MUST(pthread_join(thread, &finish) == 0);
        seen = busy && (intptr_t)finish == KVIST_CANCELLED;
        OK(kvist_job_cancel(second)); /* it has ended: nothing */
        OK(kvist_job_free(second));
        for (int i = 0; i < 15; i++) OK(kvist_job_free(ahead[i])); /* a text that goes on is cancelled */
    }

    /* The queue is full. */
    kvist_job *jobs[64];
    size_t n = 0;
    for (;;) {
        kvist_text_options text = kvist_greedy();
        text.max_tokens = LONG;
        text.ignore_end = true;
        kvist_job_options options = {.text = &text};
        jobs[n] = NULL;
        kvist_status status = kvist_batch_submit_tokens(batch, some, PROMPT, &options, &jobs[n]);
        if (status == KVIST_BUSY) {
            MUST(jobs[n] == NULL && strstr(kvist_last_error(), "queue is full") != NULL);
            break;
        }
        OK(status);
        n++;
        if (n == 64)
            while (n > 0) OK(kvist_job_free(jobs[--n]));
    }
    /* Jobs outlive their batch. */
    OK(kvist_batch_free(batch));
    for (size_t i = 0; i < n; i++) {
        size_t tokens;
        kvist_finish finish = read_all(jobs[i], KVIST_FOREVER, NULL, 0, &tokens);
        MUST(finish == KVIST_CANCELLED || (finish == KVIST_MAX_TOKENS && tokens == LONG));
        OK(kvist_job_cancel(jobs[i]));
        OK(kvist_job_free(jobs[i]));
    }
}

static char path[4096];

static void prefixes(const char *dir) {
    snprintf(path, sizeof path, "%s/p.kvp", dir);
    kvist_session *session;
    kvist_session_options as = {.kind = "cells", .k = "q8", .context_tokens = 256};
    OK(kvist_session_new(model, &as, &session));
    OK(kvist_session_prompt_tokens(session, 0, some, PROMPT - 2, NULL));
    OK(kvist_session_freeze(session, 0, path));
    OK(kvist_session_free(session));
    kvist_prefix *prefix;
    OK(kvist_prefix_open(path, &prefix));
    kvist_batch_options options = {.context_tokens = 512, .prefix = prefix};
    kvist_batch *batch = start(&options);
    options.k = "f16";
    kvist_batch *other = NULL;
    EXPECT(kvist_batch_new(model, &options, &other), KVIST_BAD_FILE, NULL);
    options.k = NULL;
    options.keep = "sinks=4,recent=64";
    EXPECT(kvist_batch_new(model, &options, &other), KVIST_INVALID_ARGUMENT, "leave out keep, or prefix and the tiers");
    MUST(other == NULL);
    OK(kvist_prefix_free(prefix)); /* the batch keeps what it needs */
    uint32_t text[TEXT];
    MUST(text_of(batch, 0, NULL, text).cached_tokens == 0); /* prompts of `text_of` are others */
    kvist_job *job;
    OK(kvist_batch_submit_tokens(batch, some, PROMPT, NULL, &job));
    kvist_piece piece;
    OK(kvist_job_next(job, KVIST_FOREVER, &piece));
    kvist_job_info info;
    OK(kvist_job_describe(job, &info));
    MUST(info.cached_tokens == PROMPT / 16 * 16);
    OK(kvist_batch_free(batch));
    OK(kvist_job_free(job));
}

static void refusals(void) {
    kvist_batch *batch = NULL;
#define WRONG(status, why, ...)                                                     \
    do {                                                                            \
        kvist_batch_options wrong = {__VA_ARGS__};                                  \
        EXPECT(kvist_batch_new(model, &wrong, &batch), status, why);                \
        MUST(batch == NULL);                                                        \
    } while (0)
    EXPECT(kvist_batch_new(NULL, NULL, &batch), KVIST_INVALID_ARGUMENT, "model is null");
    EXPECT(kvist_batch_new(model, NULL, NULL), KVIST_INVALID_ARGUMENT, "batch is null");
    WRONG(KVIST_INVALID_ARGUMENT, "f17", .k = "f17");
    WRONG(KVIST_INVALID_ARGUMENT, "f17", .v = "f17");
    WRONG(KVIST_INVALID_ARGUMENT, "is for keys alone; use t4", .k = "t4-o", .v = "t4-o");
    WRONG(KVIST_INVALID_ARGUMENT, "not UTF-8", .k = "\xff");
    WRONG(KVIST_INVALID_ARGUMENT, "context_tokens is 4294967295", .context_tokens = UINT32_MAX);
    WRONG(KVIST_INVALID_ARGUMENT, "\"soon\"", .policy = "soon");
    WRONG(KVIST_INVALID_ARGUMENT, "keep: ", .keep = "all");
    WRONG(KVIST_INVALID_ARGUMENT, "the cache holds 64 tokens", .keep = "sinks=4,recent=64", .context_tokens = 64);
    WRONG(KVIST_INVALID_ARGUMENT, "leave out keep", .keep = "sinks=4,recent=64", .tier_ram_bytes = 1 << 20);
    WRONG(KVIST_INVALID_ARGUMENT, "leave out no_prefix_index", .no_prefix_index = true, .tier_ram_bytes = 1 << 20);
    WRONG(KVIST_INVALID_ARGUMENT, "give tier_ram_bytes too", .tier_ram_packed = true);
    WRONG(KVIST_INVALID_ARGUMENT, "give tier_disk_dir too", .tier_disk_bytes = 128 << 20);
    WRONG(KVIST_UNSUPPORTED, "sliding window", .window = 64, .tier_ram_bytes = 1 << 20);
    kvist_model *bounded;
    OK(kvist_model_open(NULL, &(kvist_model_options){.memory_bytes = 64 << 20}, &bounded));
    kvist_batch_options wrong = {.tier_ram_bytes = 1ULL << 40, .context_tokens = 64};
    EXPECT(kvist_batch_new(bounded, &wrong, &batch), KVIST_OUT_OF_MEMORY, "give less tier_ram_bytes");
    wrong = (kvist_batch_options){.context_tokens = 1 << 30};
    EXPECT(kvist_batch_new(bounded, &wrong, &batch), KVIST_OUT_OF_MEMORY, NULL);
    OK(kvist_model_free(bounded));
    MUST(batch == NULL);

    batch = start(&(kvist_batch_options){.context_tokens = 256});
    kvist_text_options text = kvist_greedy();
    kvist_job_options options = {.text = &text};
    kvist_job *job = NULL;
#define REFUSED(why) EXPECT(kvist_batch_submit(batch, "A", &options, &job), KVIST_INVALID_ARGUMENT, why)
    EXPECT(kvist_batch_submit(NULL, "A", NULL, &job), KVIST_INVALID_ARGUMENT, "batch is null");
    EXPECT(kvist_batch_submit(batch, NULL, NULL, &job), KVIST_INVALID_ARGUMENT, "prompt is null");
    EXPECT(kvist_batch_submit(batch, "A", NULL, NULL), KVIST_INVALID_ARGUMENT, "job is null");
    EXPECT(kvist_batch_submit(batch, "\xff", NULL, &job), KVIST_INVALID_ARGUMENT, "not UTF-8");
    EXPECT(kvist_batch_submit_tokens(batch, NULL, 0, NULL, &job), KVIST_INVALID_ARGUMENT, "no tokens");
    EXPECT(kvist_batch_submit_tokens(batch, NULL, 3, NULL, &job), KVIST_INVALID_ARGUMENT, "tokens is null");
    uint32_t outside = UINT32_MAX;
    EXPECT(kvist_batch_submit_tokens(batch, &outside, 1, NULL, &job), KVIST_INVALID_ARGUMENT, "outside the vocabulary");
    text.temperature = -1;
    REFUSED("temperature");
    text.temperature = NAN;
    REFUSED("temperature");
    text = kvist_greedy();
    options.salt = "\xff";
    REFUSED("salt is not UTF-8");
    options.salt = NULL;
    options.retain_pin = true;
    REFUSED("give retain_s too");
    options.retain_pin = false;
    options.retain_priority = 1;
    REFUSED("give retain_s too");
    double times[] = {-1, NAN, INFINITY, 2592001};
    for (size_t i = 0; i < 4; i++) {
        options.retain_s = times[i];
        REFUSED("retain_s is");
    }
    MUST(job == NULL);
    options.retain_s = 1;
    kvist_batch *plain = start(&(kvist_batch_options){.context_tokens = 256, .no_prefix_index = true});
    EXPECT(kvist_batch_submit(plain, "A", &options, &job), KVIST_INVALID_ARGUMENT, "no_prefix_index");
    OK(kvist_batch_free(plain));

    /* What the cache can never hold: told by the job, as often as it is asked. */
    text.max_tokens = 300;
    OK(kvist_batch_submit(batch, "A", &options, &job));
    kvist_piece piece;
    for (int i = 0; i < 2; i++) EXPECT(kvist_job_next(job, KVIST_FOREVER, &piece), KVIST_CACHE_FULL, "which has only 256");
    EXPECT(kvist_job_next(job, 0, NULL), KVIST_INVALID_ARGUMENT, "piece is null");
    EXPECT(kvist_job_next(NULL, 0, &piece), KVIST_INVALID_ARGUMENT, "job is null");
    EXPECT(kvist_job_describe(job, NULL), KVIST_INVALID_ARGUMENT, "info is null");
    EXPECT(kvist_job_cancel(NULL), KVIST_INVALID_ARGUMENT, "job is null");
    kvist_job_info info;
    OK(kvist_job_describe(job, &info));
    MUST(!info.has_begun && info.text_tokens == 0 && info.cached_tokens == 0);
    OK(kvist_job_free(job));
    OK(kvist_job_free(NULL));

    EXPECT(kvist_batch_forget(NULL, NULL, NULL, NULL), KVIST_INVALID_ARGUMENT, "batch is null");
    EXPECT(kvist_batch_forget(batch, "\xff", NULL, NULL), KVIST_INVALID_ARGUMENT, "salt is not UTF-8");
    EXPECT(kvist_batch_resize(NULL, 1, 0, NULL), KVIST_INVALID_ARGUMENT, "batch is null");
    EXPECT(kvist_batch_describe(batch, NULL), KVIST_INVALID_ARGUMENT, "stats is null");
    OK(kvist_batch_free(NULL));

    /* Some tokens of each text stay, and texts are longer than the cache. */
    kvist_batch *thin = start(&(kvist_batch_options){.context_tokens = 512, .batch_tokens = 64, .keep = "sinks=4,recent=64"});
    job = submit(thin, 0, 600, NULL);
    size_t n;
    MUST(read_all(job, KVIST_FOREVER, NULL, 0, &n) == KVIST_MAX_TOKENS && n == 600);
    OK(kvist_job_free(job));
    kvist_batch_stats stats;
    do { /* counted at the end of the last step */
        OK(kvist_batch_describe(thin, &stats));
    } while (stats.removed_tokens == 0);
    OK(kvist_batch_free(thin));
    OK(kvist_batch_free(batch));
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    begin();
    refusals();
    texts();
    keeps_prompts();
    cancels();
    prefixes(argv[1]);
    for (int i = 0; i < 20; i++) { /* nothing is left of them */
        kvist_batch *batch = start(NULL);
        kvist_job *job = submit(batch, i, LONG, NULL);
        OK(kvist_batch_free(batch));
        OK(kvist_job_free(job));
    }
    OK(kvist_model_free(model));
    printf("ok\n");
    return 0;
}
