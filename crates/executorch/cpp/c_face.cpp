// The sessions for callers without C++: Python's ctypes and Rust. Functions return 0, or -1 with a text in
// kvist_et_last_error; those that ask return the number, or -1.
#include "cache.h"
#include "last_error.h"

using namespace executorch::cache;

namespace {

struct Session {
  std::string key;
  std::shared_ptr<Cache> cache;
  std::vector<std::unique_ptr<ActiveCache>> scopes;
};

template <class Run>
long guarded(Run run) {
  try {
    return run();
  } catch (const std::exception& why) {
    last_error() = why.what();
    return -1;
  }
}

template <class Face>
Face& face(Session* session, const char* verb) {
  auto* face = dynamic_cast<Face*>(session->cache.get());
  if (!face) throw std::runtime_error(std::string("this session has no ") + verb + ": make one of another kind");
  return *face;
}

} // namespace

extern "C" {

typedef struct kvist_et_config {
  int32_t capacity, n_layers, n_kv_heads, head_dim, min_chunk;
  int32_t kv_dtype; // an ExecuTorch ScalarType
  int32_t group_size, bits, max_step_tokens, threads;
  const int32_t* windows;
  int32_t n_windows;
} kvist_et_config;

const char* kvist_et_last_error() { return last_error().c_str(); }

// Null if there is no such cache.
Session* kvist_et_session(const char* backend, const char* kind, const kvist_et_config* c) {
  Session* made = nullptr;
  guarded([&] {
    CacheConfig config;
    config.capacity = c->capacity, config.n_layers = c->n_layers, config.n_kv_heads = c->n_kv_heads, config.head_dim = c->head_dim;
    config.min_chunk = c->min_chunk, config.kv_dtype = ScalarType(c->kv_dtype), config.group_size = c->group_size, config.bits = c->bits;
    config.max_step_tokens = c->max_step_tokens, config.threads = c->threads;
    config.windows.assign(c->windows, c->windows + c->n_windows);
    auto cache = CacheBuilderRegistry::global().build(backend, kind, config);
    auto key = make_unique_key();
    CacheRegistry::global().install(key, cache);
    made = new Session{key, cache, {}};
    return 0L;
  });
  return made;
}

void kvist_et_free(Session* session) {
  if (!session) return;
  CacheRegistry::global().erase(session->key);
  delete session;
}

const char* kvist_et_key(Session* session) { return session->key.c_str(); }

// Executions of this thread use the session until the matching leave.
long kvist_et_enter(Session* session) {
  last_error().clear(); // what an execution leaves here is its own
  return guarded([&] { return session->scopes.push_back(std::make_unique<ActiveCache>(session->key)), 0L; });
}
void kvist_et_leave(Session* session) {
  if (!session->scopes.empty()) session->scopes.pop_back();
}

long kvist_et_can_extend(Session* session, int32_t n) {
  return guarded([&] { return long(session->cache->can_extend(n)); });
}
long kvist_et_clear(Session* session) {
  return guarded([&] { return session->cache->clear(), 0L; });
}
long kvist_et_len(Session* session, int32_t seq) {
  return guarded([&] {
    if (auto* decode = dynamic_cast<DecodeCache*>(session->cache.get())) return long(decode->len());
    return long(face<SeqCache>(session, "seq_len").seq_len(seq));
  });
}
long kvist_et_rewind(Session* session, int32_t len) {
  return guarded([&] { return face<DecodeCache>(session, "rewind").rewind(len), 0L; });
}
long kvist_et_begin_step(Session* session, const int32_t* seqs, int32_t n) {
  return guarded([&] { return face<SeqCache>(session, "begin_step").begin_step(seqs, n), 0L; });
}
long kvist_et_seq_cp(Session* session, int32_t src, int32_t dst, int32_t p0, int32_t p1) {
  return guarded([&] { return face<SeqCache>(session, "seq_cp").seq_cp(src, dst, p0, p1), 0L; });
}
long kvist_et_seq_rm(Session* session, int32_t seq, int32_t p0, int32_t p1) {
  return guarded([&] { return face<SeqCache>(session, "seq_rm").seq_rm(seq, p0, p1), 0L; });
}
long kvist_et_seq_keep(Session* session, int32_t seq) {
  return guarded([&] { return face<SeqCache>(session, "seq_keep").seq_keep(seq), 0L; });
}
long kvist_et_propose(Session* session, const int32_t* parents, int32_t n) {
  return guarded([&] { return face<TreeSeqCache>(session, "propose").propose(parents, n), 0L; });
}
long kvist_et_commit(Session* session, const int32_t* accepted, int32_t n) {
  return guarded([&] { return face<TreeSeqCache>(session, "commit").commit(accepted, n), 0L; });
}

} // extern "C"
