/* kvist for C: models, sessions, batches of many texts, and the cache alone.
 *
 * Made by cbindgen from crates/capi; do not edit. docs/c.md explains how to use it.
 *
 * Errors. Functions return a kvist_status. Where it is not KVIST_OK, kvist_last_error has a text for the calling thread, and
 * nothing has changed unless the function says otherwise. No function unwinds into C.
 *
 * Handles. kvist_model, kvist_session, kvist_batch, kvist_job and kvist_cache are opaque. Whatever a *_new, *_open or *_submit function
 * gave is freed by the *_free function of its type, once.
 *
 * Threads. A handle may be used from any thread. A model or a batch may be used by any number of threads at once. A session, a job or a
 * cache is used by one call at a time: a second thread that calls with it meanwhile, or a callback that does, gets KVIST_BUSY; but any
 * thread may cancel a job. Freeing a handle while another thread begins a call with it is a defect of the caller.
 *
 * Pointers that functions give are valid until the next call with the same handle, unless they say otherwise. Strings are UTF-8.
 */

#ifndef KVIST_H
#define KVIST_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// Most tiers that a batch can have.
#define KVIST_MAX_TIERS 4

// For timeouts: wait until there is something.
#define KVIST_FOREVER 4294967295

// A figure that a tier does not tell.
#define KVIST_UNKNOWN 18446744073709551615ull

// What became of a call. Every function returns one, unless it says otherwise. Where it is not `KVIST_OK`,
// `kvist_last_error` has a text, and nothing has changed unless the function says otherwise.
enum kvist_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // The call did what it says.
  KVIST_OK = 0,
  // An argument is null, not UTF-8, out of range, or does not fit the others.
  KVIST_INVALID_ARGUMENT = 1,
  // Another thread, or a callback further up on this one, is using the handle. Or as many texts wait in a batch as may.
  KVIST_BUSY = 2,
  // A model's files cannot be read, or kvist does not support the model.
  KVIST_BAD_MODEL = 3,
  // The memory budget or the system refuses the memory.
  KVIST_OUT_OF_MEMORY = 4,
  // The cache has no room for the tokens. Remove or shorten sequences, or add fewer tokens at once.
  KVIST_CACHE_FULL = 5,
  // The cache refuses the request: a sequence that does not exist, a gap, a path that is no chain.
  KVIST_REFUSED = 6,
  // The call came at the wrong time: without a step, during one, or a layer out of order.
  KVIST_WRONG_ORDER = 7,
  // This kind of cache, backend or model does not support the call.
  KVIST_UNSUPPORTED = 8,
  // A callback stopped the call. What had been computed until then stays in the cache. Or a job was ended because no handle reads it.
  KVIST_STOPPED = 9,
  // A defect of kvist. The handle of the call can only be freed.
  KVIST_INTERNAL_ERROR = 10,
  // A saved session or a frozen prefix cannot be read or written, is torn, has changed, or was made with something else.
  // Nothing of it is used. Or the directory of a tier cannot be used.
  KVIST_BAD_FILE = 11,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvist_status kvist_status;
#else
typedef int32_t kvist_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Why a text has ended, or that it has not.
enum kvist_finish
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // The text goes on.
  KVIST_GOES_ON = 0,
  // The model ended it.
  KVIST_END_OF_TEXT = 1,
  // A stop string was generated. It is not part of the text.
  KVIST_STOP_STRING = 2,
  // `max_tokens` were generated.
  KVIST_MAX_TOKENS = 3,
  // The cache has no room for another token.
  KVIST_NO_ROOM = 4,
  // The job was cancelled, or its batch was freed.
  KVIST_CANCELLED = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvist_finish kvist_finish;
#else
typedef int32_t kvist_finish;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Which rows of a pass get logits.
typedef enum kvist_rows {
  // None.
  KVIST_NO_ROWS = 0,
  // The last token of every input.
  KVIST_LAST_ROWS = 1,
  // Every token.
  KVIST_ALL_ROWS = 2,
} kvist_rows;

// Elements of rows in the caller's memory.
typedef enum kvist_dtype {
  // 32-bit floats.
  KVIST_F32 = 0,
  // 16-bit floats of IEEE 754.
  KVIST_F16 = 1,
  // The upper halves of 32-bit floats.
  KVIST_BF16 = 2,
} kvist_dtype;

// Which tokens of a span a commit keeps.
typedef enum kvist_keep {
  // All; the nodes of a draft tree stay speculative, where nodes outlive their step.
  KVIST_KEEP_ALL = 0,
  // The first `n` of a chain.
  KVIST_KEEP_FIRST = 1,
  // A path of `n` nodes of the draft tree.
  KVIST_KEEP_PATH = 2,
} kvist_keep;

// A model that serves many texts at a time, in a thread of its own: continuous batching, chunked prefill, and a paged cache whose prefix
// index shares equal beginnings. Any number of threads may use it at once. Its jobs outlive it.
typedef struct kvist_batch kvist_batch;

// A cache without a model: which cell holds which token, and with a backend also the K and V, with attention over them. At
// most one step is in flight; everything else waits until it is committed or dropped. A second thread that uses the cache at
// the same time gets `KVIST_BUSY`. Kinds with one sequence call it 0; the others start without sequences.
typedef struct kvist_cache kvist_cache;

// A text that a batch generates. One thread reads it at a time; any thread may cancel it meanwhile.
typedef struct kvist_job kvist_job;

// A loaded model. It never changes, so any number of threads may use it at once, and sessions keep what they need of it:
// it may be freed before them.
typedef struct kvist_model kvist_model;

// The beginning of texts with its K and V, in a file or in memory. Any number of threads may use it at once, and sessions and batches
// keep what they need of it: it may be freed before them. A file must not change as long as one of them uses it.
typedef struct kvist_prefix kvist_prefix;

// A model with a cache of its own, for one sequence or a batch of them. Different sessions may be used by different threads
// at once; a second thread that uses this one meanwhile gets `KVIST_BUSY`. Kinds with one sequence call it 0; in the others,
// sequence 0 exists from the start.
typedef struct kvist_session kvist_session;

// Drafts: tokens are proposed, and several are verified in one pass. The texts stay the same; they come sooner where proposals are right
// (docs/speculation.md). All zeros and nulls are none.
typedef struct kvist_draft_options {
  // What proposes: "auto" (as much as pays off), "ngram", "suffix", "draft" (a smaller model) or "eagle" (a head). Null or "off" is
  // nothing, and then the other fields are zero and null.
  const char *speculate;
  // For "draft" and "auto": a model with the same vocabulary. Its cache is in its own memory; it may be freed before the session or batch.
  // Null is the embedded model's own with "draft", if that is the target.
  const struct kvist_model *draft_model;
  // For "eagle" and "auto": the folder of a head that was trained for the model, with config.json and safetensors. It is loaded for this
  // session or batch alone, in the memory of its model. Null is the embedded model's own with "eagle", if that is the target.
  const char *draft_head;
  // Most tokens of a draft; 0 is 16.
  uint32_t draft_tokens;
  // Most tokens on a path of it; 0 is 8, and 5 with "draft".
  uint32_t draft_depth;
  // Most continuations of the same token; 0 is 4, and 1 with "draft". 1 drafts chains, which every kind verifies; trees need "tree" or
  // "paged".
  uint32_t draft_width;
} kvist_draft_options;

// How a batch stores K and V, what it computes at once, and the tiers below its cache. All zeros and nulls are the defaults.
typedef struct kvist_batch_options {
  // How K is stored, as in `kvist_session_options`; null is "f16", or as in the file of `prefix`.
  const char *k;
  // How V is stored; null is as K.
  const char *v;
  // Tokens that the cache holds, over all texts; 0 is 8192.
  uint32_t context_tokens;
  // Positions that a query sees, in addition to the model's own windows; 0 is all.
  uint32_t window;
  // First positions that stay visible outside of the window.
  uint32_t sinks;
  // Sequences of the largest step; 0 is 32.
  uint32_t max_batch;
  // Tokens of the largest step; longer prompts are read in chunks. 0 is 512, and over CUDA 1024.
  uint32_t batch_tokens;
  // Tokens of a block of the cache; 0 is 16.
  uint32_t block_tokens;
  // Order of the queue: "fcfs" (null), "sjf", "srpt", "edf", "laxity" or "priority".
  const char *policy;
  // Texts that may wait; more are refused with `KVIST_BUSY`. 0 is 4096.
  size_t max_queue;
  // Do not share equal beginnings of prompts.
  bool no_prefix_index;
  // A prefix that is in the prefix index from the start, in whole blocks, and stays there; null is none.
  const struct kvist_prefix *prefix;
  // Which tokens stay of each text, as in `kvist_session_options`; null keeps all. A text may be longer than the cache then. There is no
  // prefix index: texts share nothing. Not with `prefix` and tiers.
  const char *keep;
  // Bytes of this machine's memory for blocks that the cache evicts; 0 is no such tier. On a CPU a larger `context_tokens` does the same
  // without copies.
  uint64_t tier_ram_bytes;
  // Store blocks there as q8, half of what f16 takes. What is loaded is rounded, so texts can differ.
  bool tier_ram_packed;
  // A directory for blocks, which is created if it is missing; null is no such tier. What it has is found again by later processes. One
  // batch at a time uses it. `KVIST_UNSUPPORTED` in a library that was built without its feature "disk-tier".
  const char *tier_disk_dir;
  // What the directory takes, all of it at once: at least 128 MiB.
  uint64_t tier_disk_bytes;
  // The URL of a store that several machines share: redis://HOST:6379/PREFIX, s3://BUCKET/PREFIX?region=REGION or fs:///PATH; null is
  // none. `KVIST_UNSUPPORTED` in a library that was built without its feature "shared-tier".
  const char *tier_store;
  // Copy blocks to the tiers shortly before they are evicted. Otherwise they are copied as soon as they are computed.
  bool tier_write_back;
  // Load all that a tier has. Otherwise what comes sooner than it would be computed.
  bool tier_load_always;
  // Milliseconds that a text waits for a tier to say what it has. A load may take this much longer than four times its estimate; then
  // its tokens are computed. An operation of a disk or a shared store has as long, 2 s at least and 50 s at most. 0 is 250.
  uint32_t tier_grace_ms;
  // Drafts: a step verifies whole ones of up to eight texts, and less for each of more. Not with `keep`.
  struct kvist_draft_options drafts;
} kvist_batch_options;

// How a text is generated. `kvist_greedy` gives a valid one to start from.
typedef struct kvist_text_options {
  // 0 takes the most likely token.
  float temperature;
  // Keep the K most likely tokens; 0 keeps all.
  uint32_t top_k;
  // Keep the most likely tokens that together reach this probability; 1 keeps all.
  float top_p;
  // Drop tokens less likely than this share of the most likely one; 0 drops none.
  float min_p;
  // Divides the logits of tokens that the text has already; 1 is off.
  float repetition_penalty;
  // The same seed and options give the same text.
  uint64_t seed;
  // Tokens to generate at most; 0 is no limit.
  uint32_t max_tokens;
  // Go on after tokens that end a text.
  bool ignore_end;
  // `n_stop` strings that end the text; null if `n_stop` is 0.
  const char *const *stop;
  // Number of stop strings.
  size_t n_stop;
  // Called after every chunk of the prompt, with the tokens read so far and those of the prompt. 0 stops the prompt. Null
  // is never called. It must not use the session. Batches never call it.
  int (*progress)(void *user, size_t done, size_t total);
  // Passed to `progress`.
  void *user;
} kvist_text_options;

// What a text asks of its batch. All zeros and nulls are the defaults.
typedef struct kvist_job_options {
  // How the text is generated; null is as `kvist_greedy`. Without `max_tokens` it ends when the cache is full.
  const struct kvist_text_options *text;
  // Only prompts with the same salt share cached beginnings; null is "". `kvist_batch_forget` drops what a salt has.
  const char *salt;
  // Larger is more urgent, with the policy "priority".
  int32_t priority;
  // Seconds that the prompt stays in the cache after its text has ended, in whole blocks, at most 2592000 (30 days); 0 retains nothing.
  double retain_s;
  // Of retained prompts a smaller priority gives way first when room is short. Needs `retain_s`.
  uint8_t retain_priority;
  // The retained prompt gives way last, and only to a text that could not be generated otherwise. Needs `retain_s`.
  bool retain_pin;
} kvist_job_options;

// The next token of a text.
typedef struct kvist_piece {
  // The token; only if `has_token`.
  uint32_t token;
  // Whether there is a token. At the end of a text there may be none.
  bool has_token;
  // Whether the text has ended, and why.
  kvist_finish finish;
  // Text that is now final, in UTF-8, `text_bytes` long and followed by a zero byte: whole characters, no part of a stop
  // string. Often empty. Never null; valid until the next call with this session or job.
  const char *text;
  // Length of `text`.
  size_t text_bytes;
} kvist_piece;

// What is known of a job, as of its last `kvist_job_next`.
typedef struct kvist_job_info {
  // Tokens of the prompt.
  uint32_t prompt_tokens;
  // Tokens of the text that `kvist_job_next` has returned.
  uint32_t text_tokens;
  // Whether the batch has begun with it. Before, the figures below are 0.
  bool has_begun;
  // Tokens of the prompt that were not computed: the prefix index or a tier had them.
  uint32_t cached_tokens;
  // Those of them that came from each tier, in the order of `kvist_batch_stats.tiers`.
  uint32_t loaded_tokens[KVIST_MAX_TIERS];
} kvist_job_info;

// What a tier holds, and what happened to it.
typedef struct kvist_tier_stats {
  // "ram", "disk", "redis", "s3" or "fs"; null-terminated.
  char name[16];
  // Bytes that it holds, and that it can hold; `KVIST_UNKNOWN` if it does not tell.
  uint64_t bytes;
  uint64_t capacity_bytes;
  // Tokens that came from it.
  uint64_t loaded_tokens;
  // Operations that failed.
  uint64_t errors;
  // Blocks that were not written to it, because too much was on its way.
  uint64_t unwritten_blocks;
  // Blocks that were found damaged, evicted, or older than their time, and dropped.
  uint64_t damaged_blocks;
  uint64_t evicted_blocks;
  uint64_t expired_blocks;
} kvist_tier_stats;

// Counters since the start, and occupancy at the end of the last step. Cells hold a token each.
typedef struct kvist_batch_stats {
  // Texts that are computed, and that wait.
  size_t running;
  size_t waiting;
  // Cells of the cache, and of them those that texts use, those that are cached for later prompts, and those that are free.
  uint64_t capacity_cells;
  uint64_t used_cells;
  uint64_t evictable_cells;
  uint64_t free_cells;
  // Blocks that the prefix index stored, and that were evicted from it.
  uint64_t stored_blocks;
  uint64_t evicted_blocks;
  // Tokens of prompts that stay because of `retain_s`.
  uint64_t retained_tokens;
  // Of recent prompts: their tokens, and those that the prefix index had.
  uint64_t recent_prompt_tokens;
  uint64_t recent_hit_tokens;
  // Tokens that `keep` has removed.
  uint64_t removed_tokens;
  // Bytes reserved for K and V, and bytes that attention has read.
  uint64_t kv_bytes;
  uint64_t kv_bytes_read;
  // Seconds spent in steps.
  double busy_s;
  // Number of tiers. The figures below are 0 without them.
  size_t n_tiers;
  // Of each tier, the fastest first.
  struct kvist_tier_stats tiers[KVIST_MAX_TIERS];
  // Loads that began, and of them those that failed or were late.
  uint64_t loads;
  uint64_t failed_loads;
  uint64_t late_loads;
  // Tokens of such loads, which were computed.
  uint64_t wasted_tokens;
  // Tokens that a tier had and that were computed because that was expected to be faster.
  uint64_t declined_tokens;
  // Loaded tokens of preempted texts, which had lost them.
  uint64_t regained_tokens;
  // Seconds that loads took.
  double load_s;
  // Blocks that were copied out of the cache for the tiers, that could not be copied, and that were left out because too much was on
  // its way.
  uint64_t copied_blocks;
  uint64_t failed_blocks;
  uint64_t skipped_blocks;
  // Bytes on their way from and to the tiers now.
  uint64_t load_bytes;
  uint64_t store_bytes;
} kvist_batch_stats;

// What speculation has achieved.
typedef struct kvist_speculation {
  // Passes that gave tokens; in a batch a pass counts once for each text in it.
  uint64_t target_passes;
  // Passes of them that verified a draft.
  uint64_t drafts;
  // Draft tokens that were verified, and of them those that were accepted.
  uint64_t drafted_tokens;
  uint64_t accepted_tokens;
  // A drafter has failed: texts go on without drafts.
  bool has_failed;
} kvist_speculation;

// Rows in the caller's memory: a tensor with the sizes and strides that PyTorch and DLPack give it, its axes in the order
// batch, tokens, heads, elements. Strides count elements and are not negative. The elements of a row are contiguous.
typedef struct kvist_rows_view {
  // The first element, aligned to its dtype.
  void *data;
  // A `kvist_dtype`.
  uint32_t dtype;
  // Batch, tokens, heads, elements of a row. Batch × tokens is the number of tokens of the step: entry 0 first.
  int64_t sizes[4];
  // As sizes. Those of `out` must keep its rows apart; others may be 0.
  int64_t strides[4];
} kvist_rows_view;

// One layer of a step.
typedef struct kvist_attend {
  // The layer, from 0.
  uint32_t layer;
  // Multiplies every score; usually 1/sqrt(head_dim).
  float scale;
  // Scores become cap × tanh(score / cap); 0 is off.
  float softcap;
  // `n_heads` scores of attention sinks that take part in the softmax and add nothing; null for none.
  const float *sinks;
  // Queries: `n_heads` rows per token.
  struct kvist_rows_view q;
  // Keys after RoPE: `n_kv_heads` rows per token. Ignored for a layer that borrows.
  struct kvist_rows_view k;
  // Values, as keys.
  struct kvist_rows_view v;
  // The result, as `q`, rounded to its dtype. It must not overlap the others.
  struct kvist_rows_view out;
} kvist_attend;

// One decoder layer.
typedef struct kvist_layer {
  // The layer group whose cells it reads: layers with the same window share one.
  uint16_t group;
  // The layer whose K and V it reads: itself, or a lower one of the same group.
  uint16_t owner;
  // Heads of K and V.
  uint32_t n_kv_heads;
  // Elements of a row of Q, K and V.
  uint32_t head_dim;
} kvist_layer;

// One group of layers, with a cell space of its own.
typedef struct kvist_group {
  // Tokens that it holds over all sequences. A ring computes its own number.
  uint32_t capacity_tokens;
  // Positions that a query sees, its own included; 0 is all.
  uint32_t window;
  // First positions that stay visible outside of the window.
  uint32_t sinks;
} kvist_group;

// What a cache is made of.
typedef struct kvist_cache_options {
  // "contiguous", "ring", "cells", "tree" or "paged".
  const char *kind;
  // "cpu" or "reference" for attention over K and V that the cache stores; null for bookkeeping alone.
  const char *backend;
  // How K is stored: as in `kvist_session_options`. With a backend only.
  const char *k;
  // How V is stored; null is as K. With a backend only.
  const char *v;
  // `n_layers` layers.
  const struct kvist_layer *layers;
  // At least 1.
  size_t n_layers;
  // `n_groups` layer groups.
  const struct kvist_group *groups;
  // At least 1.
  size_t n_groups;
  // Heads of Q, a multiple of every layer's KV heads. With a backend only.
  uint32_t n_heads;
  // Tokens of the largest step; 0 is 256.
  uint32_t max_step_tokens;
  // Threads that compute; 0 is one per core, shared with everything else that says 0.
  uint32_t threads;
  // Bytes that K, V and scratch may take; 0 is no limit.
  uint64_t memory_bytes;
  // Tokens by which the memory of K and V grows at least, up to the capacity: a power of two (others are rounded up), 256 or
  // more; 0 is 256. With the backend "cpu" only.
  uint32_t min_chunk_tokens;
} kvist_cache_options;

// How full a layer group is.
typedef struct kvist_occupancy {
  // Cells in total.
  uint32_t capacity_cells;
  // Cells that hold tokens or nodes; in "paged" all cells of blocks in use.
  uint32_t used_cells;
  // One past the highest cell in use.
  uint32_t high_water;
  // Cells per block; 0 in kinds without blocks.
  uint32_t block_tokens;
} kvist_occupancy;

// Copies `len` cells, from `from` on to `to` on, in every layer of a group. They never overlap.
typedef struct kvist_copy {
  // First cell that is read.
  uint32_t from;
  // First cell that is written.
  uint32_t to;
  // Number of cells.
  uint32_t len;
} kvist_copy;

// Makes `n_copies` copies of cells in all layers of a group; 0 stops.
typedef int (*kvist_copy_cells)(void *user,
                                uint32_t group,
                                const struct kvist_copy *copies,
                                size_t n_copies);

// New tokens of one sequence in a step.
typedef struct kvist_span {
  // The sequence that they extend. A sequence has one span per step.
  uint32_t seq;
  // Its next position.
  uint32_t start;
  // At least 1.
  uint32_t n_tokens;
  // For the nodes of a draft tree: `n_tokens` parents, each an earlier node or -1. Null for plain tokens.
  const int32_t *parents;
} kvist_span;

// `len` cells from `start` on.
typedef struct kvist_run {
  // First cell.
  uint32_t start;
  // Number of cells.
  uint32_t len;
} kvist_run;

// The one window that a step reads, if there is one.
typedef struct kvist_window {
  // Whether every query sees one stretch of cells in position order with the new ones at its end.
  bool exists;
  // Whether it is causal, aligned lower right; otherwise its only query sees all of it.
  bool causal;
  // The cells.
  struct kvist_run cells;
} kvist_window;

// The block tables of one layer group, as paged attention kernels take them. The arrays are valid until the next call with
// this cache.
typedef struct kvist_tables {
  // `[n_tokens]`: the cell of each new token.
  const uint32_t *slots;
  // Tokens of the step.
  size_t n_tokens;
  // `[n_spans + 1]`: the first token of each span, then `n_tokens`.
  const uint32_t *query_start;
  // `[n_spans]`: tokens of each sequence, the new ones included.
  const uint32_t *kv_len;
  // Spans of the step.
  size_t n_spans;
  // `[n_spans + 1]`: where the blocks of each span start, then their number.
  const uint32_t *table_start;
  // Blocks in position order; `UINT32_MAX` where no query reads any.
  const uint32_t *blocks;
  // `[n_spans + 1]`: where the mask of each span starts in `mask_bits`, in bits. Only draft trees have one.
  const uint32_t *mask_start;
  // Row-major bits `[queries][nodes]`, in words of 32 from the lowest bit on.
  const uint32_t *mask_bits;
} kvist_tables;

// What a commit keeps of one span.
typedef struct kvist_kept {
  // A `kvist_keep`.
  uint32_t keep;
  // Number of tokens, or of nodes in `path`.
  uint32_t n;
  // `n` nodes from the root on; for `KVIST_KEEP_PATH` only.
  const uint32_t *path;
} kvist_kept;

// How a model is opened. All zeros are the defaults.
typedef struct kvist_model_options {
  // Threads that compute; 0 is one per core, shared by all models and caches of the process that say 0.
  uint32_t threads;
  // Tokens of the longest text, for models whose rope depends on it (LongRoPE); 0 is their original context.
  uint32_t context_tokens;
  // Bytes that the weights, all sessions of the model and its prefixes in memory may take together; 0 is no limit, and on a GPU
  // what its driver says is free.
  uint64_t memory_bytes;
  // Read the files instead of mapping them. Mapped files must not change while the model or a session of it is used.
  bool no_mmap;
  // Where it runs: null is "cpu"; or a GPU, in libraries that are built with the feature: "wgpu", "wgpu:1", "cuda", "cuda:1".
  // Its sessions and batches are there, too.
  const char *backend;
} kvist_model_options;

// What a model's files say about it.
typedef struct kvist_model_info {
  // Tokens of its vocabulary: the length of a row of logits.
  uint32_t vocab;
  // Decoder layers.
  uint32_t n_layers;
  // Positions it was trained on.
  uint32_t context_tokens;
  // Whether it has a tokenizer, so that texts can be used.
  bool has_tokenizer;
} kvist_model_info;

// How a session stores K and V. All zeros and nulls are the defaults.
typedef struct kvist_session_options {
  // "contiguous" (default), "ring", "cells", "tree" or "paged".
  const char *kind;
  // How K is stored: "f32", "f16" (default), "bf16", "q8", "q4", "t4", with suffixes as in `kvist run --kv`.
  const char *k;
  // How V is stored; null is as K.
  const char *v;
  // Tokens that the cache holds over all sequences; 0 is 4096. A ring computes its own number.
  uint32_t context_tokens;
  // Tokens of the largest pass; longer prompts are read in chunks. 0 is 256, and over CUDA 1024.
  uint32_t max_step_tokens;
  // Rows of logits that one pass computes at most; 0 is 1.
  uint32_t max_rows;
  // Positions that a query sees, in addition to the model's own windows; 0 is all. A ring needs it.
  uint32_t window;
  // First positions that stay visible outside of the window.
  uint32_t sinks;
  // Which tokens stay of a text that outgrows its cache, such as "sinks=4,recent=1024,top=2048"; null keeps all. Others are removed, so
  // answers change. `context_tokens` is then the longest text, and 0 the model's context. For kinds "cells", "tree" and
  // "paged" (null is "cells"); the session has one sequence, and neither saves nor resumes.
  const char *keep;
  // Drafts: texts come sooner, and stay the same. A null `kind` is "tree" where drafts are trees. Not with `keep`.
  struct kvist_draft_options drafts;
} kvist_session_options;

// New tokens of one sequence in a pass.
typedef struct kvist_input {
  // The sequence that they extend.
  uint32_t seq;
  // `n_tokens` tokens.
  const uint32_t *tokens;
  // At least 1.
  size_t n_tokens;
  // For the nodes of a draft tree: the parent of each, an earlier node or -1. Null for plain tokens.
  const int32_t *parents;
} kvist_input;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes a batch and starts its thread. Null `options` are the defaults. What the cache takes at most is set aside in the model's budget, so
// that no text is refused memory later. `KVIST_OUT_OF_MEMORY` if the cache, what the tiers take of memory, or a draft model does not fit;
// `KVIST_BAD_FILE` if the prefix or the directory of a tier cannot be used. A shared store that cannot be reached now is no error: it costs
// hits and no text. On an error nothing is started, but a directory of a tier may have been created.
//
// # Safety
// `model` came from `kvist_model_open`, `options` is null or valid: its strings are null or null-terminated, its `prefix` is null or came
// from `kvist_prefix_open`, and its `draft_model` is null or came from `kvist_model_open`. `batch` is a place for a pointer.
kvist_status kvist_batch_new(const struct kvist_model *model,
                             const struct kvist_batch_options *options,
                             struct kvist_batch **batch);

// Cancels what runs, ends the thread, and writes what is on its way to the tiers, for two seconds at most; then frees the batch. The
// directory of a tier is free for another one then. Jobs stay: their texts end with `KVIST_CANCELLED`, unless they have ended. Null is
// nothing. `KVIST_BUSY` if a call is using the batch: it is not freed then, and goes on.
//
// # Safety
// `batch` is null, or came from `kvist_batch_new`, was not freed before, and no call with it begins meanwhile.
kvist_status kvist_batch_free(struct kvist_batch *batch);

// Queues a prompt of tokens, and gives a job, whose text `kvist_job_next` returns. Never waits. Null `options` are the defaults.
// `KVIST_BUSY` if as many texts wait as may. What the cache can never hold is told by `kvist_job_next`.
//
// # Safety
// `batch` came from `kvist_batch_new`, `tokens` has `n_tokens` elements, `options` is null or valid with all that it points to, and `job`
// is a place for a pointer.
kvist_status kvist_batch_submit_tokens(const struct kvist_batch *batch,
                                       const uint32_t *tokens,
                                       size_t n_tokens,
                                       const struct kvist_job_options *options,
                                       struct kvist_job **job);

// `kvist_batch_submit_tokens` with a text, which is tokenized first, with the tokens that the model expects at the start of one.
//
// # Safety
// As `kvist_batch_submit_tokens`; `prompt` is null-terminated.
kvist_status kvist_batch_submit(const struct kvist_batch *batch,
                                const char *prompt,
                                const struct kvist_job_options *options,
                                struct kvist_job **job);

// Drops what the cache has of prompts under a salt, retained ones too; null is "". Blocks that texts use now stay until they are evicted.
// What tiers have is not found any more: by this batch at once, and by others when they read the note that each tier gets. Waits for these
// notes, two seconds at most. `deleted_blocks` (may be null) gets the number of blocks that left the cache, `pending_tiers` (may be null)
// that of tiers that have not got their note yet. They get it when they work again, unless the batch is freed first; then other batches
// find what such a tier has.
//
// # Safety
// `batch` came from `kvist_batch_new`, `salt` is null or null-terminated, the others are null or places for the results.
kvist_status kvist_batch_forget(const struct kvist_batch *batch,
                                const char *salt,
                                size_t *deleted_blocks,
                                size_t *pending_tiers);

// Gives the cache room for another number of tokens over all texts, rounded up to whole blocks, between two steps. Texts that run go on and
// stay the same: what a smaller cache has no room for is evicted, or computed again. Copies to and from tiers may take `timeout_ms`
// milliseconds to end. `capacity_tokens` (may be null) gets the new capacity. `KVIST_REFUSED` if a text that waits or runs needs more,
// or copies took too long, `KVIST_OUT_OF_MEMORY` if the model's budget has no room: the capacity stays what it was.
//
// # Safety
// `batch` came from `kvist_batch_new`, `capacity_tokens` is null or a place for the number.
kvist_status kvist_batch_resize(const struct kvist_batch *batch,
                                uint32_t tokens,
                                uint32_t timeout_ms,
                                uint64_t *capacity_tokens);

// Waits for the next token of a job's text, `timeout_ms` milliseconds at most: 0 looks and does not wait, `KVIST_FOREVER` waits until there
// is one. A piece without a token and with `KVIST_GOES_ON` says that the time is up. After the text's end it keeps saying why it ended, or
// why it failed: `KVIST_CACHE_FULL` if the cache can never hold prompt and answer, `KVIST_STOPPED` if too many tokens waited to be read,
// `KVIST_INTERNAL_ERROR` if the model or the batch has failed. Tokens that are there already come before the end, also after a cancel.
//
// # Safety
// `job` came from `kvist_batch_submit` or `kvist_batch_submit_tokens`; `piece` is a place for the result.
kvist_status kvist_job_next(struct kvist_job *job,
                            uint32_t timeout_ms,
                            struct kvist_piece *piece);

// Writes what is known of a job.
//
// # Safety
// `job` came from `kvist_batch_submit` or `kvist_batch_submit_tokens`; `info` is a place for the result.
kvist_status kvist_job_describe(const struct kvist_job *job,
                                struct kvist_job_info *info);

// Cancels a job, from any thread, also while another one waits for its next token: its memory is free before the next step of the batch,
// and its text ends with `KVIST_CANCELLED`, unless it has ended before. The handle stays, and is to be freed.
//
// # Safety
// `job` came from `kvist_batch_submit` or `kvist_batch_submit_tokens`, and is not freed during the call.
kvist_status kvist_job_cancel(const struct kvist_job *job);

// Cancels a job if its text has not ended, and frees it; null is nothing. It may be freed before or after its batch. `KVIST_BUSY` if a
// thread waits for its next token: it is not freed then. Cancel it first.
//
// # Safety
// `job` is null, or came from `kvist_batch_submit` or `kvist_batch_submit_tokens`, was not freed before, and no call with it begins
// meanwhile.
kvist_status kvist_job_free(struct kvist_job *job);

// Writes the figures of a batch. Never waits.
//
// # Safety
// `batch` came from `kvist_batch_new`; `stats` is a place for the result.
kvist_status kvist_batch_describe(const struct kvist_batch *batch, struct kvist_batch_stats *stats);

// Writes what drafts have achieved in a batch until the end of the last step; all zeros without drafts. Never waits.
//
// # Safety
// `batch` came from `kvist_batch_new`; `counts` is a place for the result.
kvist_status kvist_batch_speculation(const struct kvist_batch *batch,
                                     struct kvist_speculation *counts);

// Runs one layer of the step in flight: writes its K and V, then attends over exactly what each token may see. Every layer
// runs once; a layer that borrows K and V runs after the one that it borrows from. On an error the layer has not run, and the
// step is still in flight.
//
// # Safety
// `cache` came from `kvist_cache_new`; `call` is valid with all rows that its views describe, and nothing else uses those of
// `out` meanwhile.
kvist_status kvist_step_attend(struct kvist_cache *cache,
                               const struct kvist_attend *call);

// Makes an empty cache.
//
// # Safety
// `options` is valid with all that it points to; `cache` is a place for a pointer.
kvist_status kvist_cache_new(const struct kvist_cache_options *options, struct kvist_cache **cache);

// Frees a cache; null is nothing. `KVIST_BUSY` if a call is using it: it is not freed then.
//
// # Safety
// `cache` is null, or came from `kvist_cache_new`, was not freed before, and no call with it begins meanwhile.
kvist_status kvist_cache_free(struct kvist_cache *cache);

// Makes an empty sequence.
//
// # Safety
// `cache` came from `kvist_cache_new`.
kvist_status kvist_cache_open(struct kvist_cache *cache, uint32_t seq);

// Shares positions `from..until` of `src` with `dst`, without copying a byte; 0 and `UINT32_MAX` fork it. `dst` is made if it
// does not exist, and continues where the range ends.
//
// # Safety
// `cache` came from `kvist_cache_new`.
kvist_status kvist_cache_copy(struct kvist_cache *cache,
                              uint32_t src,
                              uint32_t dst,
                              uint32_t from,
                              uint32_t until);

// Removes positions `from..until` of a sequence; with 0 and `UINT32_MAX` the sequence itself.
//
// # Safety
// `cache` came from `kvist_cache_new`.
kvist_status kvist_cache_remove(struct kvist_cache *cache,
                                uint32_t seq,
                                uint32_t from,
                                uint32_t until);

// Removes every other sequence, and the positions of `seq` outside of `from..until`.
//
// # Safety
// `cache` came from `kvist_cache_new`.
kvist_status kvist_cache_keep(struct kvist_cache *cache,
                              uint32_t seq,
                              uint32_t from,
                              uint32_t until);

// Shortens a sequence to its first `n_tokens`, in every kind that can; a ring only to 0.
//
// # Safety
// `cache` came from `kvist_cache_new`.
kvist_status kvist_cache_truncate(struct kvist_cache *cache, uint32_t seq, uint32_t n_tokens);

// Makes a path of the draft nodes of `seq` part of the sequence and frees the other nodes; an empty path discards them all.
// Only in kind "tree", where nodes outlive their step.
//
// # Safety
// `cache` came from `kvist_cache_new`; `path` has `n_nodes` elements.
kvist_status kvist_cache_accept(struct kvist_cache *cache,
                                uint32_t seq,
                                const uint32_t *path,
                                size_t n_nodes);

// Removes every sequence. Kinds with one sequence have it again, empty.
//
// # Safety
// `cache` came from `kvist_cache_new`.
kvist_status kvist_cache_clear(struct kvist_cache *cache);

// Writes the tokens that a sequence holds, and the position of its next token. They differ where tokens were removed from
// the middle or have left a window.
//
// # Safety
// `cache` came from `kvist_cache_new`; the others are places for the results.
kvist_status kvist_cache_length(struct kvist_cache *cache,
                                uint32_t seq,
                                uint32_t *n_tokens,
                                uint32_t *next_position);

// Writes how full a layer group is.
//
// # Safety
// `cache` came from `kvist_cache_new`; `occupancy` is a place for the result.
kvist_status kvist_cache_occupancy(struct kvist_cache *cache,
                                   uint32_t group,
                                   struct kvist_occupancy *occupancy);

// Writes the bytes of K and V that a cache with a backend has reserved now; 0 without one.
//
// # Safety
// `cache` came from `kvist_cache_new`; `bytes` is a place for the result.
kvist_status kvist_cache_kv_bytes(struct kvist_cache *cache, uint64_t *bytes);

// Moves every sequence into one run of cells, as far as shared cells permit. A cache with a backend moves K and V itself;
// for one without, `copy` does, round by round, and must not use the cache. If it stops with 0, finished rounds stay, and
// everything is still readable: `KVIST_STOPPED`.
//
// # Safety
// `cache` came from `kvist_cache_new`; `copy` is null or takes these arguments.
kvist_status kvist_cache_compact(struct kvist_cache *cache,
                                 kvist_copy_cells copy,
                                 void *user);

// Begins a step: chooses cells for new tokens of any number of sequences. A refusal changes nothing, and leaves no step in
// flight.
//
// # Safety
// `cache` came from `kvist_cache_new`; `spans` has `n_spans` elements with valid parents.
kvist_status kvist_step_begin(struct kvist_cache *cache,
                              const struct kvist_span *spans,
                              size_t n_spans);

// Whether `kvist_step_begin` would accept these spans: `KVIST_OK`, or what it would return.
//
// # Safety
// As `kvist_step_begin`.
kvist_status kvist_step_can_begin(struct kvist_cache *cache,
                                  const struct kvist_span *spans,
                                  size_t n_spans);

// Gives the position of every token of the step, for rope. Valid until the next call with this cache.
//
// # Safety
// `cache` came from `kvist_cache_new`; the others are places for the results.
kvist_status kvist_step_positions(struct kvist_cache *cache,
                                  const uint32_t **positions,
                                  size_t *n_tokens);

// Gives the cell of every token of the step in one layer group, and the number of cells that the memory of the group must have
// for it. Valid until the next call with this cache.
//
// # Safety
// `cache` came from `kvist_cache_new`; the others are places for the results.
kvist_status kvist_step_writes(struct kvist_cache *cache,
                               uint32_t group,
                               const uint32_t **cells,
                               size_t *n_tokens,
                               uint32_t *cells_end);

// Gives the copies that must be made in one layer group before the step's writes. Valid until the next call with this cache.
//
// # Safety
// `cache` came from `kvist_cache_new`; the others are places for the results.
kvist_status kvist_step_copies(struct kvist_cache *cache,
                               uint32_t group,
                               const struct kvist_copy **copies,
                               size_t *n_copies);

// Gives a dense mask of one layer group: `mask[token * n_cells + cell]` says whether a token of the step sees a cell.
// `n_cells` reaches to the highest cell in use, not to the capacity. Valid until the next call with this cache.
//
// # Safety
// `cache` came from `kvist_cache_new`; the others are places for the results.
kvist_status kvist_step_mask(struct kvist_cache *cache,
                             uint32_t group,
                             const bool **mask,
                             size_t *n_tokens,
                             size_t *n_cells);

// Writes the window that the step reads in one layer group, where a kernel without a mask can be used.
//
// # Safety
// `cache` came from `kvist_cache_new`; `window` is a place for the result.
kvist_status kvist_step_window(struct kvist_cache *cache,
                               uint32_t group,
                               struct kvist_window *window);

// Writes the block tables of one layer group, for blocks of `block_tokens`. For caches without a backend: "paged", whose blocks
// have 16 tokens or any divisor, and other kinds where the cells of each sequence happen to be whole blocks. Otherwise
// `KVIST_UNSUPPORTED`.
//
// # Safety
// `cache` came from `kvist_cache_new`; `tables` is a place for the result.
kvist_status kvist_step_tables(struct kvist_cache *cache,
                               uint32_t group,
                               uint32_t block_tokens,
                               struct kvist_tables *tables);

// Says that a layer has run in the caller's kernels. For caches without a backend; every layer must, before the commit.
//
// # Safety
// `cache` came from `kvist_cache_new`.
kvist_status kvist_step_layer_ran(struct kvist_cache *cache,
                                  uint32_t layer);

// Gives the copies that a commit of `kept` needs in one layer group, after every layer has run: the nodes of a kept path move
// to the cells of a chain. They run in their order. For caches without a backend, kind "paged"; empty elsewhere. Valid until
// the next call with this cache.
//
// # Safety
// `cache` came from `kvist_cache_new`; `kept` has `n_kept` elements with valid paths; the others are places for the results.
kvist_status kvist_step_kept_copies(struct kvist_cache *cache,
                                    const struct kvist_kept *kept,
                                    size_t n_kept,
                                    uint32_t group,
                                    const struct kvist_copy **copies,
                                    size_t *n_copies);

// Commits the step in flight: its tokens become part of their sequences. `kept` says per span what stays, the rest leaves
// nothing behind; null with 0 keeps all. Refused with `KVIST_WRONG_ORDER` unless every layer has run. After an error the step
// is still in flight.
//
// # Safety
// `cache` came from `kvist_cache_new`; `kept` is null or has `n_kept` elements with valid paths.
kvist_status kvist_step_commit(struct kvist_cache *cache,
                               const struct kvist_kept *kept,
                               size_t n_kept);

// Drops the step in flight, if any: the cache is as it was before the step.
//
// # Safety
// `cache` came from `kvist_cache_new`.
kvist_status kvist_step_drop(struct kvist_cache *cache);

// The version of the library, such as "0.1.0". A static string.
const char *kvist_version(void);

// The text of the last error on the calling thread, in UTF-8; empty if there was none. Valid until the next failing call on
// this thread. Never null.
const char *kvist_last_error(void);

// Opens a model: a Hugging Face folder or a `.gguf` file. A null `path` is the small model embedded in the library. Null
// `options` are the defaults.
//
// # Safety
// `path` is null or a null-terminated string, `options` is null or valid: its `backend` is null or a null-terminated string. `model` is
// a place for a pointer.
kvist_status kvist_model_open(const char *path,
                              const struct kvist_model_options *options,
                              struct kvist_model **model);

// Frees a model. Its sessions go on; null is nothing.
//
// # Safety
// `model` is null, or came from `kvist_model_open`, was not freed before, and no other thread is using it.
kvist_status kvist_model_free(struct kvist_model *model);

// Writes what the files of the model say.
//
// # Safety
// `model` came from `kvist_model_open`; `info` is a place for the result.
kvist_status kvist_model_describe(const struct kvist_model *model, struct kvist_model_info *info);

// Tokenizes `text` and writes the number of its tokens to `n_tokens`. Writes the tokens to `tokens` if `capacity` holds them
// all; otherwise it fails with `KVIST_INVALID_ARGUMENT` and `n_tokens` says how many there are. With `special`, adds the
// tokens that the model expects at the start of a text.
//
// # Safety
// `model` came from `kvist_model_open`, `text` is null-terminated, `tokens` holds `capacity` elements (null if that is 0),
// and `n_tokens` is a place for the number.
kvist_status kvist_model_tokenize(const struct kvist_model *model,
                                  const char *text,
                                  bool special,
                                  uint32_t *tokens,
                                  size_t capacity,
                                  size_t *n_tokens);

// Writes the token of this name, such as `"</s>"`, to `token`. Fails with `KVIST_INVALID_ARGUMENT` if there is none.
//
// # Safety
// `model` came from `kvist_model_open`, `name` is null-terminated, and `token` is a place for the token.
kvist_status kvist_model_token(const struct kvist_model *model,
                               const char *name,
                               uint32_t *token);

// Makes an empty session. Null `options` are the defaults. Its whole memory bound is set aside in the model's budget, so that
// a session that has started is never refused memory later.
//
// # Safety
// `model` came from `kvist_model_open`, `options` is null or valid: its strings are null or null-terminated, and its `draft_model` is null
// or came from `kvist_model_open`. `session` is a place for a pointer.
kvist_status kvist_session_new(const struct kvist_model *model,
                               const struct kvist_session_options *options,
                               struct kvist_session **session);

// Frees a session; null is nothing. `KVIST_BUSY` if a call is using it: it is not freed then.
//
// # Safety
// `session` is null, or came from `kvist_session_new`, was not freed before, and no call with it begins meanwhile.
kvist_status kvist_session_free(struct kvist_session *session);

// Options that always take the most likely token, without a limit or stop strings.
struct kvist_text_options kvist_greedy(void);

// Adds tokens to a sequence, and begins a text that `kvist_session_next` continues. If the sequence has a text already, the
// new one continues it. Null `options` are those of `kvist_greedy`. On an error the sequence is as it was, with two exceptions:
// after `KVIST_STOPPED` what was read stays; and where a prompt fails behind its first chunk and a window has passed over what was there
// before it, in rings and paged caches, the sequence is empty, has no text, and the text of the error says so.
//
// # Safety
// `session` came from `kvist_session_new`, `tokens` has `n_tokens` elements, `options` is null or valid.
kvist_status kvist_session_prompt_tokens(struct kvist_session *session,
                                         uint32_t seq,
                                         const uint32_t *tokens,
                                         size_t n_tokens,
                                         const struct kvist_text_options *options);

// `kvist_session_prompt_tokens` with a text, which is tokenized first. At the start of a sequence it gets the tokens that the
// model expects there.
//
// # Safety
// As `kvist_session_prompt_tokens`; `text` is null-terminated.
kvist_status kvist_session_prompt(struct kvist_session *session,
                                  uint32_t seq,
                                  const char *text,
                                  const struct kvist_text_options *options);

// Generates the next token of a sequence's text. After the text's end it keeps saying why it ended. With drafts a pass may give several
// tokens: then the next calls compute nothing.
//
// # Safety
// `session` came from `kvist_session_new`; `piece` is a place for the result.
kvist_status kvist_session_next(struct kvist_session *session,
                                uint32_t seq,
                                struct kvist_piece *piece);

// One pass over new tokens of any number of sequences, for callers that choose tokens themselves. `rows` says which rows get
// logits. Texts of these sequences end. On an error the cache is as it was.
//
// # Safety
// `session` came from `kvist_session_new`; `inputs` has `n_inputs` elements with valid arrays.
kvist_status kvist_session_forward(struct kvist_session *session,
                                   const struct kvist_input *inputs,
                                   size_t n_inputs,
                                   uint32_t rows);

// The logits of the last pass: `n_rows` rows of `vocab` values, in the order of the inputs. They are not copied: valid until
// the next call with this session.
//
// # Safety
// `session` came from `kvist_session_new`; the others are places for the results.
kvist_status kvist_session_logits(struct kvist_session *session,
                                  const float **logits,
                                  size_t *n_rows,
                                  size_t *vocab);

// Makes an empty sequence.
//
// # Safety
// `session` came from `kvist_session_new`.
kvist_status kvist_session_open(struct kvist_session *session, uint32_t seq);

// Makes `to` a copy of the sequence `from` and of its text. No K and V are copied. `to` must not exist.
//
// # Safety
// `session` came from `kvist_session_new`.
kvist_status kvist_session_fork(struct kvist_session *session,
                                uint32_t from,
                                uint32_t to);

// Shortens a sequence to its first `n_tokens` and ends its text. Refused by rings, and where tokens that a window would see again are gone:
// in paged caches, and before the end of what a file has given. To 0 tokens it always works.
//
// # Safety
// `session` came from `kvist_session_new`.
kvist_status kvist_session_rollback(struct kvist_session *session,
                                    uint32_t seq,
                                    uint32_t n_tokens);

// Removes a sequence. Cells that no other sequence uses are free then.
//
// # Safety
// `session` came from `kvist_session_new`.
kvist_status kvist_session_remove(struct kvist_session *session, uint32_t seq);

// Makes a path of the draft nodes of `seq` part of the sequence and frees the other nodes; an empty path discards them all.
// Only in kind "tree", where nodes outlive their pass.
//
// # Safety
// `session` came from `kvist_session_new`; `path` has `n_nodes` elements.
kvist_status kvist_session_accept(struct kvist_session *session,
                                  uint32_t seq,
                                  const uint32_t *path,
                                  size_t n_nodes);

// Writes the number of tokens that a sequence has in the cache. Those that `keep` has removed count.
//
// # Safety
// `session` came from `kvist_session_new`; `n_tokens` is a place for the result.
kvist_status kvist_session_length(struct kvist_session *session,
                                  uint32_t seq,
                                  uint32_t *n_tokens);

// Writes the bytes of K and V that the session has reserved now: they follow the tokens in the cache, not its capacity.
//
// # Safety
// `session` came from `kvist_session_new`; `bytes` is a place for the result.
kvist_status kvist_session_kv_bytes(struct kvist_session *session,
                                    uint64_t *bytes);

// Writes how many tokens were removed so far because the session keeps only some (`keep`).
//
// # Safety
// `session` came from `kvist_session_new`; `n_tokens` is a place for the result.
kvist_status kvist_session_removed_tokens(struct kvist_session *session, uint64_t *n_tokens);

// Writes what drafts have achieved so far, over all sequences; all zeros without drafts.
//
// # Safety
// `session` came from `kvist_session_new`; `counts` is a place for the result.
kvist_status kvist_session_speculation(struct kvist_session *session,
                                       struct kvist_speculation *counts);

// Copies the tokens that a sequence has in the cache, and writes their number to `n_tokens`. The token that `kvist_session_next` gave
// last is not among them: it is computed with the next pass. If `capacity` does not hold them all, it fails with
// `KVIST_INVALID_ARGUMENT` and `n_tokens` says how many there are.
//
// # Safety
// `session` came from `kvist_session_new`, `tokens` holds `capacity` elements (null if that is 0), and `n_tokens` is a place
// for the number.
kvist_status kvist_session_tokens(struct kvist_session *session,
                                  uint32_t seq,
                                  uint32_t *tokens,
                                  size_t capacity,
                                  size_t *n_tokens);

// Writes a sequence to a file: its tokens with their K and V, and the token that `kvist_session_next` gave last. `path` has what it had
// or the whole session afterwards, whatever happens, and a new file can be read by its owner alone. The session goes on.
// `KVIST_BAD_FILE` if the file cannot be written.
//
// # Safety
// `session` came from `kvist_session_new`; `path` is null-terminated.
kvist_status kvist_session_save(struct kvist_session *session,
                                uint32_t seq,
                                const char *path);

// Goes on where a sequence was saved: puts its tokens into the empty sequence `seq`, and begins a text that `kvist_session_next` or
// `kvist_session_prompt` continues. The next logits are the same to the bit, on the same machine with the same kvist. `n_resumed`
// (may be null) gets the number of tokens that were not computed: all but the last (docs/formats/session.md has the exceptions).
// Null `options` are those of `kvist_greedy`; `progress` is not called. `KVIST_BAD_FILE` if the file is torn, has changed, or
// was made with other weights or storages: the text names the first difference. On an error the sequence is empty.
//
// # Safety
// `session` came from `kvist_session_new`, `path` is null-terminated, `options` is null or valid, `n_resumed` is null or a
// place for the number.
kvist_status kvist_session_resume(struct kvist_session *session,
                                  uint32_t seq,
                                  const char *path,
                                  const struct kvist_text_options *options,
                                  uint32_t *n_resumed);

// Writes a sequence to a file that other sessions begin with, see `kvist_prefix_open`. The cache has to store it in order (any kind
// but "ring"; the first sequence of its session). The session goes on.
//
// # Safety
// `session` came from `kvist_session_new`; `path` is null-terminated.
kvist_status kvist_session_freeze(struct kvist_session *session,
                                  uint32_t seq,
                                  const char *path);

// As `kvist_session_freeze`, but without a file: sessions of this process that begin with `prefix` share its memory, which is freed when
// the prefix and the last of them are freed, in any order. Until then it counts as memory of the model; `KVIST_OUT_OF_MEMORY` if there is no
// room for it, `KVIST_UNSUPPORTED` on a GPU. On an error `prefix` is not written.
//
// # Safety
// `session` came from `kvist_session_new`, and `prefix` is a place for a pointer.
kvist_status kvist_session_share(struct kvist_session *session,
                                 uint32_t seq,
                                 struct kvist_prefix **prefix);

// Opens a file of `kvist_session_freeze` or `kvist prefix freeze`. Reads it once and compares every hash; `KVIST_BAD_FILE` if it is
// torn or has changed.
//
// # Safety
// `path` is null-terminated, and `prefix` is a place for a pointer.
kvist_status kvist_prefix_open(const char *path,
                               struct kvist_prefix **prefix);

// Frees a prefix. Its sessions go on; null is nothing.
//
// # Safety
// `prefix` is null, or came from `kvist_prefix_open` or `kvist_session_share`, was not freed before, and no other thread is using it.
kvist_status kvist_prefix_free(struct kvist_prefix *prefix);

// Begins the sequence `seq` of a new session with a prefix, which `kvist_session_prompt` continues. Its K and V are attended where they
// are: all processes that use a file, and all sessions that use a prefix in memory, share one copy, and none computes it. On a GPU a session
// copies them from a file that was frozen on a GPU. `n_begun` (may be null) gets the number of tokens that were not computed: all
// (docs/formats/session.md has the exceptions). `KVIST_BAD_FILE` if the prefix was made with other
// weights or storages. On an error the sequence is empty.
//
// # Safety
// `session` came from `kvist_session_new`, `prefix` from `kvist_prefix_open` or `kvist_session_share`; `n_begun` is null or a place for the number.
kvist_status kvist_session_begin_with(struct kvist_session *session,
                                      uint32_t seq,
                                      const struct kvist_prefix *prefix,
                                      uint32_t *n_begun);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVIST_H */
