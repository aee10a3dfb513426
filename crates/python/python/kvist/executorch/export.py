"""Models of transformers as .pte files whose attention goes through `kvcache::update_and_attend`."""

from __future__ import annotations

import os
from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch

from .._errors import ArgumentError
from ..torch import Exportable
from .needs import needs_executorch

SCHEMA_VERSION = 1


def write_kv_cache_metadata(
    metadata: Dict[str, int], *, n_layers: int, n_kv_heads: int, head_dim: int
) -> Dict[str, int]:
    """Adds what a cache must know about the model to the constants of a program."""
    metadata.update({
        "kv_cache.schema_version": SCHEMA_VERSION,
        "kv_cache.n_layers": n_layers,
        "kv_cache.n_kv_heads": n_kv_heads,
        "kv_cache.head_dim": head_dim,
    })
    return metadata


def _load(model: Union[str, os.PathLike[str], torch.nn.Module]) -> Any:
    if isinstance(model, (str, os.PathLike)):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return model.eval()


def export(
    model: Union[str, os.PathLike[str], torch.nn.Module],
    out: Union[str, os.PathLike[str]] = "model.pte",
    *,
    xnnpack: bool = True,
    partitioners: Optional[Sequence[Any]] = None,
    max_step_tokens: int = 512,
    features: Sequence[int] = (),
) -> int:
    """Exports a model of transformers, or a folder with one, to `out`.

    An execution takes 1 to `max_step_tokens` tokens; activations are planned for the largest, so a small number saves memory.
    `xnnpack` lowers everything around attention to XNNPACK; `partitioners`, if given, are used instead. Returns the
    number of times that the program calls the op.
    """
    loaded = _load(model)
    config = loaded.config
    if getattr(config, "attn_logit_softcapping", None):
        raise ArgumentError("this model caps its attention scores, which kvcache::update_and_attend does not carry")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    n = torch.export.Dim("n", min=1, max=max_step_tokens)
    rows = torch.export.Dim("rows", min=1, max=max_step_tokens)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    inputs = (tokens, torch.arange(3).unsqueeze(-1), torch.tensor([1, 2]))
    return export_module(
        Exportable(loaded, features),
        inputs,
        ({1: n}, {0: n}, {0: rows}),
        out,
        n_layers=config.num_hidden_layers,
        n_kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
        head_dim=head_dim,
        xnnpack=xnnpack,
        partitioners=partitioners,
    )


def export_module(
    module: torch.nn.Module,
    inputs: Tuple[Any, ...],
    dynamic_shapes: Any,
    out: Union[str, os.PathLike[str]],
    *,
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    xnnpack: bool = True,
    partitioners: Optional[Sequence[Any]] = None,
    constants: Dict[str, int] = {},
) -> int:
    """Exports any module that calls `kvcache::update_and_attend`. See `export`."""
    needs_executorch()
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    from . import op  # noqa: F401 - the overload that programs call

    metadata = write_kv_cache_metadata(dict(constants), n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim)
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    if partitioners is None and xnnpack:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        partitioners = [XnnpackPartitioner()]
    edge = to_edge_transform_and_lower(
        program,
        partitioner=list(partitioners or ()),
        constant_methods=metadata,
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    calls = sum(
        1
        for node in edge.exported_program().graph_module.graph.nodes
        if node.op == "call_function" and "update_and_attend" in str(node.target)
    )
    if calls != n_layers:
        raise RuntimeError(f"the program calls kvcache::update_and_attend {calls} times, and the model has {n_layers} layers")
    lowered = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False)))
    with open(out, "wb") as file:
        lowered.write_to_file(file)
    return calls
