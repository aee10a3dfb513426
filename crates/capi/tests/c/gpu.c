/* Models on a GPU: sessions, batches and prefixes give the same text, which begins as that of the CPU. The arguments are a backend and a
 * folder. */
#include "checks.h"

static const char *prompt = "The capacity of a vector is the amount of space allocated for any future elements";

static kvist_text_options short_text(void) {
    kvist_text_options text = kvist_greedy();
    text.max_tokens = 24;
    return text;
}

/* Appends what a session says next. */
static void speak(kvist_session *session, char *out) {
    kvist_text_options text = short_text();
    OK(kvist_session_prompt(session, 0, prompt, &text));
    kvist_piece piece;
    do {
        OK(kvist_session_next(session, 0, &piece));
        strncat(out, piece.text, piece.text_bytes);
    } while (piece.finish == KVIST_GOES_ON);
}

/* A session's text, the prefix that is frozen of it, and one that begins with that. */
static void texts(const char *backend, const char *path, char *out) {
    kvist_model_options options = {.backend = backend};
    kvist_model *model;
    OK(kvist_model_open(NULL, &options, &model));
    kvist_session_options sizes = {.k = "f32", .context_tokens = 256};
    kvist_session *session, *begun;
    OK(kvist_session_new(model, &sizes, &session));
    uint32_t tokens[64];
    size_t n;
    OK(kvist_model_tokenize(model, prompt, true, tokens, 64, &n));
    kvist_input input = {.seq = 0, .tokens = tokens, .n_tokens = n};
    OK(kvist_session_forward(session, &input, 1, KVIST_LAST_ROWS));
    OK(kvist_session_freeze(session, 0, path));
    kvist_prefix *prefix;
    OK(kvist_prefix_open(path, &prefix));
    OK(kvist_session_new(model, &sizes, &begun));
    OK(kvist_session_begin_with(begun, 0, prefix, NULL));
    speak(session, out);
    char again[4096] = "";
    speak(begun, again);
    MUST(strcmp(out, again) == 0);
    kvist_batch *batch;
    OK(kvist_batch_new(model, &(kvist_batch_options){.k = "f32", .context_tokens = 256, .prefix = prefix}, &batch));
    /* The same tokens: the prompt, frozen above, and the one that the sessions went on with. */
    size_t m;
    OK(kvist_model_tokenize(model, prompt, false, tokens + n, 64 - n, &m));
    kvist_job *job;
    kvist_text_options text = short_text();
    OK(kvist_batch_submit_tokens(batch, tokens, n + m, &(kvist_job_options){.text = &text}, &job));
    char third[4096] = "";
    kvist_piece piece;
    do {
        OK(kvist_job_next(job, 60000, &piece));
        strncat(third, piece.text, piece.text_bytes);
    } while (piece.finish == KVIST_GOES_ON);
    MUST(strcmp(out, third) == 0);
    OK(kvist_job_free(job));
    OK(kvist_batch_free(batch));
    OK(kvist_session_free(begun));
    OK(kvist_session_free(session));
    OK(kvist_prefix_free(prefix));
    OK(kvist_model_free(model));
}

int main(int argc, char **argv) {
    MUST(argc == 3);
    char on_cpu[4096] = "", on_gpu[4096] = "", path[4096];
    snprintf(path, sizeof path, "%s/p.kvp", argv[2]);
    texts(NULL, path, on_cpu);
    texts(argv[1], path, on_gpu);
    MUST(strlen(on_cpu) > 20);
    /* The last bits of logits differ: a longer text may go another way where two tokens are nearly tied. */
    MUST(strncmp(on_cpu, on_gpu, 16) == 0);
    puts("ok");
    return 0;
}
