"""kvist as the cache and the attention of models of the library `transformers`, on the CPU.

>>> import kvist.transformers                       # registers attn_implementation="kvist"
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvist")
>>> cache = kvist.transformers.KvistCache(model.config, kv="q8")
>>> model.generate(**inputs, past_key_values=cache)

K and V stay packed in kvist's cache, and kvist's kernels read them there. Queries and outputs are the model's own tensors:
float32 is neither copied nor converted.

The cache also works with other attention ("eager", "sdpa"): then it keeps K and V packed and decodes them for every pass, which
saves memory and costs time.
"""

from __future__ import annotations

from typing import Any, Iterable, Optional, Union

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from ._errors import ArgumentError
from ._native import Attention
from ._tensors import as_array, check_rows, layers_of

__all__ = ["KvistCache", "attention_forward"]

NAME = "kvist"
INCOMPLETE = "the first layer of this pass has not run: kvist needs all layers of a pass, in order"


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of a `KvistCache`, which holds the tensors of all layers together."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: KvistCache, index: int, window: Optional[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index, self.sliding_window = cache, index, window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.is_initialized = True
        if self._cache._stores_only():
            return self._cache._store(self._index, key_states, value_states)
        # Only the new tokens: the attention function writes them to the cache, and reads the others there.
        key_states._kvist = (self._cache, self._index)  # type: ignore[attr-defined]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self._cache._seen
        if self.sliding_window is None or not self._cache._stores_only():
            return seen + query_length, 0
        past = self._cache._past(self._index)
        return past + query_length, seen - past

    def get_seq_length(self) -> int:
        return self._cache._seen

    def get_max_length(self) -> int:
        return -1


class KvistCache(Cache):
    """A cache for ``past_key_values``. It is fast with ``attn_implementation="kvist"``, and works with "eager" and "sdpa".

    Args:
        config: the model's configuration.
        kv, kv_v: storage of K and V, and of V if it differs: f32, f16, bf16, q8, q4, t4, and their variants.
        kind: a kind of cache that holds many sequences: cells, tree or paged.
        max_step_tokens: tokens of the largest forward pass, over the whole batch.
        capacity: tokens that the cache can hold, over the whole batch. Memory is taken as it fills.

    `crop`, `reorder_cache`, `batch_repeat_interleave`, `batch_select_indices` and `fork` copy no K and V.
    """

    def __init__(
        self,
        config: Any,
        *,
        kv: str = "f16",
        kv_v: Optional[str] = None,
        kind: str = "cells",
        max_step_tokens: int = 8192,
        capacity: int = 1 << 24,
        recent: int = 16,
    ) -> None:
        self._config = config
        layers, heads = layers_of(config)
        self._n_layers = len(layers)
        self._core = Attention(
            layers,
            heads,
            kind=kind,
            kv=kv,
            kv_v=kv_v,
            capacity=capacity,
            max_step_tokens=max_step_tokens,
            recent=recent,
        )
        self._ids = _Ids()
        self._max_step_tokens = max_step_tokens
        self._begin([window for _, _, window in layers])

    def _begin(self, windows: list[Optional[int]]) -> None:
        self._windows = windows
        # Whether the model attends itself, and the cache only keeps K and V for it. Known from the first pass on.
        self._stores: Optional[bool] = None
        self._rows: list[int] = []  # the sequence of each row of the batch
        self._seen = 0
        # Of the pass in flight: which tokens are no padding, [batch, tokens]; True for all.
        self._step: Union[None, bool, torch.Tensor] = None
        super().__init__(layers=[_Layer(self, i, it) for i, it in enumerate(windows)])

    def _stores_only(self) -> bool:
        """Whether the model attends itself. A cache cannot change between the two: one leaves out padding, the other keeps it."""
        stores: bool = self._config._attn_implementation != NAME
        if self._stores is None or not self._seen:
            self._stores = stores
        elif self._stores != stores:
            raise ArgumentError("the attention of the model changed while this cache held tokens: use a new cache, or reset() it")
        return stores

    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer of a pass for a model that attends itself: returns K and V of the tokens that the layer sees."""
        check_rows(key)
        batch, heads, n, dim = key.shape
        past = self._past(layer)
        if layer == 0:
            self._begin_step(batch, n, None)
        elif self._step is None:
            raise ArgumentError(INCOMPLETE)
        # Decoded as float32, and given to the model in its own dtype. New tokens are returned as they came.
        old = [torch.empty(batch, heads, past, dim) for _ in range(2)]
        k, v, past_k, past_v = (as_array(tensor.detach().transpose(1, 2)) for tensor in (key, value, *old))
        self._core.store(layer, k, v, past_k, past_v)
        if layer == self._n_layers - 1:
            self._core.commit()
            self._step = None
            self._seen += n
        if not past:
            return key, value
        k, v = (torch.cat([was.to(new.dtype), new], dim=2) for was, new in zip(old, (key, value)))
        return k, v

    def _past(self, layer: int) -> int:
        """Tokens before a pass that its first token sees in a layer."""
        window = self._windows[layer]
        return self._seen if window is None else min(self._seen, window - 1)

    @property
    def batch_size(self) -> int:
        """Sequences of the batch; -1 before the first pass."""
        return len(self._rows) or -1

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that are reserved now, of this cache and its forks."""
        return self._core.kv_bytes

    def fork(self) -> KvistCache:
        """A cache with the same tokens, which shares K and V with this one and copies none."""
        other = KvistCache.__new__(KvistCache)
        other._config, other._n_layers = self._config, self._n_layers
        other._core, other._ids = self._core, self._ids
        other._max_step_tokens = self._max_step_tokens
        other._begin(self._windows)
        other._rows, other._seen, other._stores = self._copies(self._rows), self._seen, self._stores
        return other

    def __deepcopy__(self, memo: object) -> KvistCache:
        return self.fork()

    def __del__(self) -> None:
        # The collector may call this between two layers of another cache's pass, which a removal would abandon.
        if ids := getattr(self, "_ids", None):
            ids.collected.extend(getattr(self, "_rows", ()))

    def _drop_collected(self) -> None:
        """Removes the sequences of forks that were collected. Only where no pass is in flight."""
        while self._ids.collected:
            self._drop(self._ids.collected.pop())

    def _drop(self, seq: int) -> None:
        if self._core.length(seq) is not None:
            self._core.remove(seq)

    def _copies(self, rows: list[int]) -> list[int]:
        self._drop_collected()
        copies = []
        for row in rows:
            seq = self._ids.new()
            if self._core.length(row):
                self._core.fork(row, seq)
            else:
                self._core.new_sequence(seq)
            copies.append(seq)
        return copies

    def _select(self, chosen_rows: Iterable[int]) -> None:
        indices = [int(i) for i in chosen_rows]
        if indices == list(range(len(self._rows))):
            return
        chosen = self._copies([self._rows[i] for i in indices])
        for seq in self._rows:
            self._drop(seq)
        self._rows = chosen

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(torch.arange(len(self._rows))[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([i for i in range(len(self._rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Removes ``-tokens_to_remove`` tokens from the end of every sequence."""
        if tokens_to_remove > 0:
            raise ArgumentError(f"crop({tokens_to_remove}): give a negative number, that of the tokens to remove")
        n = -tokens_to_remove
        if n > self._seen:
            raise ArgumentError(f"crop({tokens_to_remove}): the cache holds {self._seen} tokens")
        if n == 0:
            return
        for seq in self._rows:
            self._core.truncate(seq, max((self._core.length(seq) or 0) - n, 0))
        self._seen -= n

    def reset(self) -> None:
        self._drop_collected()
        for seq in self._rows:
            self._drop(seq)
        self._rows, self._seen = [], 0

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Optional[torch.Tensor],
        scale: float,
        softcap: Optional[float],
    ) -> torch.Tensor:
        """One layer of a pass: `query` is `[batch, heads, tokens, dim]`. Returns `[batch, tokens, heads, dim]`."""
        batch, _, n, _ = query.shape
        if layer == 0:
            self._begin_step(batch, n, mask)
        elif self._step is None:
            raise ArgumentError(INCOMPLETE)
        real = self._step
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if real is True:
            out = torch.empty(query.shape, dtype=query.dtype)
            self._run(layer, query, key, value, out, scale, softcap)
        else:  # padding is left out
            q, k, v = (tensor[real].unsqueeze(0) for tensor in (query, key, value))
            packed = torch.empty_like(q)
            self._run(layer, q, k, v, packed, scale, softcap)
            out = torch.zeros(query.shape, dtype=query.dtype)
            out[real] = packed[0]
        if layer == self._n_layers - 1:
            self._core.commit()
            self._step = None
            self._seen += n
        return out

    def _begin_step(self, batch: int, n: int, mask: Optional[torch.Tensor]) -> None:
        if batch * n > self._max_step_tokens:
            raise ArgumentError(
                f"a pass of {batch} x {n} tokens, and the cache takes at most {self._max_step_tokens} at once: give "
                f"max_step_tokens={batch * n}, or prefill in chunks (generate's prefill_chunk_size)"
            )
        self._drop_collected()
        if not self._rows:
            self._rows = [self._ids.new() for _ in range(batch)]
            for seq in self._rows:
                self._core.new_sequence(seq)
        if len(self._rows) != batch:
            raise ArgumentError(f"the cache holds a batch of {len(self._rows)}, and the pass has {batch}")
        real: Union[bool, torch.Tensor] = True
        counts = [n] * batch
        if mask is not None:
            new = mask[:, -n:].bool()
            if not bool(new.all()):
                real, counts = new, new.sum(dim=1).tolist()
        spans = [(seq, count) for seq, count in zip(self._rows, counts) if count]
        if not spans:
            raise ArgumentError("every token of this pass is padding")
        self._core.begin(spans)
        self._step = real

    def _run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        softcap: Optional[float],
    ) -> None:
        q, k, v, into = (as_array(tensor) for tensor in (query, key, value, out))
        self._core.attend(layer, q, k, v, into, scale=scale, softcap=softcap)


class _Ids:
    """Ids of the sequences of a cache and its forks."""

    def __init__(self) -> None:
        self._next = 0
        # Of caches that are gone: removed before the next pass.
        self.collected: list[int] = []

    def new(self) -> int:
        self._next += 1
        return self._next


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    softcap: Optional[float] = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function behind ``attn_implementation="kvist"``: causal, with windows, padding and soft caps."""
    cache, layer = getattr(key, "_kvist", (None, None))
    if cache is None:
        raise ArgumentError('attn_implementation="kvist" needs past_key_values=kvist.transformers.KvistCache(model.config)')
    if dropout:
        raise ArgumentError("kvist's attention has no dropout: call model.eval()")
    if options.get("output_attentions"):
        raise ArgumentError("kvist's attention never holds its weights: output_attentions is not supported")
    if options.get("s_aux") is not None or options.get("position_bias") is not None:
        raise ArgumentError("kvist's attention in transformers takes no sinks and no position bias yet")
    if torch.is_grad_enabled() and query.requires_grad:
        raise ArgumentError("kvist's attention has no gradients: use torch.no_grad() or model.generate")
    check_rows(query)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ArgumentError("kvist's attention takes masks of padding, [batch, tokens], and no other masks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = query.detach(), key.detach(), value.detach()
    return cache._attend(layer, query, key, value, attention_mask, scale, softcap), None


def _mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Optional[torch.Tensor] = None, **_: object
) -> Optional[torch.Tensor]:
    """The mask of padding as the model got it: what is causal and what is in a window, the cache knows."""
    return attention_mask


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, _mask)
