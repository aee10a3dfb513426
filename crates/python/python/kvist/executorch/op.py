"""The op with the `.out` overload that ExecuTorch's programs call. The op itself is that of `kvist.torch`."""

from __future__ import annotations

from typing import Union

import torch

from ..torch import update_and_attend
from .needs import needs_executorch

needs_executorch()
from executorch.extension.llm.cache.update_and_attend import REGISTRY  # noqa: E402

__all__ = ["REGISTRY", "update_and_attend"]

_fragment = torch.library.Library("kvcache", "FRAGMENT")  # type: ignore[no-untyped-call]
_fragment.define(  # type: ignore[no-untyped-call]
    "update_and_attend.out(Tensor q, Tensor k, Tensor v, Tensor position, SymInt layer_id, float scale, "
    "ScalarType out_dtype, *, Tensor(a!) out) -> Tensor(a!)"
)


@torch.library.impl(_fragment, "update_and_attend.out", "CompositeExplicitAutograd")
def _out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    layer_id: Union[int, torch.SymInt],
    scale: float,
    out_dtype: torch.dtype,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    out.copy_(torch.ops.kvcache.update_and_attend(q, k, v, position, layer_id, scale, out_dtype))
    return out
