// Attention alone in ggml, as llama.cpp lays its cache out and builds its graph (llama-kv-cache.cpp, get_k and get_v;
// llama-graph.cpp, build_attn_mha): one cache of its own per layer, all layers in one graph, each with its queries.
// Left out is what llama.cpp does around it (the matrices, storing the new cells, the rotation of quantised caches).
//
//   attention --layers 12 --heads 12 --kv-heads 12 --head-dim 64 --tokens 4096 --queries 1 --type f16 --mode flash
//
// One JSON line: the median over --runs of the time of all layers together, in ms. `norm` is a checksum: the modes
// must agree in it.
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

[[noreturn]] static void fail(const std::string & what) {
    fprintf(stderr, "attention: %s\n", what.c_str());
    exit(1);
}

struct Args {
    int64_t layers = 12, heads = 12, kv_heads = 12, head_dim = 64, tokens = 4096, queries = 1, threads = 2, runs = 20;
    std::string type = "f16", mode = "flash";
};

static Args parse(int argc, char ** argv) {
    Args a;
    for (int i = 1; i < argc; i += 2) {
        const std::string name = argv[i];
        if (i + 1 == argc) {
            fail(name + " has no value");
        }
        const char * value = argv[i + 1];
        int64_t * size = name == "--layers" ? &a.layers : name == "--heads" ? &a.heads
            : name == "--kv-heads" ? &a.kv_heads : name == "--head-dim" ? &a.head_dim
            : name == "--tokens" ? &a.tokens : name == "--queries" ? &a.queries
            : name == "--threads" ? &a.threads : name == "--runs" ? &a.runs : nullptr;
        if (size) {
            *size = atoll(value);
            if (*size <= 0) {
                fail(name + " is " + value);
            }
        } else if (name == "--type") {
            a.type = value;
        } else if (name == "--mode") {
            a.mode = value;
        } else {
            fail(name + " is unknown");
        }
    }
    return a;
}

// Numbers between -1 and 1, always the same.
static std::vector<float> numbers(size_t n, uint32_t seed) {
    std::vector<float> all(n);
    for (float & x : all) {
        seed = seed * 1664525u + 1013904223u;
        x = (float) (seed >> 8) / (1 << 23) - 1.0f;
    }
    return all;
}

// Every row of `t` (its first dimension) encoded from random numbers. A few hundred rows are encoded and repeated:
// time does not depend on the values, and the memory is all there.
static void fill(ggml_tensor * t, uint32_t seed) {
    const int64_t row = t->ne[0], rows = ggml_nrows(t), some = std::min<int64_t>(rows, 251);
    const auto values = numbers(row * some, seed);
    const size_t bytes = ggml_row_size(t->type, row);
    std::vector<uint8_t> encoded(bytes * some);
    ggml_quantize_chunk(t->type, values.data(), encoded.data(), 0, some, row, nullptr);
    for (int64_t r = 0; r < rows; r += some) {
        memcpy((uint8_t *) t->data + bytes * r, encoded.data(), bytes * std::min(some, rows - r));
    }
}

int main(int argc, char ** argv) {
    const Args a = parse(argc, argv);
    const bool flash = a.mode == "flash";
    if (!flash && a.mode != "plain") {
        fail("--mode is flash or plain");
    }
    const ggml_type type = a.type == "f16" ? GGML_TYPE_F16 : a.type == "q8_0" ? GGML_TYPE_Q8_0
        : a.type == "q4_0" ? GGML_TYPE_Q4_0 : GGML_TYPE_COUNT;
    if (type == GGML_TYPE_COUNT) {
        fail("--type is f16, q8_0 or q4_0");
    }
    if (!flash && type != GGML_TYPE_F16) {
        fail("llama.cpp quantises V only with flash attention");
    }
    if (a.queries > a.tokens) {
        fail("the queries are the last of the tokens");
    }
    if (a.head_dim % 32 || a.heads % a.kv_heads) {
        fail("--head-dim must be a multiple of 32, --heads of --kv-heads");
    }
    const int64_t width = a.head_dim * a.kv_heads, padded = GGML_PAD(a.tokens, 256);

    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_threadpool_params params = ggml_threadpool_params_default((int) a.threads);
    ggml_threadpool_t pool = ggml_threadpool_new(&params);
    if (!backend || !pool) {
        fail("no backend");
    }
    ggml_backend_cpu_set_n_threads(backend, (int) a.threads);
    ggml_backend_cpu_set_threadpool(backend, pool);

    // What is there before the step: caches, queries, mask.
    ggml_init_params holds = { ggml_tensor_overhead() * (size_t) (3 * a.layers + 2), nullptr, true };
    ggml_context * held = ggml_init(holds);
    std::vector<ggml_tensor *> ks, vs, qs;
    for (int64_t l = 0; l < a.layers; l++) {
        ks.push_back(ggml_new_tensor_2d(held, type, width, padded));
        // Without flash attention llama.cpp keeps V transposed: all tokens of a channel beside each other.
        vs.push_back(flash ? ggml_new_tensor_2d(held, type, width, padded)
                           : ggml_new_tensor_2d(held, type, padded, width));
        qs.push_back(ggml_new_tensor_3d(held, GGML_TYPE_F32, a.head_dim, a.heads, a.queries));
    }
    ggml_tensor * mask = ggml_new_tensor_2d(held, flash ? GGML_TYPE_F16 : GGML_TYPE_F32, padded, a.queries);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(held, backend);
    if (!buffer) {
        fail("no memory");
    }
    for (int64_t l = 0; l < a.layers; l++) {
        fill(ks[l], 3 * l + 1);
        fill(qs[l], 3 * l + 3);
        if (flash) {
            fill(vs[l], 3 * l + 2);
        } else {
            // The same values as `fill` gives the other layout.
            const int64_t some = std::min<int64_t>(padded, 251);
            const auto values = numbers(width * some, 3 * l + 2);
            auto * data = (ggml_fp16_t *) vs[l]->data;
            for (int64_t c = 0; c < width; c++) {
                for (int64_t t = 0; t < padded; t++) {
                    data[c * padded + t] = ggml_fp32_to_fp16(values[(t % some) * width + c]);
                }
            }
        }
    }
    // The queries are the last tokens; each sees itself and what came before.
    for (int64_t i = 0; i < a.queries; i++) {
        for (int64_t t = 0; t < padded; t++) {
            const float value = t <= a.tokens - a.queries + i ? 0.0f : -INFINITY;
            if (flash) {
                ((ggml_fp16_t *) mask->data)[i * padded + t] = ggml_fp32_to_fp16(value);
            } else {
                ((float *) mask->data)[i * padded + t] = value;
            }
        }
    }

    const size_t nodes = 16 * (size_t) a.layers + 64;
    ggml_init_params builds = { ggml_tensor_overhead() * nodes + ggml_graph_overhead_custom(nodes, false), nullptr, true };
    ggml_context * built = ggml_init(builds);
    ggml_cgraph * graph = ggml_new_graph_custom(built, nodes, false);
    const float scale = 1.0f / sqrtf((float) a.head_dim);
    std::vector<ggml_tensor *> outs;
    for (int64_t l = 0; l < a.layers; l++) {
        ggml_tensor * q = ggml_permute(built, qs[l], 0, 2, 1, 3);
        ggml_tensor * k = ggml_view_3d(built, ks[l], a.head_dim, a.kv_heads, padded,
            ggml_row_size(type, a.head_dim), ggml_row_size(type, width), 0);
        k = ggml_permute(built, k, 0, 2, 1, 3);
        ggml_tensor * out;
        if (flash) {
            ggml_tensor * v = ggml_view_3d(built, vs[l], a.head_dim, a.kv_heads, padded,
                ggml_row_size(type, a.head_dim), ggml_row_size(type, width), 0);
            v = ggml_permute(built, v, 0, 2, 1, 3);
            out = ggml_flash_attn_ext(built, q, k, v, mask, scale, 0.0f, 0.0f);
        } else {
            ggml_tensor * v = ggml_view_3d(built, vs[l], padded, a.kv_heads, a.head_dim,
                ggml_row_size(type, padded * a.head_dim), ggml_row_size(type, padded), 0);
            v = ggml_permute(built, v, 0, 2, 1, 3);
            ggml_tensor * kq = ggml_mul_mat(built, k, q);
            kq = ggml_soft_max_ext(built, kq, mask, scale, 0.0f);
            ggml_tensor * kqv = ggml_mul_mat(built, v, kq);
            out = ggml_permute(built, kqv, 0, 2, 1, 3);
            out = ggml_cont_2d(built, out, a.head_dim * a.heads, a.queries);
        }
        ggml_set_output(out);
        ggml_build_forward_expand(graph, out);
        outs.push_back(out);
    }
    ggml_gallocr_t allocator = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
    if (!ggml_gallocr_alloc_graph(allocator, graph)) {
        fail("no memory for the graph");
    }

    std::vector<double> times;
    for (int64_t run = -2; run < a.runs; run++) { // two to warm up
        const auto start = std::chrono::steady_clock::now();
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            fail("the graph failed");
        }
        const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
        if (run >= 0) {
            times.push_back(took.count());
        }
    }
    std::sort(times.begin(), times.end());
    double norm = 0;
    for (const ggml_tensor * out : outs) {
        for (int64_t i = 0; i < ggml_nelements(out); i++) {
            norm += fabs(((const float *) out->data)[i]);
        }
    }
    printf("{\"type\": \"%s\", \"mode\": \"%s\", \"tokens\": %lld, \"queries\": %lld, \"threads\": %lld, "
           "\"median_ms\": %.4f, \"min_ms\": %.4f, \"norm\": %.6g}\n",
           a.type.c_str(), a.mode.c_str(), (long long) a.tokens, (long long) a.queries, (long long) a.threads,
           times[times.size() / 2], times[0], norm);
    ggml_gallocr_free(allocator);
    ggml_free(built);
    ggml_backend_buffer_free(buffer);
    ggml_free(held);
    ggml_backend_free(backend);
    ggml_threadpool_free(pool);
    return 0;
}
