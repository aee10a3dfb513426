"""What `kvist.transformers` and `kvist.torch` share: tensors as arrays, and the layers of a model's configuration."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ._errors import ArgumentError


def as_array(tensor: torch.Tensor) -> Any:
    """The tensor's memory as a NumPy array. bfloat16, which NumPy lacks, is seen as uint16."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def check_rows(tensor: torch.Tensor) -> None:
    """Refuses tensors that the kernels cannot read."""
    if tensor.device.type != "cpu":
        raise ArgumentError(f"kvist computes on the CPU, and the model is on {tensor.device}")
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ArgumentError(f"kvist's attention takes float32, float16 and bfloat16, not {tensor.dtype}")


def layers_of(config: Any) -> tuple[list[tuple[int, int, Optional[int]]], int]:
    """From a configuration of transformers: for each layer its KV heads, the elements of a head and its window or None; and the
    number of query heads."""
    text = config.get_text_config(decoder=True)
    n_layers = text.num_hidden_layers
    if getattr(text, "num_kv_shared_layers", 0):
        raise ArgumentError("kvist does not run models whose layers share K and V in transformers yet")
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * n_layers
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ArgumentError(f"kvist has no layers of the type {', '.join(sorted(unknown))} in transformers")
    heads = text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return [(kv_heads, dim, window if kind == "sliding_attention" else None) for kind in types], heads
