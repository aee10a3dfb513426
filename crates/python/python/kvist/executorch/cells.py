"""kvist's bookkeeping behind the API of ExecuTorch's reference caches: which cell a token takes and what a query sees come from
kvist, K and V lie in torch tensors. The wheel's own tests run against these classes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_bool, c_char_p, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
from executorch.extension.llm.cache.reference_cache import MAX_SEQS, AttendSpec, CacheConfig, MaskKind

from .runtime import library

_END = 0xFFFFFFFF


class _Layer(ctypes.Structure):
    _fields_ = [("group", c_uint16), ("owner", c_uint16), ("n_kv_heads", c_uint32), ("head_dim", c_uint32)]


class _Group(ctypes.Structure):
    _fields_ = [("capacity_tokens", c_uint32), ("window", c_uint32), ("sinks", c_uint32)]


class _Options(ctypes.Structure):
    _fields_ = [
        ("kind", c_char_p), ("backend", c_char_p), ("k", c_char_p), ("v", c_char_p), ("layers", POINTER(_Layer)), ("n_layers", c_size_t),
        ("groups", POINTER(_Group)), ("n_groups", c_size_t), ("n_heads", c_uint32), ("max_step_tokens", c_uint32), ("threads", c_uint32),
        ("memory_bytes", c_uint64), ("min_chunk_tokens", c_uint32),
    ]


class _Span(ctypes.Structure):
    _fields_ = [("seq", c_uint32), ("start", c_uint32), ("n_tokens", c_uint32), ("parents", c_void_p)]


class _Occupancy(ctypes.Structure):
    _fields_ = [("capacity_cells", c_uint32), ("used_cells", c_uint32), ("high_water", c_uint32), ("block_tokens", c_uint32)]


def _kvist() -> ctypes.CDLL:
    library()
    lib = ctypes.CDLL("libkvist.so")  # loaded already, as a dependency of the kernel's library
    lib.kvist_last_error.restype = c_char_p
    return lib


class _Book:
    """A kvist cache without bytes: one layer per window."""

    def __init__(self, kind: str, capacity: int, windows: Sequence[int]) -> None:
        self._lib = _kvist()
        self._cache = c_void_p()
        layers = (_Layer * len(windows))(*[_Layer(g, g, 1, 1) for g in range(len(windows))])
        groups = (_Group * len(windows))(*[_Group(capacity, window, 0) for window in windows])
        options = _Options(kind.encode(), None, None, None, layers, len(layers), groups, len(groups), 1, capacity, 1, 0, 0)
        self._check(self._lib.kvist_cache_new(byref(options), byref(self._cache)))
        self._n_groups = len(windows)

    def __del__(self) -> None:
        self._lib.kvist_cache_free(self._cache)

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self._lib.kvist_last_error().decode())

    def call(self, name: str, *arguments: Any) -> None:
        self._check(getattr(self._lib, f"kvist_cache_{name}")(self._cache, *arguments))

    def has(self, seq: int) -> bool:
        return self._length(seq) is not None

    def length(self, seq: int) -> int:
        return self._length(seq) or 0

    def _length(self, seq: int) -> Optional[int]:
        length = c_uint32()
        status = self._lib.kvist_cache_length(self._cache, c_uint32(seq), byref(length), byref(c_uint32()))
        return length.value if status == 0 else None

    def free_cells(self) -> int:
        occupancy = _Occupancy()
        self.call("occupancy", 0, byref(occupancy))
        free: int = occupancy.capacity_cells - occupancy.used_cells
        return free

    def step(
        self, spans: Sequence[Tuple[int, int, int]]
    ) -> Tuple[List[int], List[torch.Tensor], List[Tuple[bool, bool, int]]]:
        """Begins and commits a step of (seq, start, n) spans. Returns the cells of the tokens, and per window the mask [tokens, cells]
        and whether it is one run of cells (exists, causal, first cell)."""

        class Window(ctypes.Structure):
            _fields_ = [("exists", c_bool), ("causal", c_bool), ("start", c_uint32), ("len", c_uint32)]

        lib, cache = self._lib, self._cache
        array = (_Span * len(spans))(*[_Span(*span, None) for span in spans])
        self._check(lib.kvist_step_begin(cache, array, c_size_t(len(spans))))
        try:
            cells, n, end = POINTER(c_uint32)(), c_size_t(), c_uint32()
            self._check(lib.kvist_step_writes(cache, 0, byref(cells), byref(n), byref(end)))
            placed = cells[: n.value]
            masks, windows = [], []
            for group in range(self._n_groups):
                bits, rows, columns, window = POINTER(c_bool)(), c_size_t(), c_size_t(), Window()
                self._check(lib.kvist_step_mask(cache, group, byref(bits), byref(rows), byref(columns)))
                mask = torch.tensor(bits[: rows.value * columns.value], dtype=torch.bool)
                masks.append(mask.view(rows.value, columns.value))
                self._check(lib.kvist_step_window(cache, group, byref(window)))
                windows.append((window.exists, window.causal, window.start))
                self._check(lib.kvist_step_layer_ran(cache, group))
            self._check(lib.kvist_step_commit(cache, None, c_size_t(0)))
        except BaseException:
            lib.kvist_step_drop(cache)
            raise
        return placed, masks, windows


class _Rows:
    """K and V of one layer: [1, heads, cells, dim], as many cells as were ever used."""

    def __init__(self, config: CacheConfig) -> None:
        self.k = torch.zeros(config.batch_size, config.n_kv_heads, 0, config.head_dim, dtype=config.dtype)
        self.v = self.k.clone()

    def write(
        self, cells: Sequence[int], k: torch.Tensor, v: torch.Tensor, end: int
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        more = end - self.k.shape[2]
        if more > 0:
            self.k = torch.nn.functional.pad(self.k, (0, 0, 0, more))
            self.v = torch.nn.functional.pad(self.v, (0, 0, 0, more))
        self.k[:, :, cells] = k.to(self.k.dtype)
        self.v[:, :, cells] = v.to(self.v.dtype)
        return self.k[:, :, :end], self.v[:, :, :end]


class ContiguousCache:
    """One sequence per layer, with the API of `ContiguousReferenceCache`."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.reset()

    def reset(self) -> None:
        layers = range(self.config.n_layers)
        self._books = [_Book("contiguous", self.config.capacity, [self.config.policy_for(l).window]) for l in layers]
        self._rows = [_Rows(self.config) for _ in layers]

    def used(self, layer_id: int) -> int:
        return self._books[layer_id].length(0)

    def update_and_fetch(
        self, layer_id: int, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, AttendSpec]:
        n, start = k.shape[-2], self.used(layer_id)
        if int(position[0, 0]) != start:
            raise RuntimeError(f"the sequence continues at position {start}, not {int(position[0, 0])}")
        cells, (mask,), ((exists, causal, first),) = self._books[layer_id].step([(0, start, n)])
        keys, values = self._rows[layer_id].write(cells, k, v, mask.shape[1])
        if not exists or first > 0 or (causal and n < mask.shape[1]):
            return keys, values, AttendSpec(MaskKind.EXPLICIT, mask)
        return keys, values, AttendSpec(MaskKind.CAUSAL if causal else MaskKind.NONE)


class CellCache:
    """Many sequences over one pool of cells, with the API of `CellReferenceCache`."""

    def __init__(self, config: CacheConfig) -> None:
        if config.batch_size != 1:
            raise ValueError("the batch lies on the axis of tokens: batch_size must be 1")
        self.config = config
        self._windows = list(dict.fromkeys(config.policy_for(l).window for l in range(config.n_layers)))
        self.reset()

    def reset(self) -> None:
        self._book = _Book("cells", self.config.capacity, self._windows)
        self._rows = [_Rows(self.config) for _ in range(self.config.n_layers)]
        self._declared: Optional[List[int]] = None
        self._plan: Optional[Tuple[List[int], Dict[int, torch.Tensor]]] = None
        self._served: Set[int] = set()

    @staticmethod
    def _seq(seq_id: int) -> int:
        if not 0 <= seq_id < MAX_SEQS:
            raise ValueError(f"seq_id {seq_id} outside [0, {MAX_SEQS})")
        return seq_id

    def free_cells(self) -> int:
        return self._book.free_cells()

    def can_extend(self, n: int = 1) -> bool:
        return self.free_cells() >= n

    def seq_len(self, seq_id: int) -> int:
        return self._book.length(self._seq(seq_id))

    def begin_step(self, seq_ids: Sequence[int]) -> None:
        if not seq_ids:
            raise ValueError("a step carries at least one token")
        for seq_id in seq_ids:
            self._seq(seq_id)
        if not self.can_extend(len(seq_ids)):
            raise RuntimeError(f"the cache is full: {len(seq_ids)} tokens need as many cells, {self.free_cells()} are free")
        self._declared, self._plan = list(seq_ids), None
        self._served.clear()

    def seq_cp(self, src_id: int, dst_id: int, upto: Optional[int] = None) -> None:
        src, dst = self._seq(src_id), self._seq(dst_id)
        self._book.call("copy", c_uint32(src), c_uint32(dst), c_uint32(0), c_uint32(_END if upto is None else upto))
        self._plan = None

    def seq_rm(self, seq_id: int, p0: int = 0, p1: Optional[int] = None) -> None:
        if self._book.has(self._seq(seq_id)):
            self._book.call("remove", c_uint32(seq_id), c_uint32(p0), c_uint32(_END if p1 is None else p1))
        self._plan = None

    def update_and_fetch(
        self, layer_id: int, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, AttendSpec]:
        if layer_id in self._served:
            raise RuntimeError(f"layer {layer_id} served twice for one step: begin_step must precede every forward")
        if self._plan is None:
            self._plan = self._place(position)
        self._served.add(layer_id)
        cells, masks = self._plan
        mask = masks[self.config.policy_for(layer_id).window]
        keys, values = self._rows[layer_id].write(cells, k, v, mask.shape[1])
        return keys, values, AttendSpec(MaskKind.EXPLICIT, mask)

    def _place(self, position: torch.Tensor) -> Tuple[List[int], Dict[int, torch.Tensor]]:
        declared, self._declared = self._declared, None
        if declared is None:
            raise RuntimeError("no step declared: begin_step must precede every forward")
        if position.shape[-1] != 1:
            raise NotImplementedError(f"one position per token, got {position.shape[-1]}")
        positions = position.reshape(-1).tolist()
        if len(positions) != len(declared):
            raise ValueError(f"begin_step declared {len(declared)} tokens, the forward carries {len(positions)}")
        # kvist takes the tokens of a sequence together; `order` is where they lie in the batch.
        order, spans = [], []
        for seq in dict.fromkeys(declared):
            rows = [i for i, of in enumerate(declared) if of == seq]
            first = positions[rows[0]]
            if [positions[i] for i in rows] != list(range(first, first + len(rows))):
                raise ValueError(f"the positions of sequence {seq} are not consecutive")
            order += rows
            spans.append((seq, first, len(rows)))
            if not self._book.has(seq):
                self._book.call("open", c_uint32(seq))
        placed, masks, _ = self._book.step(spans)
        cells = [0] * len(order)
        for row, cell in zip(order, placed):
            cells[row] = cell
        inverse = torch.tensor(order).argsort()
        return cells, {window: mask[inverse] for window, mask in zip(self._windows, masks)}
