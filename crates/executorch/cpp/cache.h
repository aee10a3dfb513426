// One kvist cache behind the op: plans a step on the first layer of an execution and commits it after the last.
#pragma once

#include <mutex>
#include <set>

#include "kvist.h"
#include "kvist_executorch.h"

namespace executorch {
namespace cache {

// Rows of one layer, as the kernel got them: [1, heads, tokens, dim] each.
struct LayerCall {
  int layer;
  float scale;
  kvist_rows_view q, k, v, out;
  const int64_t* position; // [tokens]
  int n_tokens, n_heads;
};

// What the kernel sees of a cache.
class AttendFace {
 public:
  virtual ~AttendFace() = default;
  virtual void attend(const LayerCall& call) = 0;
};

// A step that the host has declared and no execution has used.
struct Declared {
  std::vector<int32_t> seq_ids; // per token
  std::vector<int32_t> parents; // per node; empty for plain tokens
};

// The kvist cache and the step in flight. The faces hold one; they differ in how steps are declared.
class Steps {
 public:
  Steps(const CacheConfig& config, const char* kind, const char* backend, bool many);
  ~Steps();
  Steps(const Steps&) = delete;

  // Runs a layer. `declare` gives the spans of a new step when the execution begins; `again` says whether an execution may
  // begin while an earlier one has not finished (it failed midway, and its step is dropped).
  void attend(const LayerCall& call, bool again, const std::function<Declared(int n_tokens)>& declare);
  void drop_step();

  int capacity() const { return config_.capacity; }
  int free_cells() const;
  int next_position(int32_t seq) const; // 0 if there is no such sequence
  int length(int32_t seq) const;
  void clear();
  kvist_cache* cache() const { return cache_; } // null until the first execution
  std::unique_lock<std::mutex> lock() const;

 private:
  void open(int n_heads);
  void begin(const LayerCall& call, const Declared& declared);

  CacheConfig config_;
  std::string kind_, backend_;
  bool many_;
  std::vector<kvist_layer> layers_;
  std::vector<kvist_group> groups_;
  kvist_cache* cache_ = nullptr;
  int n_heads_ = 0;
  bool in_flight_ = false;
  int n_tokens_ = 0; // of the step in flight
  std::set<int> ran_;
  std::vector<int32_t> order_; // the batch row of each row of the step; empty if they are equal
  std::vector<char> scratch_[4]; // q, k, v, out in the order of the step
  mutable std::mutex mutex_;
};

void check(kvist_status status);

// The cache that is active on this thread; throws if there is none.
AttendFace& active_cache();

} // namespace cache
} // namespace executorch
