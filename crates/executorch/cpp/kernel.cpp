// `kvcache::update_and_attend.out`, registered when the library is loaded. An OpFunction has no user data: the cache is the one
// that is active on the calling thread.
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include "cache.h"
#include "last_error.h"

namespace executorch {
namespace cache {
namespace {

using ::executorch::aten::Tensor;
using runtime::EValue;
using runtime::KernelRuntimeContext;

uint32_t dtype_of(const Tensor& tensor, const char* what) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return KVIST_F32;
    case ScalarType::Half: return KVIST_F16;
    case ScalarType::BFloat16: return KVIST_BF16;
    default: throw std::runtime_error(std::string(what) + " is neither Float, Half nor BFloat16");
  }
}

// [1, heads, tokens, dim] as rows of tokens.
kvist_rows_view view(const Tensor& tensor, const char* what) {
  if (tensor.dim() != 4 || tensor.size(0) != 1)
    throw std::runtime_error(std::string(what) + " is not [1, heads, tokens, dim]: a batch lies on the axis of tokens, see begin_step");
  kvist_rows_view rows{};
  rows.data = const_cast<void*>(tensor.const_data_ptr());
  rows.dtype = dtype_of(tensor, what);
  const int axes[4] = {0, 2, 1, 3};
  for (int i = 0; i < 4; i++) {
    rows.sizes[i] = tensor.size(axes[i]);
    rows.strides[i] = tensor.strides()[size_t(axes[i])];
  }
  return rows;
}

void run(KernelRuntimeContext&, runtime::Span<EValue*> arguments) {
  if (arguments.size() < 8) throw std::runtime_error("kvcache::update_and_attend.out has eight arguments");
  const Tensor& q = arguments[0]->toTensor();
  const Tensor& k = arguments[1]->toTensor();
  const Tensor& v = arguments[2]->toTensor();
  const Tensor& position = arguments[3]->toTensor();
  Tensor& out = arguments[7]->toTensor();
  LayerCall call{};
  call.layer = int(arguments[4]->toInt());
  call.scale = float(arguments[5]->toDouble());
  call.q = view(q, "q"), call.k = view(k, "k"), call.v = view(v, "v");
  call.n_tokens = int(q.size(2)), call.n_heads = int(q.size(1));
  if (position.scalar_type() != ScalarType::Long || position.dim() != 2 || position.size(1) != 1 || position.size(0) != q.size(2))
    throw std::runtime_error("position is not [tokens, 1] of int64: one position per token");
  call.position = position.const_data_ptr<int64_t>();
  ::executorch::aten::SizesType sizes[4] = {1, ::executorch::aten::SizesType(q.size(1)), ::executorch::aten::SizesType(q.size(2)),
                                            ::executorch::aten::SizesType(v.size(3))};
  if (runtime::resize_tensor(out, {sizes, 4}) != runtime::Error::Ok)
    throw std::runtime_error("out cannot hold " + std::to_string(call.n_tokens) + " tokens: the program was exported for fewer");
  call.out = view(out, "out");
  active_cache().attend(call);
}

void kernel(KernelRuntimeContext& context, runtime::Span<EValue*> arguments) {
  try {
    run(context, arguments);
  } catch (const std::exception& why) {
    last_error() = why.what();
    ET_LOG(Error, "kvcache::update_and_attend: %s", why.what());
    context.fail(runtime::Error::InvalidArgument);
  }
}

const runtime::Error registered = runtime::register_kernel(runtime::Kernel("kvcache::update_and_attend.out", kernel));

} // namespace
} // namespace cache
} // namespace executorch
