"""The op, as the wheel of ExecuTorch defines it, with the `.out` overload that its programs call."""

import torch

# Defines kvcache::update_and_attend with its fake and eager kernels. Defining it a second time would clash.
from executorch.extension.llm.cache.update_and_attend import REGISTRY, update_and_attend  # noqa: F401

_fragment = torch.library.Library("kvcache", "FRAGMENT")
_fragment.define(
    "update_and_attend.out(Tensor q, Tensor k, Tensor v, Tensor position, SymInt layer_id, float scale, "
    "ScalarType out_dtype, *, Tensor(a!) out) -> Tensor(a!)"
)


@torch.library.impl(_fragment, "update_and_attend.out", "CompositeExplicitAutograd")
def _out(q, k, v, position, layer_id, scale, out_dtype, *, out):
    out.copy_(torch.ops.kvcache.update_and_attend(q, k, v, position, layer_id, scale, out_dtype))
    return out
