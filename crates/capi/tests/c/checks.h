/* Checks of a status and its text, and of what must hold: the first that fails ends the program. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kvist.h"

static inline void expect(kvist_status found, kvist_status wanted, const char *text, const char *what) {
    if (found != wanted || (text != NULL && strstr(kvist_last_error(), text) == NULL)) {
        fprintf(stderr, "%s: status %d (expected %d), \"%s\" (expected \"%s\")\n", what, found, wanted, kvist_last_error(),
                text == NULL ? "" : text);
        exit(1);
    }
}
#define OK(call) expect(call, KVIST_OK, NULL, #call)
#define EXPECT(call, status, text) expect(call, status, text, #call)
#define MUST(what)                                                    \
    do {                                                              \
        if (!(what)) {                                                \
            fprintf(stderr, "line %d: not so: %s\n", __LINE__, #what); \
            exit(1);                                                  \
        }                                                             \
    } while (0)
