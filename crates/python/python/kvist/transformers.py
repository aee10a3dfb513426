"""kvist as the cache and the attention of models of the library `transformers`, on the CPU.

>>> import kvist.transformers                       # registers attn_implementation="kvist"
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvist")
>>> cache = kvist.transformers.KvistCache(model.config, kv="q8")
>>> model.generate(**inputs, past_key_values=cache)

K and V stay packed in kvist's cache, and kvist's kernels read them there. Queries and outputs are the model's own tensors:
float32 is neither copied nor converted.
"""

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from ._errors import ArgumentError
from ._native import Attention

__all__ = ["KvistCache", "attention_forward"]

NAME = "kvist"


class _Layer(CacheLayerMixin):
    """A layer of a `KvistCache`, which holds the tensors of all layers together."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache, index, window):
        super().__init__()
        self._cache, self._index, self.sliding_window = cache, index, window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states, value_states):
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        self._cache._check_model()
        self.is_initialized = True
        # Only the new tokens: the attention function writes them to the cache, and reads the others there.
        key_states._kvist = (self._cache, self._index)
        return key_states, value_states

    def get_mask_sizes(self, query_length):
        return self._cache._seen + query_length, 0

    def get_seq_length(self):
        return self._cache._seen

    def get_max_length(self):
        return -1


class KvistCache(Cache):
    """A cache for ``past_key_values``. The model needs ``attn_implementation="kvist"``.

    Args:
        config: the model's configuration.
        kv, kv_v: storage of K and V, and of V if it differs: f32, f16, bf16, q8, q4, t4, and their variants.
        kind: a kind of cache that holds many sequences: cells, tree or paged.
        max_step_tokens: tokens of the largest forward pass, over the whole batch.
        capacity: tokens that the cache can hold, over the whole batch. Memory is taken as it fills.

    `crop`, `reorder_cache`, `batch_repeat_interleave`, `batch_select_indices` and `fork` copy no K and V.
    """

    def __init__(self, config, *, kv="f16", kv_v=None, kind="cells", max_step_tokens=8192, capacity=1 << 24, recent=16):
        self._config = config
        text = config.get_text_config(decoder=True)
        self._n_layers = text.num_hidden_layers
        if getattr(text, "num_kv_shared_layers", 0):
            raise ArgumentError("kvist does not run models whose layers share K and V in transformers yet")
        window = getattr(text, "sliding_window", None)
        types = getattr(text, "layer_types", None)
        if types is None:
            types = ["full_attention" if window is None else "sliding_attention"] * self._n_layers
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ArgumentError(f"kvist has no layers of the type {', '.join(sorted(unknown))} in transformers")
        heads = text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        windows = [window if kind_ == "sliding_attention" else None for kind_ in types]
        self._core = Attention(
            [(kv_heads, dim, it) for it in windows],
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
        self._begin(windows)

    def _begin(self, windows):
        self._windows = windows
        self._rows, self._seen, self._step = [], 0, None
        super().__init__(layers=[_Layer(self, i, it) for i, it in enumerate(windows)])

    def _check_model(self):
        if self._config._attn_implementation != NAME:
            raise ArgumentError(
                'a KvistCache holds K and V for kvist\'s own attention: load the model with attn_implementation="kvist", or '
                'call model.set_attn_implementation("kvist")'
            )

    @property
    def batch_size(self):
        """Sequences of the batch; -1 before the first pass."""
        return len(self._rows) or -1

    @property
    def kv_bytes(self):
        """Bytes of K and V that are reserved now, of this cache and its forks."""
        return self._core.kv_bytes

    def fork(self):
        """A cache with the same tokens, which shares K and V with this one and copies none."""
        other = KvistCache.__new__(KvistCache)
        other._config, other._n_layers = self._config, self._n_layers
        other._core, other._ids = self._core, self._ids
        other._max_step_tokens = self._max_step_tokens
        other._begin(self._windows)
        other._rows, other._seen = self._copies(self._rows), self._seen
        return other

    def __deepcopy__(self, memo):
        return self.fork()

    def __del__(self):
        for seq in getattr(self, "_rows", ()):
            self._drop(seq)

    def _drop(self, seq):
        if self._core.length(seq) is not None:
            self._core.remove(seq)

    def _copies(self, rows):
        copies = []
        for row in rows:
            seq = self._ids.new()
            if self._core.length(row):
                self._core.fork(row, seq)
            else:
                self._core.new_sequence(seq)
            copies.append(seq)
        return copies

    def _select(self, indices):
        indices = [int(i) for i in indices]
        if indices == list(range(len(self._rows))):
            return
        chosen = self._copies([self._rows[i] for i in indices])
        for seq in self._rows:
            self._drop(seq)
        self._rows = chosen

    def reorder_cache(self, beam_idx):
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices):
        self._select(torch.arange(len(self._rows))[indices].tolist())

    def batch_repeat_interleave(self, repeats):
        self._select([i for i in range(len(self._rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove):
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

    def reset(self):
        for seq in self._rows:
            self._drop(seq)
        self._rows, self._seen = [], 0

    def _attend(self, layer, query, key, value, mask, scale, softcap):
        """One layer of a pass: `query` is `[batch, heads, tokens, dim]`. Returns `[batch, tokens, heads, dim]`."""
        batch, _, n, _ = query.shape
        if layer == 0:
            self._begin_step(batch, n, mask)
        elif self._step is None:
            raise ArgumentError("the first layer of this pass has not run: kvist needs all layers of a pass, in order")
        real = self._step
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if real is True:
            out = torch.empty(query.shape, dtype=query.dtype)
            self._run(layer, query, key, value, out, scale, softcap)
        else:  # padding is left out
            rows = [tensor[real].unsqueeze(0) for tensor in (query, key, value)]
            packed = torch.empty_like(rows[0])
            self._run(layer, *rows, packed, scale, softcap)
            out = torch.zeros(query.shape, dtype=query.dtype)
            out[real] = packed[0]
        if layer == self._n_layers - 1:
            self._core.commit()
            self._step = None
            self._seen += n
        return out

    def _begin_step(self, batch, n, mask):
        if batch * n > self._max_step_tokens:
            raise ArgumentError(
                f"a pass of {batch} x {n} tokens, and the cache takes at most {self._max_step_tokens} at once: give "
                f"max_step_tokens={batch * n}, or prefill in chunks (generate's prefill_chunk_size)"
            )
        if not self._rows:
            self._rows = [self._ids.new() for _ in range(batch)]
            for seq in self._rows:
                self._core.new_sequence(seq)
        if len(self._rows) != batch:
            raise ArgumentError(f"the cache holds a batch of {len(self._rows)}, and the pass has {batch}")
        real, counts = True, [n] * batch
        if mask is not None:
            new = mask[:, -n:].bool()
            if not bool(new.all()):
                real, counts = new, new.sum(dim=1).tolist()
        spans = [(seq, count) for seq, count in zip(self._rows, counts) if count]
        if not spans:
            raise ArgumentError("every token of this pass is padding")
        self._core.begin(spans)
        self._step = real

    def _run(self, layer, query, key, value, out, scale, softcap):
        arrays = [_array(tensor) for tensor in (query, key, value, out)]
        self._core.attend(layer, *arrays, scale=scale, softcap=softcap)


class _Ids:
    """Ids of the sequences of a cache and its forks."""

    def __init__(self):
        self._next = 0

    def new(self):
        self._next += 1
        return self._next


def _array(tensor):
    """The tensor's memory as a NumPy array. bfloat16, which NumPy lacks, is seen as uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, **options):
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
    if query.device.type != "cpu":
        raise ArgumentError(f"kvist computes on the CPU, and the model is on {query.device}")
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ArgumentError(f"kvist's attention takes float32, float16 and bfloat16, not {query.dtype}")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ArgumentError("kvist's attention takes masks of padding, [batch, tokens], and no other masks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = query.detach(), key.detach(), value.detach()
    return cache._attend(layer, query, key, value, attention_mask, scale, softcap), None


def _mask(batch_size, q_length, kv_length, attention_mask=None, **_):
    """The mask of padding as the model got it: what is causal and what is in a window, the cache knows."""
    return attention_mask


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, _mask)
