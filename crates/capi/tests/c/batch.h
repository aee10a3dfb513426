/* What the tests of batches share: checks, and jobs of a prompt of their own. */
#include "checks.h"

#define PROMPT 100
#define TEXT 12
/* Longer than it takes to cancel it, mostly: what must happen meanwhile is tried again until it does. */
#define LONG 3000

static kvist_model *model;
static uint32_t some[PROMPT];

static inline kvist_batch *start(const kvist_batch_options *options) {
    kvist_batch *batch;
    OK(kvist_batch_new(model, options, &batch));
    return batch;
}

/* A prompt of its own for each `which`. */
static inline kvist_job *submit(kvist_batch *batch, uint32_t which, uint32_t max_tokens, const char *salt) {
    uint32_t tokens[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++) tokens[i] = 5 + (some[i] + which * (i + 1)) % 200;
    kvist_text_options text = kvist_greedy();
    text.max_tokens = max_tokens;
    text.ignore_end = true;
    kvist_job_options options = {.text = &text, .salt = salt};
    kvist_job *job;
    OK(kvist_batch_submit_tokens(batch, tokens, PROMPT, &options, &job));
    return job;
}

/* Reads a job to its end: at most `capacity` tokens of it are kept. */
static inline kvist_finish read_all(kvist_job *job, uint32_t timeout_ms, uint32_t *tokens, size_t capacity, size_t *n) {
    kvist_piece piece;
    *n = 0;
    do {
        OK(kvist_job_next(job, timeout_ms, &piece));
        MUST(piece.text != NULL && piece.text[piece.text_bytes] == 0);
        MUST(!piece.has_token || piece.finish == KVIST_GOES_ON);
        if (piece.has_token) {
            if (*n < capacity) tokens[*n] = piece.token;
            ++*n;
        }
    } while (piece.finish == KVIST_GOES_ON);
    kvist_piece again;
    OK(kvist_job_next(job, KVIST_FOREVER, &again));
    MUST(!again.has_token && again.text_bytes == 0 && again.finish == piece.finish);
    return piece.finish;
}

/* The text of a prompt, and what was not computed of it. */
static inline kvist_job_info text_of(kvist_batch *batch, uint32_t which, const char *salt, uint32_t *tokens) {
    kvist_job *job = submit(batch, which, TEXT, salt);
    size_t n;
    MUST(read_all(job, KVIST_FOREVER, tokens, TEXT, &n) == KVIST_MAX_TOKENS && n == TEXT);
    kvist_job_info info;
    OK(kvist_job_describe(job, &info));
    MUST(info.prompt_tokens == PROMPT && info.text_tokens == TEXT && info.has_begun);
    OK(kvist_job_free(job));
    return info;
}

static inline void begin(void) {
    OK(kvist_model_open(NULL, NULL, &model));
    for (uint32_t i = 0; i < PROMPT; i++) some[i] = 5 + i * i % 150;
}
