/* Every wrong use gets a status and a text, and changes nothing. */
#include "checks.h"
#include <pthread.h>

static kvist_model *model;
static kvist_session *session;

static void *on_another_thread(void *unused) {
    (void)unused;
    uint32_t n;
    EXPECT(kvist_session_length(session, 0, &n), KVIST_BUSY, "in use");
    EXPECT(kvist_session_free(session), KVIST_BUSY, "not freed");
    EXPECT(kvist_session_rollback(session, 0, 0), KVIST_BUSY, "in use");
    kvist_model_info info; /* a model is never busy */
    OK(kvist_model_describe(model, &info));
    return NULL;
}

/* Runs while the prompt is being read: the session is in use now, whatever the machine is doing. */
static int during_a_prompt(void *calls, size_t done, size_t total) {
    (void)done, (void)total;
    ++*(int *)calls;
    pthread_t thread;
    if (pthread_create(&thread, NULL, on_another_thread, NULL) != 0 || pthread_join(thread, NULL) != 0) exit(1);
    uint32_t n;
    EXPECT(kvist_session_length(session, 0, &n), KVIST_BUSY, "in use"); /* a callback that uses its own session */
    return 1;
}

static int stop(void *user, size_t done, size_t total) {
    (void)user, (void)done, (void)total;
    return 0;
}

static void models(void) {
    EXPECT(kvist_model_open("/no/such/folder", NULL, &model), KVIST_BAD_MODEL, "/no/such/folder");
    EXPECT(kvist_model_open("\xff.gguf", NULL, &model), KVIST_INVALID_ARGUMENT, "path is not UTF-8");
    EXPECT(kvist_model_open(NULL, NULL, NULL), KVIST_INVALID_ARGUMENT, "model is null");
    kvist_model_options options = {.threads = 5000};
    EXPECT(kvist_model_open(NULL, &options, &model), KVIST_INVALID_ARGUMENT, "threads is 5000");
    options = (kvist_model_options){.backend = "wgpu:x"};
    EXPECT(kvist_model_open(NULL, &options, &model), KVIST_UNSUPPORTED, "names no adapter");
    options = (kvist_model_options){.backend = "abacus"};
    EXPECT(kvist_model_open(NULL, &options, &model), KVIST_INVALID_ARGUMENT, "no backend `abacus`");
    options = (kvist_model_options){.backend = "\xff"};
    EXPECT(kvist_model_open(NULL, &options, &model), KVIST_INVALID_ARGUMENT, "backend is not UTF-8");
    options = (kvist_model_options){.memory_bytes = 1000};
    EXPECT(kvist_model_open(NULL, &options, &model), KVIST_OUT_OF_MEMORY, NULL);
    OK(kvist_model_free(NULL));
    OK(kvist_model_open(NULL, NULL, &model));
    size_t n;
    uint32_t tokens[2];
    EXPECT(kvist_model_tokenize(model, "one two three four", false, tokens, 2, &n), KVIST_INVALID_ARGUMENT, "tokens holds 2");
    if (n <= 2) exit(1);
    EXPECT(kvist_model_tokenize(model, "a", false, NULL, 2, &n), KVIST_INVALID_ARGUMENT, "tokens is null");
    EXPECT(kvist_model_tokenize(model, "\xc3(", false, tokens, 2, &n), KVIST_INVALID_ARGUMENT, "text is not UTF-8");
    EXPECT(kvist_model_token(model, "no such token!", tokens), KVIST_INVALID_ARGUMENT, "no such token!");
}

static void sessions(void) {
    kvist_session_options options = {.kind = "heap"};
    EXPECT(kvist_session_new(model, &options, &session), KVIST_INVALID_ARGUMENT, "heap");
    options = (kvist_session_options){.k = "q3"};
    EXPECT(kvist_session_new(model, &options, &session), KVIST_INVALID_ARGUMENT, "q3");
    EXPECT(kvist_session_new(NULL, NULL, &session), KVIST_INVALID_ARGUMENT, "model is null");
    options = (kvist_session_options){.kind = "cells", .context_tokens = 64, .max_step_tokens = 8};
    OK(kvist_session_new(model, &options, &session));

    kvist_piece piece;
    EXPECT(kvist_session_next(session, 0, &piece), KVIST_WRONG_ORDER, "kvist_session_prompt");
    EXPECT(kvist_session_prompt(session, 9, "a", NULL), KVIST_REFUSED, "no sequence 9");
    EXPECT(kvist_session_prompt_tokens(session, 0, NULL, 0, NULL), KVIST_INVALID_ARGUMENT, "no tokens");
    EXPECT(kvist_session_prompt_tokens(session, 0, (uint32_t[]){4000000000u}, 1, NULL), KVIST_INVALID_ARGUMENT, "vocabulary");
    uint32_t many[65] = {0}, n = 1;
    EXPECT(kvist_session_prompt_tokens(session, 0, many, 65, NULL), KVIST_CACHE_FULL, "65");
    kvist_text_options text = kvist_greedy();
    text.top_p = 7;
    EXPECT(kvist_session_prompt(session, 0, "a", &text), KVIST_INVALID_ARGUMENT, NULL);
    text = kvist_greedy();
    text.stop = (const char *[]){"ok", "\xff"}, text.n_stop = 2;
    EXPECT(kvist_session_prompt(session, 0, "a", &text), KVIST_INVALID_ARGUMENT, "a stop string is not UTF-8");

    /* Another sequence takes the room while a prompt is half read: it is taken back. */
    OK(kvist_session_open(session, 3));
    OK(kvist_session_prompt_tokens(session, 3, many, 40, NULL));
    EXPECT(kvist_session_prompt_tokens(session, 0, many, 30, NULL), KVIST_CACHE_FULL, "free");
    OK(kvist_session_length(session, 0, &n));
    if (n != 0) exit(1);
    OK(kvist_session_remove(session, 3));
    EXPECT(kvist_session_remove(session, 3), KVIST_REFUSED, "no sequence 3");

    int calls = 0;
    text = kvist_greedy();
    text.progress = during_a_prompt, text.user = &calls;
    OK(kvist_session_prompt(session, 0, "The borrow checker of Rust is a part of the compiler", &text));
    if (calls == 0) exit(1);
    OK(kvist_session_next(session, 0, &piece));
    if (!piece.has_token || piece.finish != KVIST_GOES_ON || piece.text[piece.text_bytes] != 0) exit(1);

    OK(kvist_session_open(session, 4));
    text.progress = stop;
    EXPECT(kvist_session_prompt(session, 4, "The borrow checker of Rust is a part of the compiler", &text), KVIST_STOPPED, "progress");
    OK(kvist_session_length(session, 4, &n));
    if (n != 8) exit(1); /* one chunk */
    EXPECT(kvist_session_open(session, 4), KVIST_REFUSED, "exists already");
    EXPECT(kvist_session_fork(session, 0, 4), KVIST_REFUSED, "exists already");
    EXPECT(kvist_session_fork(session, 7, 8), KVIST_REFUSED, "no sequence 7");
    EXPECT(kvist_session_rollback(session, 4, 9), KVIST_REFUSED, "only shorten");
    EXPECT(kvist_session_accept(session, 4, NULL, 0), KVIST_UNSUPPORTED, "tree");
    OK(kvist_session_rollback(session, 4, 0));
    OK(kvist_session_rollback(session, 4, 0)); /* an empty sequence stays */

    kvist_input input = {.seq = 4, .tokens = many, .n_tokens = 2};
    EXPECT(kvist_session_forward(session, &input, 1, 3), KVIST_INVALID_ARGUMENT, "rows is 3");
    EXPECT(kvist_session_forward(session, &input, 1, KVIST_ALL_ROWS), KVIST_INVALID_ARGUMENT, "max_rows");
    EXPECT(kvist_session_forward(session, NULL, 1, KVIST_LAST_ROWS), KVIST_INVALID_ARGUMENT, "inputs is null");
    input.parents = (int32_t[]){-1, -2};
    EXPECT(kvist_session_forward(session, &input, 1, KVIST_LAST_ROWS), KVIST_INVALID_ARGUMENT, "parents has -2");
    input.parents = (int32_t[]){-1, 0};
    EXPECT(kvist_session_forward(session, &input, 1, KVIST_LAST_ROWS), KVIST_UNSUPPORTED, "draft trees");
    input.parents = NULL;
    OK(kvist_session_forward(session, &input, 1, KVIST_LAST_ROWS));
    const float *logits;
    size_t n_rows, vocab;
    OK(kvist_session_logits(session, &logits, &n_rows, &vocab));
    if (n_rows != 1 || vocab == 0 || logits[vocab - 1] != logits[vocab - 1]) exit(1);
    OK(kvist_session_free(session));
    OK(kvist_session_free(NULL));
    EXPECT(kvist_session_length(NULL, 0, &n), KVIST_INVALID_ARGUMENT, "session is null");
}

/* A prompt that fails in a later chunk: where its window has passed over the text before it, that text must not go on. */
static void windows(void) {
    kvist_session_options options = {.kind = "paged", .context_tokens = 64, .max_step_tokens = 24, .window = 16};
    OK(kvist_session_new(model, &options, &session));
    uint32_t many[47] = {0}, n, others = 0;
    kvist_piece piece;
    kvist_text_options text = kvist_greedy();
    text.ignore_end = true;
    OK(kvist_session_prompt_tokens(session, 0, many, 8, &text));
    OK(kvist_session_next(session, 0, &piece));
    /* A token outside the vocabulary is found before the first chunk. */
    many[40] = 4000000000u;
    EXPECT(kvist_session_prompt_tokens(session, 0, many, 47, &text), KVIST_INVALID_ARGUMENT, "vocabulary");
    OK(kvist_session_length(session, 0, &n));
    MUST(n == 8);
    many[40] = 0;
    /* Others leave it two blocks: enough for the first 24 tokens, behind which the first block is not visible. The next 24 need three. */
    do OK(kvist_session_open(session, ++others));
    while (kvist_session_prompt_tokens(session, others, many, 1, &text) == KVIST_OK);
    OK(kvist_session_remove(session, others - 1));
    EXPECT(kvist_session_prompt_tokens(session, 0, many, 47, &text), KVIST_CACHE_FULL, "the sequence is empty now");
    OK(kvist_session_length(session, 0, &n));
    MUST(n == 0);
    EXPECT(kvist_session_next(session, 0, &piece), KVIST_WRONG_ORDER, "kvist_session_prompt");
    EXPECT(kvist_session_save(session, 0, "/nowhere/empty.kvs"), KVIST_WRONG_ORDER, "no tokens to save");
    OK(kvist_session_free(session));
}

/* A text of ten times the budget, in the memory of the budget. */
static void keeps(void) {
    kvist_session_options options = {.keep = "sinks=4"};
    EXPECT(kvist_session_new(model, &options, &session), KVIST_INVALID_ARGUMENT, "keep: `recent` is missing");
    options.keep = "\xff";
    EXPECT(kvist_session_new(model, &options, &session), KVIST_INVALID_ARGUMENT, "keep is not UTF-8");
    options.keep = "sinks=4,recent=20,top=16", options.kind = "contiguous";
    EXPECT(kvist_session_new(model, &options, &session), KVIST_INVALID_ARGUMENT, "cells, tree or paged");
    options.kind = NULL, options.max_step_tokens = 16;
    OK(kvist_session_new(model, &options, &session));
    uint32_t tokens[400], n;
    uint64_t removed, bytes[2];
    for (uint32_t i = 0; i < 400; i++) tokens[i] = 300 + i * 31 % 3000;
    kvist_text_options text = kvist_greedy();
    text.ignore_end = true;
    OK(kvist_session_prompt_tokens(session, 0, tokens, 30, &text));
    OK(kvist_session_removed_tokens(session, &removed));
    if (removed != 0) exit(1);
    EXPECT(kvist_session_open(session, 1), KVIST_UNSUPPORTED, "keeps only sinks=4,recent=20,top=16,by=last has one sequence");
    EXPECT(kvist_session_fork(session, 0, 1), KVIST_UNSUPPORTED, "one sequence");
    EXPECT(kvist_session_save(session, 0, "/nowhere/kept.kvs"), KVIST_INVALID_ARGUMENT, "is not saved");
    EXPECT(kvist_session_freeze(session, 0, "/nowhere/kept.kvp"), KVIST_INVALID_ARGUMENT, "is not saved");
    for (int i = 0; i < 2; i++) {
        OK(kvist_session_prompt_tokens(session, 0, tokens, 400, &text));
        OK(kvist_session_kv_bytes(session, &bytes[i]));
    }
    kvist_piece piece;
    for (int i = 0; i < 20; i++) {
        OK(kvist_session_next(session, 0, &piece));
        if (!piece.has_token || piece.finish != KVIST_GOES_ON) exit(1);
    }
    OK(kvist_session_length(session, 0, &n));
    OK(kvist_session_removed_tokens(session, &removed));
    if (n != 849 || n - removed > 56 || n - removed < 36 || bytes[0] != bytes[1]) {
        fprintf(stderr, "%u tokens, %llu removed, %llu and %llu bytes\n", n, (unsigned long long)removed,
                (unsigned long long)bytes[0], (unsigned long long)bytes[1]);
        exit(1);
    }
    OK(kvist_session_remove(session, 0));
    OK(kvist_session_open(session, 0));
    OK(kvist_session_free(session));
    /* The longest text is told by context_tokens. */
    options.context_tokens = 100;
    OK(kvist_session_new(model, &options, &session));
    EXPECT(kvist_session_prompt_tokens(session, 0, tokens, 101, NULL), KVIST_CACHE_FULL, "101");
    OK(kvist_session_prompt_tokens(session, 0, tokens, 99, &text));
    do {
        OK(kvist_session_next(session, 0, &piece));
    } while (piece.finish == KVIST_GOES_ON);
    if (piece.finish != KVIST_NO_ROOM) exit(1);
    OK(kvist_session_free(session));
}

static int copies_seen;
static int count_copies(void *user, uint32_t group, const kvist_copy *copies, size_t n) {
    kvist_cache *cache = user;
    uint64_t bytes;
    if (group != 0 || n == 0 || copies[0].len == 0) exit(1);
    EXPECT(kvist_cache_kv_bytes(cache, &bytes), KVIST_BUSY, "in use");
    copies_seen += (int)n;
    return 1;
}

static void caches(void) {
    kvist_layer layers[2] = {{0, 0, 1, 8}, {0, 0, 1, 8}}; /* the second borrows from the first */
    kvist_group group = {.capacity_tokens = 32};
    kvist_cache_options options = {.kind = "cells", .layers = layers, .n_layers = 2, .groups = &group, .n_groups = 1};
    kvist_cache *cache;
    options.kind = NULL;
    EXPECT(kvist_cache_new(&options, &cache), KVIST_INVALID_ARGUMENT, "kind is null");
    options.kind = "ring";
    EXPECT(kvist_cache_new(&options, &cache), KVIST_INVALID_ARGUMENT, "window");
    options.kind = "cells", options.n_groups = 0;
    EXPECT(kvist_cache_new(&options, &cache), KVIST_INVALID_ARGUMENT, "1 to 65535");
    options.n_groups = 1, layers[1].group = 1;
    EXPECT(kvist_cache_new(&options, &cache), KVIST_INVALID_ARGUMENT, "layer 1 is in group 1");
    layers[1].group = 0, layers[0].owner = 1;
    EXPECT(kvist_cache_new(&options, &cache), KVIST_INVALID_ARGUMENT, "layer 0 borrows from 1");
    layers[0].owner = 0;
    options.backend = "gpu";
    EXPECT(kvist_cache_new(&options, &cache), KVIST_INVALID_ARGUMENT, "gpu:cells");
    options.backend = NULL;
    OK(kvist_cache_new(&options, &cache));

    EXPECT(kvist_step_commit(cache, NULL, 0), KVIST_WRONG_ORDER, "no step is in flight");
    EXPECT(kvist_step_layer_ran(cache, 0), KVIST_WRONG_ORDER, "no step is in flight");
    kvist_span span = {.seq = 0, .start = 0, .n_tokens = 4};
    EXPECT(kvist_step_begin(cache, &span, 1), KVIST_REFUSED, "no sequence 0");
    OK(kvist_cache_open(cache, 0));
    span.start = 1;
    EXPECT(kvist_step_begin(cache, &span, 1), KVIST_REFUSED, "position 0, not 1");
    span.start = 0, span.n_tokens = 33;
    EXPECT(kvist_step_begin(cache, &span, 1), KVIST_CACHE_FULL, "32 are free");
    EXPECT(kvist_step_begin(cache, &span, 0), KVIST_REFUSED, "empty");
    span.n_tokens = 4;
    OK(kvist_step_begin(cache, &span, 1));
    EXPECT(kvist_step_begin(cache, &span, 1), KVIST_WRONG_ORDER, "in flight");
    EXPECT(kvist_cache_open(cache, 1), KVIST_WRONG_ORDER, "in flight");
    EXPECT(kvist_step_layer_ran(cache, 1), KVIST_WRONG_ORDER, "layer 1"); /* before the one it borrows from */
    OK(kvist_step_layer_ran(cache, 0));
    EXPECT(kvist_step_layer_ran(cache, 0), KVIST_WRONG_ORDER, "layer 0");
    EXPECT(kvist_step_commit(cache, NULL, 0), KVIST_WRONG_ORDER, "layer 1");
    EXPECT(kvist_step_layer_ran(cache, 70000), KVIST_INVALID_ARGUMENT, "70000");
    OK(kvist_step_layer_ran(cache, 1));
    kvist_kept kept = {.keep = 9};
    EXPECT(kvist_step_commit(cache, &kept, 1), KVIST_INVALID_ARGUMENT, "keep is 9");
    kept = (kvist_kept){.keep = KVIST_KEEP_FIRST, .n = 5};
    EXPECT(kvist_step_commit(cache, &kept, 1), KVIST_REFUSED, "4 were planned");
    kvist_attend attend = {0};
    EXPECT(kvist_step_attend(cache, &attend), KVIST_UNSUPPORTED, "no backend");
    const bool *mask;
    size_t n_tokens, n_cells;
    EXPECT(kvist_step_mask(cache, 1, &mask, &n_tokens, &n_cells), KVIST_INVALID_ARGUMENT, "no layer group 1");
    OK(kvist_step_mask(cache, 0, &mask, &n_tokens, &n_cells));
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t c = 0; c < n_cells; c++)
            if (mask[t * n_cells + c] != (c <= t)) exit(1);
    kvist_window window;
    OK(kvist_step_window(cache, 0, &window));
    if (!window.exists || !window.causal || window.cells.len != 4) exit(1);
    kept.n = 3;
    OK(kvist_step_commit(cache, &kept, 1));

    /* A hole in front of a sequence: compaction closes it through the caller's copies. */
    OK(kvist_cache_copy(cache, 0, 1, 0, UINT32_MAX));
    span = (kvist_span){.seq = 1, .start = 3, .n_tokens = 4};
    OK(kvist_step_begin(cache, &span, 1));
    OK(kvist_step_layer_ran(cache, 0));
    OK(kvist_step_layer_ran(cache, 1));
    OK(kvist_step_commit(cache, NULL, 0));
    OK(kvist_cache_remove(cache, 1, 0, 3));
    OK(kvist_cache_remove(cache, 0, 0, UINT32_MAX));
    EXPECT(kvist_cache_compact(cache, NULL, NULL), KVIST_INVALID_ARGUMENT, "copy is null");
    OK(kvist_cache_compact(cache, count_copies, cache));
    kvist_occupancy occupancy;
    OK(kvist_cache_occupancy(cache, 0, &occupancy));
    if (copies_seen == 0 || occupancy.used_cells != 4 || occupancy.high_water != 4) exit(1);
    uint32_t len, next;
    OK(kvist_cache_length(cache, 1, &len, &next));
    if (len != 4 || next != 7) exit(1);
    EXPECT(kvist_cache_length(cache, 0, &len, &next), KVIST_REFUSED, "no sequence 0");
    OK(kvist_cache_free(cache));
}

static void rows(void) {
    kvist_layer layer = {0, 0, 1, 8};
    kvist_group group = {.capacity_tokens = 32};
    kvist_cache_options options = {.kind = "contiguous", .backend = "reference", .layers = &layer, .n_layers = 1, .groups = &group, .n_groups = 1, .n_heads = 2};
    kvist_cache *cache;
    OK(kvist_cache_new(&options, &cache));
    kvist_span span = {.seq = 0, .start = 0, .n_tokens = 1};
    OK(kvist_step_begin(cache, &span, 1));
    float q[32] = {0}, k[16] = {0}, out[16];
    kvist_rows_view view = {.data = q, .dtype = KVIST_F32, .sizes = {1, 1, 2, 8}, .strides = {16, 16, 8, 1}};
    kvist_attend good = {.scale = 1, .q = view, .out = view, .k = {.data = k, .sizes = {1, 1, 1, 8}, .strides = {8, 8, 8, 1}}}, call;
    good.out.data = out, good.v = good.k;
    call = good, call.layer = 1;
    EXPECT(kvist_step_attend(cache, &call), KVIST_INVALID_ARGUMENT, "no layer 1");
    call = good, call.q.data = NULL;
    EXPECT(kvist_step_attend(cache, &call), KVIST_INVALID_ARGUMENT, "q is null");
    call = good, call.v.dtype = 4;
    EXPECT(kvist_step_attend(cache, &call), KVIST_INVALID_ARGUMENT, "v.dtype is 4");
    call = good, call.k.sizes[1] = 2;
    EXPECT(kvist_step_attend(cache, &call), KVIST_INVALID_ARGUMENT, "k: [batch");
    call = good, call.k.strides[2] = -8;
    EXPECT(kvist_step_attend(cache, &call), KVIST_INVALID_ARGUMENT, "k.strides has -8");
    call = good, call.q.strides[1] = INT64_MAX, call.q.sizes[1] = 3;
    EXPECT(kvist_step_attend(cache, &call), KVIST_INVALID_ARGUMENT, "past all memory");
    call = good, call.out.data = q + 8, call.q.sizes[2] = 2;
    EXPECT(kvist_step_attend(cache, &call), KVIST_INVALID_ARGUMENT, "out overlaps q");
    call = good, call.q.data = (char *)q + 2;
    EXPECT(kvist_step_attend(cache, &call), KVIST_INVALID_ARGUMENT, "q is not aligned");
    OK(kvist_step_attend(cache, &good));
    EXPECT(kvist_step_attend(cache, &good), KVIST_WRONG_ORDER, "layer 0");
    EXPECT(kvist_step_layer_ran(cache, 0), KVIST_UNSUPPORTED, "kvist_step_attend");
    kvist_tables tables;
    EXPECT(kvist_step_tables(cache, 0, 16, &tables), KVIST_UNSUPPORTED, "backend");
    OK(kvist_step_commit(cache, NULL, 0));
    OK(kvist_cache_truncate(cache, 0, 0));
    OK(kvist_cache_free(cache));
}

int main(void) {
    models();
    sessions();
    windows();
    keeps();
    OK(kvist_model_free(model));
    caches();
    rows();
    return 0;
}
