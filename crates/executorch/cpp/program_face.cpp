// A program without C++: open, execute on a session, read the logits. For hosts in Rust or C; those in C++ use extension::Module.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include "kvist_executorch.h"
#include "last_error.h"

using namespace executorch::cache;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::EValue;

namespace {

struct Program {
  Module module;
  std::vector<EValue> outputs;
  explicit Program(const char* path) : module(path) {}
};

template <class Run>
long guarded(Run run) {
  last_error().clear();
  try {
    return run();
  } catch (const std::exception& why) {
    last_error() = why.what();
    return -1;
  }
}

} // namespace

extern "C" {

// Null if the file is no program.
Program* kvist_et_program_open(const char* path) {
  Program* made = nullptr;
  guarded([&] {
    auto program = std::make_unique<Program>(path);
    if (program->module.load_method("forward") != executorch::runtime::Error::Ok)
      throw std::runtime_error(std::string(path) + " is no program that runs here: a file, an operator or a delegate is missing");
    made = program.release();
    return 0L;
  });
  return made;
}

void kvist_et_program_free(Program* program) { delete program; }

// Writes n_layers, n_kv_heads and head_dim.
long kvist_et_program_params(Program* program, int32_t* params) {
  return guarded([&] {
    auto read = read_kv_cache_metadata(program->module);
    params[0] = read.n_layers, params[1] = read.n_kv_heads, params[2] = read.head_dim;
    return 0L;
  });
}

// Executes `n` tokens on the session that the thread has entered. `logits` points to `n_rows` rows, until the next execution.
// Returns the length of a row.
long kvist_et_program_forward(
    Program* program, int64_t* tokens, int64_t* positions, int32_t n, int64_t* rows, int32_t n_rows, const float** logits) {
  return guarded([&] {
    using executorch::aten::ScalarType;
    auto t = from_blob(tokens, {1, n}, ScalarType::Long);
    auto p = from_blob(positions, {n, 1}, ScalarType::Long);
    auto r = from_blob(rows, {n_rows}, ScalarType::Long);
    auto outputs = program->module.execute("forward", {EValue(*t), EValue(*p), EValue(*r)});
    if (!outputs.ok()) throw std::runtime_error(last_error().empty() ? "the execution failed" : last_error());
    program->outputs = std::move(*outputs);
    auto out = program->outputs.at(0).toTensor();
    *logits = out.const_data_ptr<float>();
    return long(out.size(1));
  });
}

} // extern "C"
