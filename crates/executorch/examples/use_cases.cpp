// The five use cases of the design over one .pte: plain decode, a batch, an agent's fork, admission, rollback.
//
//     use_cases model.pte
//
// Text is compared with itself: what a sequence says must not depend on what else is in the cache.
#include <algorithm>
#include <cstdio>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include "kvist_executorch.h"

using namespace executorch::cache;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::EValue;

struct Batch {
  std::vector<int64_t> tokens, positions;
  std::vector<int32_t> seqs;
  void add(int64_t token, int64_t position, int32_t seq) {
    tokens.push_back(token), positions.push_back(position), seqs.push_back(seq);
  }
};

static void expect(bool good, const char* what) {
  if (!good) throw std::runtime_error(what);
}

// One execution: the most likely next token after every token of the batch.
template <class Session>
static std::vector<int64_t> step(Module& module, const Session& session, Batch batch) {
  session->begin_step(batch.seqs.data(), int(batch.seqs.size()));
  auto active = session.activate();
  int n = int(batch.tokens.size());
  std::vector<int64_t> rows;
  for (int i = 0; i < n; i++) rows.push_back(i);
  using executorch::aten::ScalarType;
  auto tokens = from_blob(batch.tokens.data(), {1, n}, ScalarType::Long);
  auto positions = from_blob(batch.positions.data(), {n, 1}, ScalarType::Long);
  auto wanted = from_blob(rows.data(), {n}, ScalarType::Long);
  auto outputs = module.execute("forward", {EValue(*tokens), EValue(*positions), EValue(*wanted)});
  expect(outputs.ok(), "the execution failed");
  auto logits = outputs->at(0).toTensor();
  const float* row = logits.const_data_ptr<float>();
  std::vector<int64_t> next;
  for (int i = 0; i < n; i++, row += logits.size(1)) next.push_back(std::max_element(row, row + logits.size(1)) - row);
  return next;
}

int main(int argc, char** argv) try {
  expect(argc == 2, "usage: use_cases model.pte");
  Module module(argv[1]);
  auto config = make_config(read_kv_cache_metadata(module), /*capacity=*/128, ScalarType::Float);
  std::vector<int64_t> prompt = {5, 17, 3, 88, 41, 9};
  int end = int(prompt.size());

  // (1) Plain decode, one sequence.
  std::vector<int64_t> alone;
  {
    auto session = make_seq_session("kvist", config);
    Batch batch;
    for (int i = 0; i < end; i++) batch.add(prompt[i], i, 0);
    int64_t token = step(module, session, batch).back();
    for (int i = end; i < end + 10 && session->can_extend(); i++) {
      alone.push_back(token);
      Batch one;
      one.add(token, i, 0);
      token = step(module, session, one)[0];
    }
  }
  printf("plain decode:");
  for (auto token : alone) printf(" %d", int(token));
  printf("\n");

  auto session = make_seq_session("kvist", config);
  Batch trunk;
  for (int i = 0; i < end; i++) trunk.add(prompt[i], i, 0);
  int64_t first = step(module, session, trunk).back();
  expect(first == alone[0], "the first token");

  // (3) An agent's fork: branches share the trunk, no bytes are copied.
  for (int32_t branch : {1, 2}) session->seq_cp(0, branch);
  expect(session->seq_len(2) == end && session->can_extend(128 - end), "a fork takes no cells");
  // (2) A batch of sequences in one execution: 1 goes on as the plain text did, 2 another way.
  Batch both;
  both.add(alone[0], end, 1);
  both.add(1, end, 2);
  expect(step(module, session, both)[0] == alone[1], "a branch beside another");

  // (4) Admission: sequence 3 begins from the shared trunk while 1 decodes.
  session->seq_cp(0, 3);
  Batch mixed;
  mixed.add(alone[1], end + 1, 1);
  for (int i = 0; i < 3; i++) mixed.add(alone[size_t(i)], end + i, 3);
  auto next = step(module, session, mixed);
  expect(next[0] == alone[2] && next[3] == alone[3], "a prompt beside a decode");

  // (5) Eviction, rollback and a second answer; the winner stays.
  session->seq_rm(2);
  session->seq_rm(3, end);
  Batch again;
  again.add(alone[0], end, 3);
  expect(step(module, session, again)[0] == alone[1], "after a rollback");
  session->seq_keep(3);
  expect(session->seq_len(1) == 0 && session->seq_len(3) == end + 1, "only the winner is left");
  try {
    make_session<TreeSeqCache>("kvist", "seq", config);
    expect(false, "a seq cache has no tree face");
  } catch (const std::runtime_error& why) {
    printf("refused: %s\n", why.what());
  }
  printf("batch, fork, admission and rollback agree with it\n");
  return 0;
} catch (const std::exception& why) {
  fprintf(stderr, "%s\n", why.what());
  return 1;
}
