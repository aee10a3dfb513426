// Steps of a whole model in llama.cpp, measured as llama-bench measures them, but by a process that stays: its cache
// is filled to the depth once, and kvist is measured between two of its answers.
//
//   steps --model M --flash on --depth 4096 --threads 2 --state FILE
//
// With --state the filled cache is kept in that file (written if it is not there): filling 16k tokens takes minutes.
// The layout depends on --flash, so must the file.
//
// Reads lines `decode N` (N single tokens from the depth on) and `prefill N` (N tokens at the depth, logits of the
// last), answers each with a JSON line.
#include "ggml-cpu.h"
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

[[noreturn]] static void fail(const std::string & what) {
    fprintf(stderr, "steps: %s\n", what.c_str());
    exit(1);
}

static llama_context * ctx;
static int32_t n_vocab;

static void feed(int n, int at_once) {
    std::vector<llama_token> tokens;
    for (int done = 0; done < n; done += (int) tokens.size()) {
        tokens.resize(std::min(at_once, n - done));
        for (llama_token & t : tokens) {
            t = rand() % n_vocab;
        }
        // Positions go on from the cache's last one; logits of the last token only.
        if (llama_decode(ctx, llama_batch_get_one(tokens.data(), (int32_t) tokens.size())) != 0) {
            fail("llama_decode failed");
        }
        llama_synchronize(ctx);
    }
}

int main(int argc, char ** argv) {
    std::string model_path, state, flash = "on";
    int depth = 0, threads = 2;
    const int room = 512; // tokens that a request may add
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name = argv[i], value = argv[i + 1];
        if (name == "--model") {
            model_path = value;
        } else if (name == "--state") {
            state = value;
        } else if (name == "--flash") {
            flash = value;
        } else if (name == "--depth") {
            depth = atoi(value.c_str());
        } else if (name == "--threads") {
            threads = atoi(value.c_str());
        } else {
            fail(name + " is unknown");
        }
    }
    // Errors only.
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(model_path.c_str(), llama_model_default_params());
    if (!model) {
        fail("cannot load " + model_path);
    }
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_context_params params = llama_context_default_params();
    params.n_ctx = GGML_PAD(depth + room, 256);
    params.n_batch = 2048;
    params.n_ubatch = 512;
    params.n_threads = threads;
    params.n_threads_batch = threads;
    params.type_k = GGML_TYPE_F16;
    params.type_v = GGML_TYPE_F16;
    params.flash_attn_type = flash == "on" ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.no_perf = true;
    ctx = llama_init_from_model(model, params);
    if (!ctx) {
        fail("no context");
    }
    // As llama-bench: without a pool every step starts its threads anew.
    ggml_threadpool_params pool_params = ggml_threadpool_params_default(threads);
    ggml_threadpool_t pool = ggml_threadpool_new(&pool_params);
    llama_attach_threadpool(ctx, pool, nullptr);

    size_t kept = 0;
    llama_token none; // the file has no tokens, but without a place for them nothing is loaded
    const bool there = !state.empty() && depth > 0 && std::ifstream(state).good() &&
        llama_state_seq_load_file(ctx, state.c_str(), 0, &none, 1, &kept) > 0 &&
        llama_memory_seq_pos_max(llama_get_memory(ctx), 0) == depth - 1;
    if (!there) {
        llama_memory_clear(llama_get_memory(ctx), true);
        feed(depth, 512);
        if (!state.empty() && depth > 0) {
            const std::string partial = state + ".partial";
            if (llama_state_seq_save_file(ctx, partial.c_str(), 0, nullptr, 0) == 0 ||
                std::rename(partial.c_str(), state.c_str()) != 0) {
                fail("cannot write " + state);
            }
        }
    }
    printf("{\"ready\": true}\n");
    fflush(stdout);

    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        int n = 0;
        const bool decode = sscanf(line, "decode %d", &n) == 1;
        if ((!decode && sscanf(line, "prefill %d", &n) != 1) || n < 1 || n > room) {
            fail(std::string("no such request: ") + line);
        }
        const auto start = std::chrono::steady_clock::now();
        feed(n, decode ? 1 : 512);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        llama_memory_seq_rm(llama_get_memory(ctx), 0, depth, -1);
        printf("{\"%s\": %d, \"depth\": %d, \"flash\": \"%s\", \"tokens_per_s\": %.4f}\n", decode ? "decode" : "prefill",
               n, depth, flash.c_str(), n / took.count());
        fflush(stdout);
    }
    llama_free(ctx);
    ggml_threadpool_free(pool);
    llama_model_free(model);
    return 0;
}
