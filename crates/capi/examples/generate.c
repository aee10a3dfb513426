/* Text from the embedded model, step by step: a prompt, its tokens, a fork that goes another way, and a rollback.
 *
 *     cc -I crates/capi/include crates/capi/examples/generate.c target/dist/libkvist.a -lm -lpthread -ldl
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include "kvist.h"

static void check(kvist_status status, const char *what) {
    if (status != KVIST_OK) {
        fprintf(stderr, "%s: %s\n", what, kvist_last_error());
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

static void write_text(kvist_session *session, uint32_t seq) {
    for (;;) {
        kvist_piece piece;
        CHECK(kvist_session_next(session, seq, &piece));
        fwrite(piece.text, 1, piece.text_bytes, stdout);
        if (piece.finish != KVIST_GOES_ON) break;
    }
    printf("\n");
}

int main(int argc, char **argv) {
    kvist_model *model = NULL;
    kvist_session *session = NULL;
    CHECK(kvist_model_open(argc > 1 ? argv[1] : NULL, NULL, &model));

    kvist_session_options options = {.kind = "cells", .k = "q8", .context_tokens = 512};
    CHECK(kvist_session_new(model, &options, &session));
    CHECK(kvist_model_free(model)); /* the session keeps what it needs */

    kvist_text_options text = kvist_greedy();
    text.max_tokens = 24;
    CHECK(kvist_session_prompt(session, 0, "The borrow checker", &text));
    CHECK(kvist_session_fork(session, 0, 1)); /* shares K and V with sequence 0 */
    printf("0: The borrow checker");
    write_text(session, 0);

    text.temperature = 0.8f;
    text.top_p = 0.95f;
    text.seed = 7;
    CHECK(kvist_session_prompt(session, 1, " of the compiler", &text));
    printf("1: The borrow checker of the compiler");
    write_text(session, 1);

    uint32_t n_tokens;
    uint64_t bytes;
    CHECK(kvist_session_rollback(session, 0, 2));
    CHECK(kvist_session_length(session, 0, &n_tokens));
    CHECK(kvist_session_kv_bytes(session, &bytes));
    printf("sequence 0 has %" PRIu32 " tokens now; K and V take %" PRIu64 " bytes\n", n_tokens, bytes);
    CHECK(kvist_session_free(session));
    return 0;
}
