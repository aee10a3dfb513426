// Caches for exported graphs: the op `kvcache::update_and_attend` reads and writes whichever cache is active on the calling
// thread, so one .pte decodes, batches, forks and verifies draft trees by installing another cache. docs/executorch.md.
//
// Link libkvist_executorch.so beside libexecutorch.so: it registers the kernel when it is loaded.
//
// Functions throw std::runtime_error with a text that says what was found. Faces are used by one thread at a time; a second one
// gets an error.
#pragma once

#include <climits>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <executorch/runtime/core/portable_type/scalar_type.h>

namespace executorch {
namespace cache {

using ScalarType = ::executorch::runtime::etensor::ScalarType;

// What the program's metadata says about its model.
struct ModelCacheParams {
  int n_layers, n_kv_heads, head_dim;
};

// The model's facts, and what the caller chooses for one session.
struct CacheConfig {
  int capacity = 0; // tokens over all sequences; memory follows the tokens held, this is its bound
  int n_layers = 0, n_kv_heads = 0, head_dim = 0;
  // Tokens by which the pools grow at least, up to the capacity. kvist doubles them, so this is the size of the first allocation:
  // a power of two (others are rounded up), 256 or more.
  int min_chunk = 512;
  // Float, Half or BFloat16 store K and V as they are; Byte stores codes of `bits` bits that share a scale per `group_size`.
  ScalarType kv_dtype = ScalarType::Half;
  int group_size = 64, bits = 4; // groups of 32 or 64, of 8 or 4 bits
  // Beyond the design: positions that a query sees, per layer; one for all; empty for no window.
  std::vector<int> windows;
  int max_step_tokens = 0; // tokens of the largest execution; 0 is the capacity, at most 2048
  int threads = 0; // 0 is one per core
};

CacheConfig make_config(
    const ModelCacheParams& model,
    int capacity,
    ScalarType kv_dtype = ScalarType::Half,
    int min_chunk = 512);

// What every cache shows to the loop that generates.
class Cache {
 public:
  virtual ~Cache() = default;
  virtual bool can_extend(int n = 1) const = 0; // whether n more tokens fit
  virtual int capacity() const = 0;
  virtual void clear() = 0;
};

// One sequence. Positions are consecutive; an execution appends.
class DecodeCache : public Cache {
 public:
  virtual int len() const = 0;
  virtual void rewind(int new_len) = 0; // keeps the first new_len tokens
};

// Many sequences that share cells. Every execution needs a begin_step.
class SeqCache : public Cache {
 public:
  // The sequence of every token of the next execution. A refusal changes nothing.
  virtual void begin_step(const int32_t* seq_id, int n_tok) = 0;
  virtual void seq_cp(int32_t src, int32_t dst, int p0 = 0, int p1 = INT_MAX) = 0; // copies no bytes
  virtual void seq_rm(int32_t seq, int p0 = 0, int p1 = INT_MAX) = 0;
  virtual void seq_keep(int32_t seq) = 0;
  virtual int seq_len(int32_t seq) const = 0;
};

// Draft trees of sequence 0. Without a proposal an execution appends tokens, as in DecodeCache.
class TreeSeqCache : public SeqCache {
 public:
  // The parents of the nodes that the next execution appends: earlier nodes since the last commit, or -1 for the committed end.
  virtual void propose(const int32_t* parents, int n) = 0;
  // Makes a path of nodes part of the sequence, and forgets the others; moves no bytes.
  virtual void commit(const int32_t* accepted, int len) = 0;
};
using TreeCache = TreeSeqCache;

// Installed caches by key.
class CacheRegistry {
 public:
  static CacheRegistry& global();
  void install(const std::string& key, std::shared_ptr<Cache> cache);
  std::shared_ptr<Cache> get(const std::string& key) const; // null if there is none
  void erase(const std::string& key);
};

using CacheBuilder = std::function<std::shared_ptr<Cache>(const CacheConfig&)>;

// Builders by backend and kind. "kvist" and "kvist-reference" (plain loops) have "contiguous", "seq" and "tree".
class CacheBuilderRegistry {
 public:
  static CacheBuilderRegistry& global();
  void register_builder(const std::string& backend_id, const std::string& kind, CacheBuilder builder);
  // Throws for an unknown pair, and names those that exist.
  std::shared_ptr<Cache> build(const std::string& backend_id, const std::string& kind, const CacheConfig& config) const;
};

std::string make_unique_key();

// The cache that executions on this thread use, until the scope ends. Scopes nest.
class ActiveCache {
 public:
  explicit ActiveCache(const std::string& cache_key);
  ~ActiveCache();
  ActiveCache(const ActiveCache&) = delete;
  ActiveCache& operator=(const ActiveCache&) = delete;

 private:
  std::shared_ptr<Cache> previous_;
};

// Installs a cache under a key of its own while it lives.
template <class Face>
class CacheSession {
 public:
  CacheSession(std::string key, std::shared_ptr<Face> cache) : key_(std::move(key)), cache_(std::move(cache)) {
    CacheRegistry::global().install(key_, cache_);
  }
  ~CacheSession() {
    if (cache_) CacheRegistry::global().erase(key_);
  }
  CacheSession(CacheSession&&) noexcept = default;
  CacheSession& operator=(CacheSession&&) = delete;

  Face* operator->() const { return cache_.get(); }
  const std::string& cache_key() const { return key_; }
  // Executions on this thread use this cache while the result lives.
  ActiveCache activate() const { return ActiveCache(key_); }

 private:
  std::string key_;
  std::shared_ptr<Face> cache_;
};

// A cache of `kind`, as `Face`. Throws if the builder's cache has another face.
template <class Face>
CacheSession<Face> make_session(const std::string& backend_id, const std::string& kind, const CacheConfig& config);

CacheSession<DecodeCache> make_decode_session(const std::string& backend_id, const CacheConfig& config);
CacheSession<SeqCache> make_seq_session(const std::string& backend_id, const CacheConfig& config);
CacheSession<TreeSeqCache> make_tree_session(const std::string& backend_id, const CacheConfig& config);

template <class Face>
CacheSession<Face> make_session(const std::string& backend_id, const std::string& kind, const CacheConfig& config) {
  auto face = std::dynamic_pointer_cast<Face>(CacheBuilderRegistry::global().build(backend_id, kind, config));
  if (!face) throw std::runtime_error("the cache " + backend_id + ":" + kind + " does not have the face that was asked for");
  return CacheSession<Face>(make_unique_key(), std::move(face));
}

// Reads `kv_cache.{schema_version,n_layers,n_kv_heads,head_dim}` of a program: `constant(name)` gives the value of a constant
// method. Throws for another schema version.
ModelCacheParams read_kv_cache_metadata(const std::function<int64_t(const char*)>& constant);

// The same of an extension::Module, whose constants are methods without inputs. Throws if the program lacks one.
template <class Module>
auto read_kv_cache_metadata(Module& module) -> decltype(module.get(std::string())->toInt(), ModelCacheParams()) {
  return read_kv_cache_metadata([&module](const char* name) {
    auto value = module.get(name);
    if (!value.ok()) throw std::runtime_error(std::string("the program has no ") + name + ": it was not exported for kvcache::update_and_attend");
    return value->toInt();
  });
}

} // namespace cache
} // namespace executorch
