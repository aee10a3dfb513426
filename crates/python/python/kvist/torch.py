"""kvist's caches behind the op `torch.ops.kvcache.update_and_attend`, for eager torch, `torch.compile` and `torch.export`.

>>> import kvist.torch
>>> model = kvist.torch.Exportable(AutoModelForCausalLM.from_pretrained(name))
>>> cache = kvist.torch.Cache.of(model.config, kv="q8")
>>> with cache:
...     logits, = model(tokens, positions, rows)

The signature is that of ExecuTorch's op, which keeps the cache out of the graph: an exported program runs with any cache.
"""

from __future__ import annotations

import contextvars
from typing import Any, Optional, Sequence, Union

import torch

from ._errors import ArgumentError
from ._native import Attention
from ._tensors import as_array, check_rows, layers_of

__all__ = ["Cache", "Exportable", "attention_forward", "update_and_attend"]

ATTENTION = "kvist_update_and_attend"
NO_CACHE = "update_and_attend without a cache: call the model inside `with kvist.torch.Cache(...):`"
_active: contextvars.ContextVar[tuple[Cache, ...]] = contextvars.ContextVar("kvist_cache", default=())


class Cache:
    """K and V of a model in kvist's storage, and attention over them. ``with cache:`` makes it the one that the op uses.

    Args:
        n_layers, n_heads, n_kv_heads, head_dim: the model's sizes.
        windows: tokens that a query sees, itself included: None for all, a number, or one of these per layer.
        kind, kv, kv_v, recent: as for `kvist.Model.session`; the kind holds many sequences: cells, tree or paged.
        capacity: tokens that the cache can hold, over all sequences. Memory is taken as it fills.
        max_step_tokens: tokens of the largest pass, over all its sequences.

    A pass begins with layer 0 and is applied after the last layer. One that fails in between leaves the cache as it was.
    """

    def __init__(
        self,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        windows: Union[None, int, Sequence[Optional[int]]] = None,
        kind: str = "cells",
        kv: str = "f16",
        kv_v: Optional[str] = None,
        capacity: int = 1 << 24,
        max_step_tokens: int = 4096,
        recent: int = 16,
    ) -> None:
        each = [windows] * n_layers if windows is None or isinstance(windows, int) else list(windows)
        if len(each) != n_layers:
            raise ArgumentError(f"windows has {len(each)} entries, and the model {n_layers} layers")
        layers = [(n_kv_heads, head_dim, window) for window in each]
        self._begin(layers, n_heads, kind, kv, kv_v, capacity, max_step_tokens, recent)

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        kind: str = "cells",
        kv: str = "f16",
        kv_v: Optional[str] = None,
        capacity: int = 1 << 24,
        max_step_tokens: int = 4096,
        recent: int = 16,
    ) -> Cache:
        """A cache for a configuration of transformers, with the windows of its layers."""
        cache = cls.__new__(cls)
        cache._begin(*layers_of(config), kind, kv, kv_v, capacity, max_step_tokens, recent)
        return cache

    def _begin(
        self,
        layers: list[tuple[int, int, Optional[int]]],
        n_heads: int,
        kind: str,
        kv: str,
        kv_v: Optional[str],
        capacity: int,
        max_step_tokens: int,
        recent: int,
    ) -> None:
        self._core = Attention(
            layers, n_heads, kind=kind, kv=kv, kv_v=kv_v, capacity=capacity, max_step_tokens=max_step_tokens, recent=recent
        )
        self._n_layers = len(layers)
        self._declared: Optional[list[int]] = None
        # The order in which the cache takes the tokens of the step in flight; True if it is that of the pass.
        self._step: Union[None, bool, torch.Tensor] = None
        self._tokens: list[contextvars.Token[tuple[Cache, ...]]] = []

    def __enter__(self) -> Cache:
        self._tokens.append(_active.set((*_active.get(), self)))
        return self

    def __exit__(self, *_: object) -> None:
        _active.reset(self._tokens.pop())

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that are reserved now."""
        return self._core.kv_bytes

    def begin_step(self, seq_ids: Sequence[int]) -> None:
        """Says of which sequence each token of the next pass is. Without it the rows of the batch are the sequences 0, 1, ...

        Several sequences lie on the axis of tokens: ``q`` is `[1, heads, tokens, dim]`, and `seq_ids` has an id per token."""
        seq_ids = [int(seq) for seq in seq_ids]
        if not seq_ids or min(seq_ids) < 0:
            raise ArgumentError(f"begin_step({seq_ids}): give the id of a sequence, 0 or more, for each token")
        self._declared, self._step = seq_ids, None

    def seq_len(self, seq: int = 0) -> int:
        """Tokens of a sequence; 0 if there is none."""
        return self._core.length(seq) or 0

    def seq_cp(self, src: int, dst: int) -> None:
        """Makes `dst` a copy of `src`, which must not exist yet. K and V are shared."""
        self._step = None
        self._core.fork(src, dst)

    def seq_rm(self, seq: int, p0: int = 0) -> None:
        """Removes the tokens of a sequence from position `p0` on, and with 0 the sequence."""
        self._step = None
        if p0 == 0:
            self._core.remove(seq)
        elif p0 < self.seq_len(seq):
            self._core.truncate(seq, p0)

    def rewind(self, n: int, seq: int = 0) -> None:
        """Keeps the first `n` tokens of a sequence."""
        if n > self.seq_len(seq):
            raise ArgumentError(f"rewind({n}): sequence {seq} has {self.seq_len(seq)} tokens")
        self.seq_rm(seq, n)

    def update_and_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        layer_id: int,
        scale: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """The op, over this cache. See `kvist.torch.update_and_attend`."""
        check_rows(q)
        q, k, v = q.detach(), k.detach(), v.detach()
        batch, heads, n, _ = q.shape
        if layer_id == 0:
            self._step = self._place(batch, n, position)
        elif self._step is None:
            raise ArgumentError(f"layer {layer_id} without layer 0: a pass runs all {self._n_layers} layers, in order")
        order = self._step
        rows = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        out = torch.empty((batch, heads, n, v.shape[-1]), dtype=q.dtype)
        if isinstance(order, torch.Tensor):
            rows = [tensor[:, order] for tensor in rows]
            sorted_out = torch.empty_like(rows[0])
            self._attend(layer_id, rows, sorted_out, scale)
            out.transpose(1, 2)[:, order] = sorted_out
        else:
            self._attend(layer_id, rows, out.transpose(1, 2), scale)
        if layer_id == self._n_layers - 1:
            self._core.commit()
            self._step = None
        return out.to(out_dtype)

    def _attend(self, layer: int, rows: list[torch.Tensor], out: torch.Tensor, scale: float) -> None:
        q, k, v = (as_array(tensor) for tensor in rows)
        self._core.attend(layer, q, k, v, as_array(out), scale=scale)

    def _place(self, batch: int, n: int, position: torch.Tensor) -> Union[bool, torch.Tensor]:
        """Begins a step. Returns the order in which the cache takes the tokens, or True if it is that of the pass."""
        declared, self._declared, self._step = self._declared, None, None
        if position.dim() != 2 or position.shape[1] != 1:
            raise ArgumentError(f"position is {list(position.shape)}: kvist takes one position per token, [tokens, 1]")
        if position.shape[0] != n:
            raise ArgumentError(f"position has {position.shape[0]} rows, and q has {n} tokens")
        positions = position[:, 0].tolist()
        parts: dict[int, list[int]] = {}
        if declared is None:
            parts = {seq: list(range(n)) for seq in range(batch)}
        elif batch != 1:
            raise ArgumentError(f"begin_step puts the sequences on the axis of tokens, and q has a batch of {batch}")
        elif len(declared) != n:
            raise ArgumentError(f"begin_step declared {len(declared)} tokens, and the pass has {n}")
        else:
            for token, seq in enumerate(declared):
                parts.setdefault(seq, []).append(token)
        for seq, tokens in parts.items():
            start = self.seq_len(seq)
            if [positions[token] for token in tokens] != list(range(start, start + len(tokens))):
                found = [positions[token] for token in tokens]
                raise ArgumentError(f"sequence {seq} continues at position {start}, and the pass has {found[:8]}")
        for seq in parts:
            if self._core.length(seq) is None:
                self._core.new_sequence(seq)
        self._core.begin([(seq, len(tokens)) for seq, tokens in parts.items()])
        order = [token for tokens in parts.values() for token in tokens]
        return True if declared is None or order == list(range(n)) else torch.tensor(order)


def _cache() -> Optional[Cache]:
    """The innermost cache that is active in this thread or task; None without one."""
    active = _active.get()
    return active[-1] if active else None


def _compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    layer_id: int,
    scale: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    cache = _cache()
    if cache is not None:
        return cache.update_and_attend(q, k, v, position, layer_id, scale, out_dtype)
    if _registry is None:
        raise ArgumentError(NO_CACHE)
    # Another implementation's cache, in ExecuTorch's registry.
    from executorch.extension.llm.cache.reference_cache import attend

    try:
        theirs = _registry.current()
    except RuntimeError as why:
        raise ArgumentError(NO_CACHE) from why
    k, v, spec = theirs.update_and_fetch(layer_id, k, v, position)
    out: torch.Tensor = attend(q, k, v, spec, scale, out_dtype)
    return out


def _define() -> tuple[Any, Any]:
    """The op, and ExecuTorch's registry of caches if there is one. An op can be defined once: where ExecuTorch is installed its
    definition is taken, whichever of the two is imported first, and the kernel of the CPU is ours."""
    try:
        from executorch.extension.llm.cache import update_and_attend as theirs
    except ImportError:
        return _own(), None
    theirs.update_and_attend.register_kernel("cpu")(_compute)
    return theirs.update_and_attend, theirs.REGISTRY


def _own() -> Any:
    @torch.library.custom_op("kvcache::update_and_attend", mutates_args=())
    def update_and_attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        layer_id: int,
        scale: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Appends K and V of a pass to a layer of the active cache, and attends over all that a query may see.

        Args:
            q: `[batch, heads, tokens, head_dim]`, rotated.
            k, v: `[batch, kv_heads, tokens, head_dim]`, new keys, rotated, and values.
            position: int64 `[tokens, 1]`, of each token in its sequence: those at which the sequences continue.
            layer_id: the layer, a constant of the graph.
            scale: multiplies every score; usually 1/sqrt(head_dim).
            out_dtype: of the output, whatever the cache stores.

        Returns `[batch, heads, tokens, head_dim]`.
        """
        return _compute(q, k, v, position, layer_id, scale, out_dtype)

    @update_and_attend.register_fake
    def _(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        layer_id: int,
        scale: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)

    return update_and_attend


update_and_attend, _registry = _define()


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers that calls the op: the cache knows what a query sees, so there is no mask."""
    if dropout:
        raise ArgumentError(f"dropout {dropout}: kvcache::update_and_attend has none, call model.eval()")
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ArgumentError(f"this model's attention has {name}, which kvcache::update_and_attend does not carry")
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    position = options["kvist_position"]
    out = update_and_attend(query, key, value, position, module.layer_idx, scale, query.dtype)
    return out.transpose(1, 2), None


def _no_mask(*_: object, **__: object) -> None:
    return None


class Exportable(torch.nn.Module):
    """A causal language model of transformers whose attention is the op. It changes the model's attention.

    forward(tokens [1, n] int64, position [n, 1] int64, rows [r] int64) -> logits [r, vocab], and with `features` also the hidden
    states after those layers, [n, len(features) * hidden], for draft heads such as EAGLE's. Layer 0 stands for the embeddings.
    """

    def __init__(self, model: Any, features: Sequence[int] = ()) -> None:
        super().__init__()
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(ATTENTION, attention_forward)
        AttentionMaskInterface.register(ATTENTION, _no_mask)
        model.config._attn_implementation = ATTENTION
        self.config = model.config
        self.model = model
        self.features = tuple(features)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
