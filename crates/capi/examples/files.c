/* Texts that outlive their process: a session is saved and goes on elsewhere, a prefix is frozen and shared.
 *
 *     cc -I crates/capi/include crates/capi/examples/files.c target/dist/libkvist.a -lm -lpthread -ldl
 *     ./a.out session.kvs prefix.kvp
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

static kvist_session *begin(const kvist_model *model) {
    kvist_session *session;
    kvist_session_options options = {.kind = "cells", .k = "f16", .context_tokens = 512};
    CHECK(kvist_session_new(model, &options, &session));
    return session;
}

static void write_text(kvist_session *session, const char *what) {
    kvist_piece piece;
    printf("%s:", what);
    do {
        CHECK(kvist_session_next(session, 0, &piece));
        fwrite(piece.text, 1, piece.text_bytes, stdout);
    } while (piece.finish == KVIST_GOES_ON);
    printf("\n");
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    kvist_model *model;
    CHECK(kvist_model_open(NULL, NULL, &model));
    kvist_text_options text = kvist_greedy();
    text.max_tokens = 12;

    /* A session that is saved, and another one that goes on there. */
    kvist_session *session = begin(model);
    CHECK(kvist_session_prompt(session, 0, "The borrow checker is a part of the compiler", &text));
    CHECK(kvist_session_save(session, 0, argv[1]));
    write_text(session, "saved");
    CHECK(kvist_session_free(session));

    uint32_t n;
    session = begin(model);
    CHECK(kvist_session_resume(session, 0, argv[1], &text, &n));
    write_text(session, "resumed");
    printf("%" PRIu32 " tokens were not computed again\n", n);
    CHECK(kvist_session_free(session));

    /* The beginning of many texts: computed once, then shared by all processes that open the file. */
    session = begin(model);
    CHECK(kvist_session_prompt(session, 0, "A slice is a view of a vector, and", &text));
    CHECK(kvist_session_freeze(session, 0, argv[2]));
    CHECK(kvist_session_prompt(session, 0, " it never owns", &text));
    write_text(session, "computed");
    CHECK(kvist_session_free(session));

    kvist_prefix *prefix;
    CHECK(kvist_prefix_open(argv[2], &prefix));
    session = begin(model);
    CHECK(kvist_session_begin_with(session, 0, prefix, &n));
    CHECK(kvist_prefix_free(prefix)); /* the session keeps what it needs */
    uint64_t bytes;
    CHECK(kvist_session_kv_bytes(session, &bytes));
    printf("%" PRIu32 " tokens of the prefix take %" PRIu64 " bytes of this session\n", n, bytes);
    CHECK(kvist_session_prompt(session, 0, " it never owns", &text));
    write_text(session, "begun");
    CHECK(kvist_session_free(session));
    CHECK(kvist_model_free(model));
    return 0;
}
