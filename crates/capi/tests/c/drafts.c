/* Drafts: the texts of sessions and batches stay the same, whatever is done with a text in between, and every refusal.
 *
 *     drafts DIR DRAFT HEAD OTHER: an empty folder; a draft model, a head and another model.
 */
#include "checks.h"

#define N 40

static kvist_model *model, *draft, *other;
static const char *folder, *head;
/* Whether the last bits are the same however tokens are put into passes: they are not over q8, so a token may differ now and then. */
static bool exact = true;
/* The embedded model goes on with it, and repeats itself. */
#define ROWS "| a | b |\n| a | b |\n| a | b |\n| a | b |\n| a | b |\n"
static const char *text_of_prompt = ROWS ROWS;

static kvist_session *new_session(const char *kind, const char *k, kvist_draft_options drafts) {
    kvist_session_options options = {.kind = kind, .k = k, .context_tokens = 512, .max_step_tokens = 64, .drafts = drafts};
    if (kind != NULL && strcmp(kind, "ring") == 0) options.window = 256;
    kvist_session *session;
    OK(kvist_session_new(model, &options, &session));
    return session;
}

static kvist_text_options greedy(uint32_t max_tokens) {
    kvist_text_options text = kvist_greedy();
    text.max_tokens = max_tokens;
    text.ignore_end = true;
    return text;
}

/* Reads at most `n` tokens, and checks lengths after each: they are those that the caller has seen. */
static size_t take(kvist_session *session, uint32_t seq, size_t n, uint32_t *tokens) {
    uint32_t before, length;
    OK(kvist_session_length(session, seq, &before));
    size_t taken = 0;
    kvist_piece piece;
    do {
        OK(kvist_session_next(session, seq, &piece));
        if (piece.has_token) {
            tokens[taken++] = piece.token;
            OK(kvist_session_length(session, seq, &length));
            MUST(length == before || length == before + taken || length == before + taken - 1);
        }
    } while (piece.finish == KVIST_GOES_ON && taken < n);
    return taken;
}

/* What is said in a session with everything that may happen to a text between two tokens. Returns the number of tokens. */
static size_t talk(kvist_session *session, bool many, bool shrinks, uint32_t *said) {
    kvist_text_options text = greedy(N);
    OK(kvist_session_prompt(session, 0, text_of_prompt, &text));
    size_t n = take(session, 0, N, said);
    MUST(n == N);

    /* Another prompt in the middle of a text: what was not seen is not part of it. */
    text = greedy(0);
    OK(kvist_session_prompt(session, 0, " them. A", &text));
    n += take(session, 0, 3, said + n);
    text = greedy(20);
    text.temperature = 1;
    text.seed = 7;
    OK(kvist_session_prompt(session, 0, " vector owns its", &text));
    n += take(session, 0, 2, said + n);

    /* A saved text goes on elsewhere as it does here. */
    char path[4096];
    snprintf(path, sizeof path, "%s/talk.kvs", folder);
    OK(kvist_session_save(session, 0, path));
    n += take(session, 0, 5, said + n);
    uint32_t known[512];
    size_t n_known;
    OK(kvist_session_tokens(session, 0, known, 512, &n_known));
    uint32_t length;
    OK(kvist_session_length(session, 0, &length));
    MUST(n_known == length && known[n_known - 1] == said[n - 2]);

    if (many) {
        OK(kvist_session_fork(session, 0, 1));
        for (int i = 0; i < 5; i++) {
            uint32_t pair[2];
            MUST(take(session, 0, 1, pair) == 1 && take(session, 1, 1, pair + 1) == 1);
            MUST(!exact || pair[0] == pair[1]);
            said[n++] = pair[0];
        }
        OK(kvist_session_remove(session, 1));
    }
    if (shrinks) {
        OK(kvist_session_rollback(session, 0, 32));
        OK(kvist_session_length(session, 0, &length));
        MUST(length == 32);
        text = greedy(0);
        OK(kvist_session_prompt(session, 0, " A slice borrows", &text));
        n += take(session, 0, 9, said + n);
    }
    /* Tokens that the caller chooses come after those that it has seen. */
    kvist_input input = {.seq = 0, .tokens = said, .n_tokens = 3};
    OK(kvist_session_length(session, 0, &length));
    OK(kvist_session_forward(session, &input, 1, KVIST_LAST_ROWS));
    uint32_t after;
    OK(kvist_session_length(session, 0, &after));
    MUST(after == length + 3);
    OK(kvist_session_rollback(session, 0, 0));
    text = greedy(12);
    OK(kvist_session_prompt(session, 0, text_of_prompt, &text));
    n += take(session, 0, 12, said + n);
    return n;
}

static void sessions(void) {
    const char *kinds[] = {"contiguous", "cells", "tree", "paged", NULL};
    const char *storages[] = {"f32", "f16", "q8"};
    const kvist_draft_options drafts[] = {
        {.speculate = "auto"},
        {.speculate = "ngram", .draft_tokens = 5},
        {.speculate = "suffix"},
        {.speculate = "draft"},
        {.speculate = "draft", .draft_model = draft, .draft_depth = 3, .draft_width = 2},
        {.speculate = "eagle"},
        {.speculate = "eagle", .draft_head = head},
        {.speculate = "auto", .draft_head = head},
        {.speculate = "auto", .draft_model = draft},
    };
    for (int s = 0; s < 3; s++) {
        exact = s < 2;
        for (int k = 0; k < 5; k++) {
            bool many = k > 0 && kinds[k] != NULL;
            uint32_t expected[200], found[200];
            kvist_session *plain = new_session(kinds[k], storages[s], (kvist_draft_options){0});
            size_t n = talk(plain, many, true, expected);
            OK(kvist_session_free(plain));
            for (size_t d = 0; d < sizeof drafts / sizeof *drafts; d++) {
                kvist_session *session = new_session(kinds[k], storages[s], drafts[d]);
                MUST(talk(session, many, true, found) == n);
                MUST(!exact || memcmp(found, expected, n * sizeof *found) == 0);
                kvist_speculation counts;
                OK(kvist_session_speculation(session, &counts));
                MUST(!counts.has_failed && counts.target_passes > 0 && counts.accepted_tokens <= counts.drafted_tokens);
                MUST(strcmp(drafts[d].speculate, "auto") == 0 || (counts.accepted_tokens > 0 && counts.drafts > 0));
                OK(kvist_session_free(session));
            }
        }
    }
    uint32_t tokens[2][N];
    for (int i = 0; i < 2; i++) {
        kvist_session *ring = new_session("ring", "f32", (kvist_draft_options){.speculate = i ? "suffix" : NULL});
        kvist_text_options text = greedy(N);
        OK(kvist_session_prompt(ring, 0, text_of_prompt, &text));
        take(ring, 0, N / 2, tokens[i]);
        OK(kvist_session_prompt(ring, 0, " A slice borrows", &text)); /* computed again behind what was seen */
        MUST(take(ring, 0, N / 2, tokens[i] + N / 2) == N / 2);
        kvist_speculation counts;
        OK(kvist_session_speculation(ring, &counts));
        MUST((counts.target_passes > 0) == (i == 1));
        OK(kvist_session_free(ring));
    }
    MUST(memcmp(tokens[0], tokens[1], sizeof tokens[0]) == 0);

    /* A stop string ends a text where it does without drafts, and so does a full cache. */
    for (uint32_t context = 64; context < 72; context++) {
        char whole[2][2048];
        kvist_finish finish[2];
        size_t n[2] = {0};
        for (int i = 0; i < 2; i++) {
            kvist_session_options options = {.k = "f32", .context_tokens = context, .drafts.speculate = i ? "suffix" : NULL, .drafts.draft_tokens = i ? 8 : 0};
            kvist_session *session;
            OK(kvist_session_new(model, &options, &session));
            kvist_text_options text = greedy(0);
            const char *stop = context == 64 ? "no such text" : "them";
            text.stop = &stop;
            text.n_stop = context % 2;
            OK(kvist_session_prompt(session, 0, text_of_prompt, &text));
            whole[i][0] = 0;
            kvist_piece piece;
            do {
                OK(kvist_session_next(session, 0, &piece));
                strncat(whole[i], piece.text, sizeof whole[i] - strlen(whole[i]) - 1);
                n[i] += piece.has_token;
            } while (piece.finish == KVIST_GOES_ON);
            finish[i] = piece.finish;
            OK(kvist_session_free(session));
        }
        MUST(n[0] == n[1] && finish[0] == finish[1] && strcmp(whole[0], whole[1]) == 0);
    }
}

static void batches(void) {
    const char *prompts[] = {text_of_prompt, "The borrow checker", "A slice borrows them. A slice"};
    char expected[3][4096], found[3][4096];
    const kvist_draft_options drafts[] = {{0}, {.speculate = "suffix"}, {.speculate = "draft", .draft_model = draft},
                                          {.speculate = "eagle", .draft_tokens = 6}, {.speculate = "auto"}};
    for (size_t d = 0; d < sizeof drafts / sizeof *drafts; d++) {
        kvist_batch_options options = {.k = "f32", .context_tokens = 1024, .max_batch = 3, .drafts = drafts[d]};
        kvist_batch *batch;
        OK(kvist_batch_new(model, &options, &batch));
        kvist_text_options text = greedy(N);
        kvist_job_options wanted = {.text = &text};
        kvist_job *jobs[3];
        for (int i = 0; i < 3; i++) OK(kvist_batch_submit(batch, prompts[i], &wanted, &jobs[i]));
        for (int i = 0; i < 3; i++) {
            char *now = d == 0 ? expected[i] : found[i];
            now[0] = 0;
            kvist_piece piece;
            do {
                OK(kvist_job_next(jobs[i], KVIST_FOREVER, &piece));
                strncat(now, piece.text, sizeof expected[i] - strlen(now) - 1);
            } while (piece.finish == KVIST_GOES_ON);
            MUST(piece.finish == KVIST_MAX_TOKENS && strcmp(expected[i], d == 0 ? expected[i] : found[i]) == 0);
            OK(kvist_job_free(jobs[i]));
        }
        kvist_speculation counts;
        OK(kvist_batch_speculation(batch, &counts));
        MUST(d > 0 || (counts.target_passes == 0 && counts.drafts == 0));
        /* Those of the end of a step, and the last tokens come before it. */
        uint64_t tokens = counts.target_passes + counts.accepted_tokens;
        MUST(d == 0 || (tokens > 2 * N && tokens <= 3 * (N - 1)));
        MUST(d == 0 || d == 4 || counts.accepted_tokens > 0);
        OK(kvist_batch_free(batch));
    }
}

static void refuse(kvist_draft_options drafts, uint32_t context, const char *keep, kvist_status status, const char *text) {
    kvist_session_options alone = {.context_tokens = context, .keep = keep, .drafts = drafts};
    kvist_session *session;
    EXPECT(kvist_session_new(model, &alone, &session), status, text);
    kvist_batch_options many = {.context_tokens = context, .keep = keep, .drafts = drafts};
    kvist_batch *batch;
    EXPECT(kvist_batch_new(model, &many, &batch), status, text);
}

static void refusals(void) {
    const kvist_status wrong = KVIST_INVALID_ARGUMENT;
#define REFUSE(status, text, context, keep, ...) refuse((kvist_draft_options){__VA_ARGS__}, context, keep, status, text)
    REFUSE(wrong, "speculate: `lookup` is not a drafter: use auto, ngram, suffix, draft, eagle, or off", 0, NULL, .speculate = "lookup");
    REFUSE(wrong, "speculate is not UTF-8", 0, NULL, .speculate = "\xff");
    REFUSE(wrong, "draft_tokens: nothing is drafted: give speculate too", 0, NULL, .draft_tokens = 4);
    REFUSE(wrong, "draft_head: nothing is drafted", 0, NULL, .speculate = "off", .draft_head = head);
    REFUSE(wrong, "draft_model: speculate suffix uses none", 0, NULL, .speculate = "suffix", .draft_model = draft);
    REFUSE(wrong, "draft_model: speculate eagle uses none", 0, NULL, .speculate = "eagle", .draft_model = draft);
    REFUSE(wrong, "draft_head: speculate draft uses none", 0, NULL, .speculate = "draft", .draft_head = head);
    REFUSE(wrong, "give one of both", 0, NULL, .speculate = "auto", .draft_model = draft, .draft_head = head);
    REFUSE(wrong, "draft_width: 65 is not a number from 1 to 64", 0, NULL, .speculate = "suffix", .draft_width = 65);
    REFUSE(wrong, "draft_tokens 16: the cache holds 16 tokens; use fewer, or a larger context_tokens", 16, NULL, .speculate = "suffix");
    REFUSE(wrong, "leave one out", 0, "recent=64", .speculate = "suffix");
    REFUSE(wrong, "draft_model: the draft model has", 0, NULL, .speculate = "draft", .draft_model = other);
    REFUSE(KVIST_BAD_MODEL, "not a folder", 0, NULL, .speculate = "eagle", .draft_head = "no such folder");
    kvist_session_options alone = {.drafts.speculate = "draft"};
    kvist_session *session;
    EXPECT(kvist_session_new(other, &alone, &session), wrong, "draft_model is null");
    alone.drafts.speculate = "eagle";
    EXPECT(kvist_session_new(other, &alone, &session), wrong, "draft_head is null");

    /* What does not fit is refused before anything is read, and nothing stays reserved. */
    kvist_model_options memory = {.memory_bytes = 24 << 20};
    kvist_model *small;
    OK(kvist_model_open(NULL, &memory, &small));
    for (int i = 0; i < 3; i++) {
        kvist_session_options large = {.context_tokens = 2560, .drafts.speculate = i % 2 ? "eagle" : "draft"};
        EXPECT(kvist_session_new(small, &large, &session), KVIST_OUT_OF_MEMORY, "the draft model and its cache need");
        large.drafts.speculate = "suffix";
        large.drafts.draft_tokens = 4;
        OK(kvist_session_new(small, &large, &session));
        OK(kvist_session_free(session));
    }
    OK(kvist_model_free(small));
    kvist_speculation counts;
    EXPECT(kvist_session_speculation(NULL, &counts), wrong, "session is null");
    EXPECT(kvist_batch_speculation(NULL, &counts), wrong, "batch is null");
}

int main(int argc, char **argv) {
    MUST(argc == 5);
    folder = argv[1];
    head = argv[3];
    kvist_model_options one = {.threads = 1};
    OK(kvist_model_open(NULL, &one, &model));
    OK(kvist_model_open(argv[2], NULL, &draft));
    OK(kvist_model_open(argv[4], NULL, &other));
    sessions();
    batches();
    refusals();
    /* Sessions keep what they need of a draft model. */
    kvist_session *session = new_session(NULL, "f32", (kvist_draft_options){.speculate = "draft", .draft_model = draft});
    OK(kvist_model_free(draft));
    kvist_text_options text = greedy(8);
    uint32_t tokens[8];
    OK(kvist_session_prompt(session, 0, text_of_prompt, &text));
    OK(kvist_model_free(model));
    MUST(take(session, 0, 8, tokens) == 8);
    OK(kvist_session_free(session));
    OK(kvist_model_free(other));
    puts("ok");
    return 0;
}
