#include "cache.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

namespace executorch {
namespace cache {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// How kvist names a storage.
std::string storage(const CacheConfig& c) {
  switch (c.kv_dtype) {
    case ScalarType::Float: return "f32";
    case ScalarType::Half: return "f16";
    case ScalarType::BFloat16: return "bf16";
    case ScalarType::Byte: break;
    default: fail("kv_dtype is no storage: use Float, Half, BFloat16, or Byte with bits and group_size");
  }
  if ((c.bits != 4 && c.bits != 8) || (c.group_size != 32 && c.group_size != 64))
    fail("codes of " + std::to_string(c.bits) + " bits in groups of " + std::to_string(c.group_size) + ": use 4 or 8 bits in groups of 32 or 64");
  return (c.bits == 4 ? "q4" : "q8") + std::string(c.group_size == 64 ? "-64" : "");
}

void check_config(const CacheConfig& c) {
  if (c.capacity <= 0 || c.n_layers <= 0 || c.n_kv_heads <= 0 || c.head_dim <= 0)
    fail("capacity, n_layers, n_kv_heads and head_dim must be positive");
  if (c.min_chunk < 0) fail("min_chunk is " + std::to_string(c.min_chunk) + ": it is a number of tokens");
  if (c.windows.size() > 1 && c.windows.size() != size_t(c.n_layers)) fail("windows has one entry, one per layer, or none");
  for (int window : c.windows)
    if (window < 0) fail("a window is negative");
  storage(c);
}

int window_of(const CacheConfig& c, int layer) {
  return c.windows.empty() ? 0 : c.windows[c.windows.size() == 1 ? 0 : size_t(layer)];
}

} // namespace

void check(kvist_status status) {
  if (status != KVIST_OK) fail(kvist_last_error());
}

CacheConfig make_config(const ModelCacheParams& model, int capacity, ScalarType kv_dtype, int min_chunk) {
  CacheConfig config;
  config.capacity = capacity;
  config.n_layers = model.n_layers;
  config.n_kv_heads = model.n_kv_heads;
  config.head_dim = model.head_dim;
  config.min_chunk = min_chunk;
  config.kv_dtype = kv_dtype;
  return config;
}

ModelCacheParams read_kv_cache_metadata(const std::function<int64_t(const char*)>& constant) {
  int64_t version = constant("kv_cache.schema_version");
  if (version != 1) fail("kv_cache.schema_version is " + std::to_string(version) + ", this reader knows 1: export the program again");
  auto read = [&](const char* name) {
    int64_t value = constant(name);
    if (value <= 0 || value > INT_MAX) fail(std::string(name) + " is " + std::to_string(value));
    return int(value);
  };
  return {read("kv_cache.n_layers"), read("kv_cache.n_kv_heads"), read("kv_cache.head_dim")};
}

Steps::Steps(const CacheConfig& config, const char* kind, const char* backend, bool many)
    : config_(config), kind_(kind), backend_(backend), many_(many) {
  check_config(config_);
  // Layers with the same window share a cell space.
  std::vector<int> windows;
  for (int l = 0; l < config_.n_layers; l++) {
    int window = window_of(config_, l);
    auto found = std::find(windows.begin(), windows.end(), window);
    kvist_layer layer{};
    layer.group = uint16_t(found - windows.begin());
    if (found == windows.end()) windows.push_back(window);
    layer.owner = uint16_t(l);
    layer.n_kv_heads = uint32_t(config_.n_kv_heads);
    layer.head_dim = uint32_t(config_.head_dim);
    layers_.push_back(layer);
  }
  bool all_windowed = std::find(windows.begin(), windows.end(), 0) == windows.end();
  // One sequence whose layers all forget: a ring takes constant memory.
  if (kind_ == "contiguous" && all_windowed && windows.size() == 1) kind_ = "ring";
  for (int window : windows) groups_.push_back(kvist_group{uint32_t(config_.capacity), uint32_t(window), 0});
  if (config_.max_step_tokens <= 0) config_.max_step_tokens = std::min(config_.capacity, 2048);
  // A configuration that cannot be built fails now, although the number of query heads is known only when a program runs.
  open(config_.n_kv_heads);
  check(kvist_cache_free(cache_));
  cache_ = nullptr;
}

Steps::~Steps() { kvist_cache_free(cache_); }

void Steps::open(int n_heads) {
  std::string dtype = storage(config_);
  kvist_cache_options options{};
  options.kind = kind_.c_str();
  options.backend = backend_.c_str();
  options.k = dtype.c_str();
  options.layers = layers_.data();
  options.n_layers = layers_.size();
  options.groups = groups_.data();
  options.n_groups = groups_.size();
  options.n_heads = uint32_t(n_heads);
  options.max_step_tokens = uint32_t(config_.max_step_tokens);
  options.threads = uint32_t(config_.threads);
  options.min_chunk_tokens = uint32_t(config_.min_chunk);
  check(kvist_cache_new(&options, &cache_));
  n_heads_ = n_heads;
}

std::unique_lock<std::mutex> Steps::lock() const {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock) fail("the cache is in use by another thread: one at a time");
  return lock;
}

void Steps::drop_step() {
  if (in_flight_) check(kvist_step_drop(cache_));
  in_flight_ = false;
}

int Steps::free_cells() const {
  if (!cache_) return config_.capacity;
  if (kind_ == "ring") return config_.capacity; // overwrites what left the window
  int fewest = INT_MAX;
  for (size_t g = 0; g < groups_.size(); g++) {
    kvist_occupancy occupancy;
    check(kvist_cache_occupancy(cache_, uint32_t(g), &occupancy));
    fewest = std::min(fewest, int(occupancy.capacity_cells - occupancy.used_cells));
  }
  return fewest;
}

int Steps::next_position(int32_t seq) const {
  uint32_t length, next;
  if (!cache_ || kvist_cache_length(cache_, uint32_t(seq), &length, &next) != KVIST_OK) return 0;
  return int(next);
}

int Steps::length(int32_t seq) const {
  uint32_t length, next;
  if (!cache_ || kvist_cache_length(cache_, uint32_t(seq), &length, &next) != KVIST_OK) return 0;
  return int(length);
}

void Steps::clear() {
  drop_step();
  if (cache_) check(kvist_cache_clear(cache_));
}

void Steps::begin(const LayerCall& call, const Declared& declared) {
  size_t n = size_t(call.n_tokens);
  // A span per sequence, in order of appearance: the rows of a span follow each other.
  std::vector<int32_t> seqs;
  std::vector<std::vector<int32_t>> rows;
  for (size_t i = 0; i < n; i++) {
    auto found = std::find(seqs.begin(), seqs.end(), declared.seq_ids[i]);
    size_t span = size_t(found - seqs.begin());
    if (found == seqs.end()) seqs.push_back(declared.seq_ids[i]), rows.emplace_back();
    rows[span].push_back(int32_t(i));
  }
  std::vector<kvist_span> spans;
  order_.clear();
  for (size_t s = 0; s < seqs.size(); s++) {
    int64_t start = call.position[rows[s][0]];
    if (start < 0 || start > INT_MAX) fail("a position is " + std::to_string(start));
    spans.push_back(kvist_span{uint32_t(seqs[s]), uint32_t(start), uint32_t(rows[s].size()), nullptr});
    order_.insert(order_.end(), rows[s].begin(), rows[s].end());
  }
  if (!declared.parents.empty()) spans[0].parents = declared.parents.data();
  if (spans[0].parents) spans[0].start = uint32_t(next_position(seqs[0])); // nodes continue the committed end
  std::vector<uint32_t> opened;
  for (int32_t seq : seqs) {
    uint32_t length, next;
    if (many_ && kvist_cache_length(cache_, uint32_t(seq), &length, &next) == KVIST_REFUSED) {
      check(kvist_cache_open(cache_, uint32_t(seq)));
      opened.push_back(uint32_t(seq));
    }
  }
  try {
    check(kvist_step_begin(cache_, spans.data(), spans.size()));
    in_flight_ = true;
    const uint32_t* expected;
    size_t n_expected;
    check(kvist_step_positions(cache_, &expected, &n_expected));
    for (size_t i = 0; i < n; i++) {
      int64_t given = call.position[order_[i]];
      if (given != int64_t(expected[i]))
        fail("token " + std::to_string(order_[i]) + " is given position " + std::to_string(given) + ", and the cache expects " + std::to_string(expected[i]));
    }
  } catch (...) {
    // A sequence that only this step would have begun is not left behind, empty.
    kvist_step_drop(cache_);
    in_flight_ = false;
    for (uint32_t seq : opened) kvist_cache_remove(cache_, seq, 0, UINT32_MAX);
    throw;
  }
  if (std::is_sorted(order_.begin(), order_.end())) order_.clear();
  n_tokens_ = call.n_tokens;
  ran_.clear();
}

namespace {

size_t element_bytes(const kvist_rows_view& view) { return view.dtype == KVIST_F32 ? 4 : 2; }

// Copies rows between the order of the batch and that of the step, which is [tokens, heads, dim].
template <class Copy>
void each_row(const kvist_rows_view& view, const std::vector<int32_t>& order, std::vector<char>& scratch, Copy copy) {
  size_t bytes = element_bytes(view), row = size_t(view.sizes[3]) * bytes;
  char* to = scratch.data();
  for (int32_t token : order)
    for (int64_t head = 0; head < view.sizes[2]; head++, to += row)
      copy(static_cast<char*>(view.data) + size_t(token * view.strides[1] + head * view.strides[2]) * bytes, to, row);
}

kvist_rows_view gathered(const kvist_rows_view& view, std::vector<char>& scratch) {
  scratch.resize(size_t(view.sizes[1] * view.sizes[2] * view.sizes[3]) * element_bytes(view));
  kvist_rows_view rows = view;
  rows.data = scratch.data();
  rows.strides[0] = 0, rows.strides[1] = view.sizes[2] * view.sizes[3], rows.strides[2] = view.sizes[3], rows.strides[3] = 1;
  return rows;
}

} // namespace

void Steps::attend(const LayerCall& call, bool again, const std::function<Declared(int)>& declare) {
  if (call.layer < 0 || call.layer >= config_.n_layers)
    fail("layer " + std::to_string(call.layer) + " does not exist: the cache has " + std::to_string(config_.n_layers));
  if (call.k.sizes[2] != config_.n_kv_heads || call.k.sizes[3] != config_.head_dim || call.v.sizes[3] != config_.head_dim)
    fail("the program has " + std::to_string(call.k.sizes[2]) + " KV heads of " + std::to_string(call.k.sizes[3]) + " and " +
         std::to_string(call.v.sizes[3]) + " elements, the cache " + std::to_string(config_.n_kv_heads) + " of " + std::to_string(config_.head_dim));
  if (cache_ && n_heads_ != call.n_heads)
    fail("the program has " + std::to_string(call.n_heads) + " query heads, the cache was made for " + std::to_string(n_heads_));
  if (!cache_) open(call.n_heads);
  if (in_flight_ && ran_.count(call.layer)) {
    if (!again) fail("layer " + std::to_string(call.layer) + " served twice for one step: begin_step must precede every execution");
    drop_step();
  }
  if (!in_flight_) begin(call, declare(call.n_tokens));
  if (call.n_tokens != n_tokens_)
    fail("layer " + std::to_string(call.layer) + " has " + std::to_string(call.n_tokens) + " tokens, the step " + std::to_string(n_tokens_));
  kvist_attend attend{};
  attend.layer = uint32_t(call.layer);
  attend.scale = call.scale;
  attend.q = call.q, attend.k = call.k, attend.v = call.v, attend.out = call.out;
  if (!order_.empty()) {
    kvist_rows_view* views[4] = {&attend.q, &attend.k, &attend.v, &attend.out};
    for (int i = 0; i < 4; i++) {
      kvist_rows_view rows = gathered(*views[i], scratch_[i]);
      if (i < 3) each_row(*views[i], order_, scratch_[i], [](char* row, char* to, size_t n) { memcpy(to, row, n); });
      *views[i] = rows;
    }
  }
  check(kvist_step_attend(cache_, &attend));
  if (!order_.empty()) each_row(call.out, order_, scratch_[3], [](char* row, char* from, size_t n) { memcpy(row, from, n); });
  ran_.insert(call.layer);
  if (ran_.size() == layers_.size()) {
    check(kvist_step_commit(cache_, nullptr, 0));
    in_flight_ = false;
  }
}

namespace {

class KvistDecode final : public DecodeCache, public AttendFace {
 public:
  KvistDecode(const CacheConfig& config, const char* backend) : steps_(config, "contiguous", backend, false) {}
  bool can_extend(int n) const override {
    auto lock = steps_.lock();
    return n <= steps_.free_cells();
  }
  int capacity() const override { return steps_.capacity(); }
  void clear() override {
    auto lock = steps_.lock();
    steps_.clear();
  }
  int len() const override {
    auto lock = steps_.lock();
    return steps_.next_position(0);
  }
  void rewind(int new_len) override {
    auto lock = steps_.lock();
    steps_.drop_step();
    if (new_len < 0 || (!steps_.cache() && new_len > 0)) fail("rewind can only shorten the sequence");
    if (steps_.cache()) check(kvist_cache_truncate(steps_.cache(), 0, uint32_t(new_len)));
  }
  void attend(const LayerCall& call) override {
    auto lock = steps_.lock();
    steps_.attend(call, true, [](int n) { return Declared{std::vector<int32_t>(size_t(n), 0), {}}; });
  }

 private:
  Steps steps_;
};

// The verbs of sequences, for both faces that have them.
template <class Face>
class Sequences : public Face, public AttendFace {
 public:
  Sequences(const CacheConfig& config, const char* kind, const char* backend) : steps_(config, kind, backend, true) {}
  bool can_extend(int n) const override {
    auto lock = steps_.lock();
    return n <= steps_.free_cells();
  }
  int capacity() const override { return steps_.capacity(); }
  void clear() override {
    auto lock = steps_.lock();
    steps_.clear();
    declared_ = {};
  }
  void begin_step(const int32_t* seq_id, int n_tok) override {
    auto lock = steps_.lock();
    if (n_tok <= 0) fail("a step carries at least one token");
    for (int i = 0; i < n_tok; i++)
      if (seq_id[i] < 0) fail("a sequence is " + std::to_string(seq_id[i]));
    steps_.drop_step();
    if (n_tok > steps_.free_cells())
      fail("the cache is full: " + std::to_string(n_tok) + " tokens need as many cells, " + std::to_string(steps_.free_cells()) + " are free");
    declared_ = {std::vector<int32_t>(seq_id, seq_id + n_tok), {}};
  }
  void seq_cp(int32_t src, int32_t dst, int p0, int p1) override {
    change([&](kvist_cache* cache) { return kvist_cache_copy(cache, uint32_t(src), uint32_t(dst), uint32_t(p0), end_of(p1)); }, src);
  }
  void seq_rm(int32_t seq, int p0, int p1) override {
    change([&](kvist_cache* cache) { return kvist_cache_remove(cache, uint32_t(seq), uint32_t(p0), end_of(p1)); }, seq);
  }
  void seq_keep(int32_t seq) override {
    change([&](kvist_cache* cache) { return kvist_cache_keep(cache, uint32_t(seq), 0, UINT32_MAX); }, seq);
  }
  int seq_len(int32_t seq) const override {
    auto lock = steps_.lock();
    return steps_.length(seq);
  }

 protected:
  // Changes sequences between steps. A step that has begun is dropped; what is declared stays declared.
  template <class Change>
  void change(Change change, int32_t seq) {
    auto lock = steps_.lock();
    if (seq < 0) fail("a sequence is " + std::to_string(seq));
    steps_.drop_step();
    if (!steps_.cache()) fail("there is no sequence " + std::to_string(seq) + " yet");
    check(change(steps_.cache()));
  }
  static uint32_t end_of(int p1) { return p1 == INT_MAX ? UINT32_MAX : uint32_t(p1); }

  // The declaration, once.
  Declared take(int n) {
    Declared declared = std::move(declared_);
    declared_ = {};
    if (declared.seq_ids.empty()) fail("no step is declared: begin_step must precede every execution");
    if (declared.seq_ids.size() != size_t(n))
      fail(std::to_string(declared.seq_ids.size()) + " tokens were declared, the execution carries " + std::to_string(n));
    return declared;
  }

  Steps steps_;
  Declared declared_;
};

class KvistSeq final : public Sequences<SeqCache> {
 public:
  KvistSeq(const CacheConfig& config, const char* backend) : Sequences(config, "cells", backend) {}
  void attend(const LayerCall& call) override {
    auto lock = steps_.lock();
    steps_.attend(call, false, [this](int n) { return take(n); });
  }
};

class KvistTree final : public Sequences<TreeSeqCache> {
 public:
  KvistTree(const CacheConfig& config, const char* backend) : Sequences(config, "tree", backend) {}
  void propose(const int32_t* parents, int n) override {
    auto lock = steps_.lock();
    if (n <= 0) fail("a proposal has at least one node");
    steps_.drop_step();
    if (n > steps_.free_cells())
      fail("the cache is full: " + std::to_string(n) + " nodes need as many cells, " + std::to_string(steps_.free_cells()) + " are free");
    declared_ = {std::vector<int32_t>(size_t(n), 0), std::vector<int32_t>(parents, parents + n)};
  }
  void commit(const int32_t* accepted, int len) override {
    std::vector<uint32_t> path;
    for (int i = 0; i < len; i++) {
      if (accepted[i] < 0) fail("an accepted node is " + std::to_string(accepted[i]));
      path.push_back(uint32_t(accepted[i]));
    }
    change([&](kvist_cache* cache) { return kvist_cache_accept(cache, 0, path.data(), path.size()); }, 0);
  }
  void attend(const LayerCall& call) override {
    auto lock = steps_.lock();
    // Without a declaration the tokens continue sequence 0.
    steps_.attend(call, true, [this](int n) {
      return declared_.seq_ids.empty() ? Declared{std::vector<int32_t>(size_t(n), 0), {}} : take(n);
    });
  }
};

struct Named {
  mutable std::mutex mutex;
  std::map<std::string, std::shared_ptr<Cache>> caches;
  std::map<std::string, CacheBuilder> builders;
};

Named& named() {
  static Named named;
  return named;
}

thread_local std::shared_ptr<Cache> active;

template <class Kind>
CacheBuilder builder(const char* backend) {
  return [backend](const CacheConfig& config) { return std::make_shared<Kind>(config, backend); };
}

const bool registered = [] {
  auto& builders = CacheBuilderRegistry::global();
  for (auto [id, backend] : {std::pair("kvist", "cpu"), std::pair("kvist-reference", "reference")}) {
    builders.register_builder(id, "contiguous", builder<KvistDecode>(backend));
    builders.register_builder(id, "seq", builder<KvistSeq>(backend));
    builders.register_builder(id, "tree", builder<KvistTree>(backend));
  }
  return true;
}();

} // namespace

CacheRegistry& CacheRegistry::global() {
  static CacheRegistry registry;
  return registry;
}

void CacheRegistry::install(const std::string& key, std::shared_ptr<Cache> cache) {
  std::lock_guard<std::mutex> lock(named().mutex);
  if (!named().caches.emplace(key, std::move(cache)).second) fail("a cache is installed as " + key + " already");
}

std::shared_ptr<Cache> CacheRegistry::get(const std::string& key) const {
  std::lock_guard<std::mutex> lock(named().mutex);
  auto found = named().caches.find(key);
  return found == named().caches.end() ? nullptr : found->second;
}

void CacheRegistry::erase(const std::string& key) {
  std::shared_ptr<Cache> last; // freed outside of the lock
  std::lock_guard<std::mutex> lock(named().mutex);
  auto found = named().caches.find(key);
  if (found == named().caches.end()) return;
  last = std::move(found->second);
  named().caches.erase(found);
}

CacheBuilderRegistry& CacheBuilderRegistry::global() {
  static CacheBuilderRegistry registry;
  return registry;
}

void CacheBuilderRegistry::register_builder(const std::string& backend_id, const std::string& kind, CacheBuilder builder) {
  std::lock_guard<std::mutex> lock(named().mutex);
  named().builders[backend_id + ":" + kind] = std::move(builder);
}

std::shared_ptr<Cache> CacheBuilderRegistry::build(const std::string& backend_id, const std::string& kind, const CacheConfig& config) const {
  CacheBuilder builder;
  {
    std::lock_guard<std::mutex> lock(named().mutex);
    auto found = named().builders.find(backend_id + ":" + kind);
    if (found == named().builders.end()) {
      std::string known;
      for (auto& [pair, _] : named().builders) known += (known.empty() ? "" : ", ") + pair;
      fail("there is no cache " + backend_id + ":" + kind + "; there are " + known);
    }
    builder = found->second;
  }
  return builder(config);
}

std::string make_unique_key() {
  static std::atomic<uint64_t> next{0};
  return "cache-" + std::to_string(next++);
}

ActiveCache::ActiveCache(const std::string& cache_key) : previous_(active) {
  auto cache = CacheRegistry::global().get(cache_key);
  if (!cache) fail("no cache is installed as " + cache_key);
  active = std::move(cache);
}

ActiveCache::~ActiveCache() { active = std::move(previous_); }

AttendFace& active_cache() {
  if (!active) fail("no cache is active on this thread: keep the result of CacheSession::activate while the program runs");
  auto* face = dynamic_cast<AttendFace*>(active.get());
  if (!face) fail("the active cache does not serve kvcache::update_and_attend");
  return *face;
}

CacheSession<DecodeCache> make_decode_session(const std::string& backend_id, const CacheConfig& config) {
  return make_session<DecodeCache>(backend_id, "contiguous", config);
}

CacheSession<SeqCache> make_seq_session(const std::string& backend_id, const CacheConfig& config) {
  return make_session<SeqCache>(backend_id, "seq", config);
}

CacheSession<TreeSeqCache> make_tree_session(const std::string& backend_id, const CacheConfig& config) {
  return make_session<TreeSeqCache>(backend_id, "tree", config);
}

} // namespace cache
} // namespace executorch
