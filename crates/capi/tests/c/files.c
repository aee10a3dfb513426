/* Sessions and prefixes in files: the same logits to the bit, and every refusal with its status and text. */
#include "checks.h"

static kvist_model *model;
static char saved[4096], frozen[4096], other[4096];

static kvist_session *begin(const char *kind, const char *k) {
    kvist_session *session;
    kvist_session_options options = {.kind = kind, .k = k, .context_tokens = 128, .max_step_tokens = 16};
    OK(kvist_session_new(model, &options, &session));
    return session;
}

/* The logits after one more token. */
static float *after(kvist_session *session, uint32_t seq, uint32_t token, size_t *vocab) {
    kvist_input input = {.seq = seq, .tokens = &token, .n_tokens = 1};
    OK(kvist_session_forward(session, &input, 1, KVIST_LAST_ROWS));
    const float *logits;
    size_t rows;
    OK(kvist_session_logits(session, &logits, &rows, vocab));
    float *copy = malloc(*vocab * sizeof(float));
    MUST(copy != NULL && rows == 1);
    memcpy(copy, logits, *vocab * sizeof(float));
    return copy;
}

static void same(kvist_session *a, uint32_t seq_a, kvist_session *b, uint32_t seq_b) {
    for (uint32_t token = 5; token < 9; token++) {
        size_t n, m;
        float *x = after(a, seq_a, token, &n), *y = after(b, seq_b, token, &m);
        MUST(n == m && memcmp(x, y, n * sizeof(float)) == 0);
        free(x), free(y);
    }
}

/* `a` has gone on, and `b` has not: it does the same steps. */
static void same_again(kvist_session *a, kvist_session *b) {
    size_t n;
    for (uint32_t token = 5; token < 9; token++) free(after(b, 0, token, &n));
    same(a, 0, b, 0);
}

static uint32_t length(kvist_session *session, uint32_t seq) {
    uint32_t n;
    OK(kvist_session_length(session, seq, &n));
    return n;
}

static uint32_t some[100];

static void to_the_bit(const char *kind, const char *k) {
    kvist_session *a = begin(kind, k), *b = begin(kind, k);
    OK(kvist_session_prompt_tokens(a, 0, some, 41, NULL));
    uint32_t n;
    OK(kvist_session_save(a, 0, saved));
    OK(kvist_session_resume(b, 0, saved, NULL, &n));
    MUST(n == 40 && length(b, 0) == 41); /* the last token's logits choose the next one */
    uint32_t tokens[41];
    size_t n_tokens;
    EXPECT(kvist_session_tokens(b, 0, tokens, 40, &n_tokens), KVIST_INVALID_ARGUMENT, "tokens holds 40");
    MUST(n_tokens == 41);
    OK(kvist_session_tokens(b, 0, tokens, 41, &n_tokens));
    MUST(memcmp(tokens, some, sizeof tokens) == 0);
    same(a, 0, b, 0);
    OK(kvist_session_free(b));

    kvist_prefix *prefix;
    b = begin(kind, k);
    OK(kvist_session_rollback(a, 0, 0));
    OK(kvist_session_prompt_tokens(a, 0, some, 41, NULL));
    OK(kvist_session_freeze(a, 0, frozen));
    OK(kvist_prefix_open(frozen, &prefix));
    OK(kvist_session_begin_with(b, 0, prefix, &n));
    MUST(n == 41 && length(b, 0) == 41);
    OK(kvist_prefix_free(prefix));
    same(a, 0, b, 0);
    OK(kvist_session_free(b));

    /* Without a file. The prefix and the session that made it go first. */
    OK(kvist_session_rollback(a, 0, 0));
    OK(kvist_session_prompt_tokens(a, 0, some, 41, NULL));
    OK(kvist_session_share(a, 0, &prefix));
    b = begin(kind, k);
    OK(kvist_session_begin_with(b, 0, prefix, &n));
    MUST(n == 41 && length(b, 0) == 41);
    uint64_t bytes;
    OK(kvist_session_kv_bytes(b, &bytes));
    MUST(bytes == 0); /* nothing was copied */
    kvist_session *c = begin(kind, k);
    OK(kvist_session_begin_with(c, 0, prefix, NULL));
    OK(kvist_prefix_free(prefix));
    same(a, 0, b, 0);
    OK(kvist_session_free(a));
    same_again(b, c);
    OK(kvist_session_free(b));
    OK(kvist_session_free(c));
}

/* The file has what a window shows at its end: a shorter text would see tokens that it has not. */
static void windows(void) {
    kvist_session *a, *b;
    kvist_session_options options = {.kind = "cells", .k = "f32", .context_tokens = 128, .window = 8};
    OK(kvist_session_new(model, &options, &a));
    OK(kvist_session_new(model, &options, &b));
    OK(kvist_session_prompt_tokens(a, 0, some, 41, NULL));
    kvist_piece piece;
    OK(kvist_session_next(a, 0, &piece)); /* its K and V are not in the cache */
    OK(kvist_session_save(a, 0, saved));
    uint32_t n;
    OK(kvist_session_resume(b, 0, saved, NULL, &n));
    MUST(n == 41);
    OK(kvist_session_rollback(b, 0, 41));
    EXPECT(kvist_session_rollback(b, 0, 40), KVIST_REFUSED, "cannot end at position 40");
    OK(kvist_session_rollback(a, 0, 40)); /* which was computed here */
    OK(kvist_session_rollback(b, 0, 0));
    OK(kvist_session_free(a));
    OK(kvist_session_free(b));
}

/* The token that was shown last is saved too; other sequences of the session are left alone. */
static void texts(void) {
    kvist_session *session = begin("cells", "f16");
    kvist_piece piece;
    OK(kvist_session_prompt(session, 0, "The borrow checker", NULL));
    uint32_t before = length(session, 0);
    for (int i = 0; i < 3; i++) OK(kvist_session_next(session, 0, &piece));
    MUST(length(session, 0) == before + 2);
    OK(kvist_session_save(session, 0, saved));
    OK(kvist_session_open(session, 4));
    OK(kvist_session_resume(session, 4, saved, NULL, NULL));
    MUST(length(session, 4) == before + 3 && length(session, 0) == before + 2);
    for (int i = 0; i < 5; i++) { /* both say the same */
        OK(kvist_session_next(session, 0, &piece));
        uint32_t token = piece.token;
        OK(kvist_session_next(session, 4, &piece));
        MUST(piece.has_token && piece.token == token);
    }
    EXPECT(kvist_session_resume(session, 4, saved, NULL, NULL), KVIST_INVALID_ARGUMENT, "has tokens");
    EXPECT(kvist_session_resume(session, 9, saved, NULL, NULL), KVIST_REFUSED, "no sequence 9");
    EXPECT(kvist_session_save(session, 9, saved), KVIST_REFUSED, "no sequence 9");
    OK(kvist_session_open(session, 5));
    EXPECT(kvist_session_save(session, 5, saved), KVIST_WRONG_ORDER, "no tokens to save");
    EXPECT(kvist_session_freeze(session, 5, saved), KVIST_WRONG_ORDER, "no tokens to freeze");
    EXPECT(kvist_session_freeze(session, 4, frozen), KVIST_INVALID_ARGUMENT, "in order");
    /* A prefix takes the first cells, so it comes before everything else. */
    kvist_prefix *prefix;
    EXPECT(kvist_session_share(session, 5, &prefix), KVIST_WRONG_ORDER, "no tokens to freeze");
    EXPECT(kvist_session_share(session, 4, &prefix), KVIST_INVALID_ARGUMENT, "in order");
    EXPECT(kvist_session_share(session, 9, &prefix), KVIST_REFUSED, "no sequence 9");
    EXPECT(kvist_session_share(session, 4, NULL), KVIST_INVALID_ARGUMENT, "prefix is null");
    EXPECT(kvist_session_share(NULL, 4, &prefix), KVIST_INVALID_ARGUMENT, "session is null");
    OK(kvist_prefix_open(frozen, &prefix));
    EXPECT(kvist_session_begin_with(session, 5, prefix, NULL), KVIST_INVALID_ARGUMENT, "comes first");
    EXPECT(kvist_session_begin_with(session, 5, NULL, NULL), KVIST_INVALID_ARGUMENT, "prefix is null");
    OK(kvist_prefix_free(prefix));
    OK(kvist_prefix_free(NULL));

    /* A full cache. */
    OK(kvist_session_remove(session, 0));
    OK(kvist_session_rollback(session, 4, 0));
    OK(kvist_session_prompt_tokens(session, 4, some, 100, NULL));
    OK(kvist_session_prompt_tokens(session, 4, some, 28, NULL));
    OK(kvist_session_save(session, 4, saved));
    MUST(length(session, 4) == 128);
    OK(kvist_session_next(session, 4, &piece));
    OK(kvist_session_free(session));
    session = begin("cells", "f16");
    OK(kvist_session_resume(session, 0, saved, NULL, NULL));
    MUST(length(session, 0) == 128);
    OK(kvist_session_free(session));
}

/* Draft trees: the tokens of the accepted path are known. */
static void trees(void) {
    kvist_session *session = begin("tree", "f16"), *plain = begin("tree", "f16");
    OK(kvist_session_prompt_tokens(session, 0, some, 20, NULL));
    kvist_input draft = {.seq = 0, .tokens = (uint32_t[]){7, 8, 9}, .n_tokens = 3, .parents = (int32_t[]){-1, -1, 1}};
    OK(kvist_session_forward(session, &draft, 1, KVIST_NO_ROWS));
    OK(kvist_session_accept(session, 0, (uint32_t[]){1, 2}, 2));
    uint32_t tokens[22];
    size_t n;
    OK(kvist_session_tokens(session, 0, tokens, 22, &n));
    MUST(n == 22 && tokens[20] == 8 && tokens[21] == 9);
    OK(kvist_session_save(session, 0, saved));
    OK(kvist_session_resume(plain, 0, saved, NULL, NULL));
    uint32_t again[22];
    OK(kvist_session_tokens(plain, 0, again, 22, &n));
    MUST(n == 22 && memcmp(tokens, again, sizeof again) == 0);
    OK(kvist_session_free(session));
    OK(kvist_session_free(plain));
}

static char bytes[1 << 22];

/* Copies a file to `other` with one bit changed, or cut. */
static void damage(const char *path, size_t at, int cut) {
    FILE *file = fopen(path, "rb");
    MUST(file != NULL);
    size_t n = fread(bytes, 1, sizeof bytes, file);
    MUST(n > 0 && n < sizeof bytes);
    fclose(file);
    at %= n;
    if (!cut) bytes[at] ^= 4;
    file = fopen(other, "wb");
    MUST(file != NULL && fwrite(bytes, 1, cut ? at : n, file) == (cut ? at : n));
    fclose(file);
}

static void files(void) {
    kvist_session *a = begin("cells", "f16");
    kvist_prefix *prefix, *shared;
    OK(kvist_session_prompt_tokens(a, 0, some, 30, NULL));
    OK(kvist_session_save(a, 0, saved));
    OK(kvist_session_freeze(a, 0, frozen));
    OK(kvist_session_share(a, 0, &shared));
    EXPECT(kvist_session_save(a, 0, "/no/such/folder/s.kvs"), KVIST_BAD_FILE, "/no/such/folder");
    EXPECT(kvist_session_save(a, 0, NULL), KVIST_INVALID_ARGUMENT, "path is null");
    EXPECT(kvist_session_save(a, 0, "\xff"), KVIST_INVALID_ARGUMENT, "not UTF-8");
    OK(kvist_session_free(a));
    a = begin("cells", "f16");
    for (size_t i = 0; i < 60; i++) {
        damage(saved, i < 20 ? i : i * 7919, i % 3 == 0);
        EXPECT(kvist_session_resume(a, 0, other, NULL, NULL), KVIST_BAD_FILE, "other");
        damage(frozen, i < 20 ? i : i * 7919, i % 3 == 0);
        EXPECT(kvist_prefix_open(other, &prefix), KVIST_BAD_FILE, "other");
    }
    MUST(length(a, 0) == 0);
    EXPECT(kvist_session_resume(a, 0, "/no/such.kvs", NULL, NULL), KVIST_BAD_FILE, "/no/such.kvs");
    EXPECT(kvist_session_resume(a, 0, frozen, NULL, NULL), KVIST_BAD_FILE, "no session");
    EXPECT(kvist_prefix_open(saved, &prefix), KVIST_BAD_FILE, "no prefix");
    EXPECT(kvist_session_resume(a, 0, saved, &(kvist_text_options){.top_p = 7}, NULL), KVIST_INVALID_ARGUMENT, NULL);
    OK(kvist_session_free(a));
    a = begin("cells", "q8");
    OK(kvist_prefix_open(frozen, &prefix));
    EXPECT(kvist_session_resume(a, 0, saved, NULL, NULL), KVIST_BAD_FILE, "--kv f16");
    EXPECT(kvist_session_begin_with(a, 0, prefix, NULL), KVIST_BAD_FILE, "--kv f16");
    EXPECT(kvist_session_begin_with(a, 0, shared, NULL), KVIST_BAD_FILE, "--kv f16");
    OK(kvist_session_free(a));
    kvist_session_options small = {.kind = "cells", .k = "f16", .context_tokens = 16, .max_step_tokens = 8};
    OK(kvist_session_new(model, &small, &a));
    EXPECT(kvist_session_resume(a, 0, saved, NULL, NULL), KVIST_CACHE_FULL, NULL);
    EXPECT(kvist_session_begin_with(a, 0, prefix, NULL), KVIST_CACHE_FULL, NULL);
    EXPECT(kvist_session_begin_with(a, 0, shared, NULL), KVIST_CACHE_FULL, NULL);
    OK(kvist_session_free(a));
    OK(kvist_prefix_free(prefix));
    OK(kvist_prefix_free(shared));
}

/* The least memory for a model and a session has no room for a prefix beside them. */
static void no_room(void) {
    kvist_model *small;
    kvist_session *session;
    kvist_session_options options = {.kind = "cells", .k = "f16", .context_tokens = 128, .max_step_tokens = 16};
    uint64_t too_little = 0, enough = 1 << 30;
    while (enough - too_little > 1024) {
        uint64_t bytes = too_little + (enough - too_little) / 2;
        int fits = 0;
        if (kvist_model_open(NULL, &(kvist_model_options){.memory_bytes = bytes}, &small) == KVIST_OK) {
            fits = kvist_session_new(small, &options, &session) == KVIST_OK;
            if (fits) OK(kvist_session_free(session));
            OK(kvist_model_free(small));
        }
        if (fits) enough = bytes;
        else too_little = bytes;
    }
    kvist_prefix *prefix = NULL;
    OK(kvist_model_open(NULL, &(kvist_model_options){.memory_bytes = enough}, &small));
    OK(kvist_session_new(small, &options, &session));
    OK(kvist_session_prompt_tokens(session, 0, some, 41, NULL));
    EXPECT(kvist_session_share(session, 0, &prefix), KVIST_OUT_OF_MEMORY, "do not fit");
    MUST(prefix == NULL && length(session, 0) == 41);
    OK(kvist_session_free(session));
    OK(kvist_model_free(small));
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    snprintf(saved, sizeof saved, "%s/saved", argv[1]);
    snprintf(frozen, sizeof frozen, "%s/frozen", argv[1]);
    snprintf(other, sizeof other, "%s/other", argv[1]);
    for (uint32_t i = 0; i < 100; i++) some[i] = 3 + i * 37 % 3000;
    OK(kvist_model_open(NULL, NULL, &model));
    const char *kinds[] = {"contiguous", "cells", "tree", "paged"};
    for (int i = 0; i < 4; i++) {
        to_the_bit(kinds[i], "q8");
        to_the_bit(kinds[i], "t4-o");
        to_the_bit(kinds[i], "f16");
    }
    windows();
    texts();
    trees();
    files();
    no_room();
    OK(kvist_model_free(model));
    return 0;
}
