"""Models of transformers as .pte files whose attention goes through `kvcache::update_and_attend`."""

from __future__ import annotations

import os
from typing import Dict, Sequence, Union

import torch

from . import op

SCHEMA_VERSION = 1
_ATTENTION = "kvist_update_and_attend"


def write_kv_cache_metadata(metadata: dict, *, n_layers: int, n_kv_heads: int, head_dim: int) -> dict:
    """Adds what a cache must know about the model to the constants of a program."""
    metadata.update({
        "kv_cache.schema_version": SCHEMA_VERSION,
        "kv_cache.n_layers": n_layers,
        "kv_cache.n_kv_heads": n_kv_heads,
        "kv_cache.head_dim": head_dim,
    })
    return metadata


def _attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """An attention function of transformers: the op keeps history and visibility, so there is no mask."""
    if dropout:
        raise ValueError(f"dropout {dropout}: export the model in eval mode")
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"this model's attention has {name}, which kvcache::update_and_attend does not carry")
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    position = kwargs["kvist_position"]
    out = op.update_and_attend(query, key, value, position, module.layer_idx, scale, query.dtype)
    return out.transpose(1, 2), None


def _no_mask(*args, **kwargs):
    return None


def _register():
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, _no_mask)


class Exportable(torch.nn.Module):
    """A causal language model as a program runs it.

    forward(tokens [1, n] int64, position [n, 1] int64, rows [r] int64) -> logits [r, vocab], and with `features` also the hidden
    states after those layers, [n, len(features) * hidden], for draft heads such as EAGLE's. Layer 0 stands for the embeddings.
    """

    def __init__(self, model, features: Sequence[int] = ()):
        super().__init__()
        _register()
        model.config._attn_implementation = _ATTENTION
        self.model = model
        self.features = tuple(features)

    def forward(self, tokens, position, rows):
        out = self.model.model(
            input_ids=tokens,
            position_ids=position.view(1, -1),
            attention_mask=None,
            use_cache=False,
            output_hidden_states=bool(self.features),
            kvist_position=position,
        )
        logits = self.model.lm_head(out.last_hidden_state[0, rows])
        if not self.features:
            return (logits,)
        return logits, torch.cat([out.hidden_states[layer][0] for layer in self.features], dim=-1)


def _load(model):
    if isinstance(model, (str, os.PathLike)):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return model.eval()


def export(
    model,
    out: Union[str, os.PathLike] = "model.pte",
    *,
    xnnpack: bool = True,
    max_step_tokens: int = 512,
    features: Sequence[int] = (),
):
    """Exports a model of transformers, or a folder with one, to `out`.

    An execution takes 1 to `max_step_tokens` tokens; activations are planned for the largest, so a small number saves memory.
    `xnnpack` lowers everything around attention to XNNPACK. Returns the number of times that the program calls the op.
    """
    model = _load(model)
    config = model.config
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError("this model caps its attention scores, which kvcache::update_and_attend does not carry")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    n = torch.export.Dim("n", min=1, max=max_step_tokens)
    rows = torch.export.Dim("rows", min=1, max=max_step_tokens)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    inputs = (tokens, torch.arange(3).unsqueeze(-1), torch.tensor([1, 2]))
    return export_module(
        Exportable(model, features),
        inputs,
        ({1: n}, {0: n}, {0: rows}),
        out,
        n_layers=config.num_hidden_layers,
        n_kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
        head_dim=head_dim,
        xnnpack=xnnpack,
    )


def export_module(module, inputs, dynamic_shapes, out, *, n_layers, n_kv_heads, head_dim, xnnpack=True, constants: Dict[str, int] = {}):
    """Exports any module that calls `kvcache::update_and_attend`. See `export`."""
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    metadata = write_kv_cache_metadata(dict(constants), n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim)
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    partitioners = []
    if xnnpack:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        partitioners.append(XnnpackPartitioner())
    edge = to_edge_transform_and_lower(
        program,
        partitioner=partitioners,
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
