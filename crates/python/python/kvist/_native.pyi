"""Types of the extension module. The guide is docs/python.md."""

import os
import pathlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Optional, TypedDict, Union, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Required, Self, Unpack

__version__: str
KINDS: list[str]

_Path = Union[str, os.PathLike[str]]
Prompt = Union[str, Sequence[int], npt.NDArray[np.integer[Any]]]
FinishReason = Literal["end_of_text", "stop", "max_tokens", "cache_full", "cancelled"]
Keep = Sequence[Optional[Union[int, Sequence[int]]]]

class _Sampling(TypedDict, total=False):
    max_tokens: int
    temperature: Optional[float]
    top_k: Optional[int]
    top_p: Optional[float]
    min_p: Optional[float]
    repeat_penalty: Optional[float]
    repeat_last: Optional[int]
    seed: Optional[int]
    stop: Union[str, Sequence[str]]
    ignore_eos: bool

class _Storage(TypedDict, total=False):
    kv: str
    kv_v: Optional[str]
    context: Optional[int]
    window: Optional[int]
    sinks: int
    recent: int
    backend: Optional[str]

class _Steps(_Storage, total=False):
    chunk: Optional[int]
    max_rows: int

class _Drafts(TypedDict, total=False):
    speculate: Optional[Literal["auto", "ngram", "suffix", "draft", "eagle", "off"]]
    draft_model: Optional[Union[Model, _Path]]
    draft_tokens: Optional[int]
    draft_depth: Optional[int]
    draft_width: Optional[int]

class _Session(_Steps, _Drafts, total=False):
    keep: Optional[str]

class _Resumed(_Steps, _Drafts, total=False): ...

class _BatchStorage(_Storage, _Drafts, total=False):
    keep: Optional[str]

class _Speculation(TypedDict, total=False):
    target_passes: Required[int]
    drafts: Required[int]
    drafted: Required[int]
    accepted: Required[int]
    accepted_per_position: Required[list[int]]
    failure: str

class _StoreStats(TypedDict):
    name: str
    bytes: Optional[int]
    capacity_bytes: Optional[int]
    loaded_tokens: int
    errors: int
    unwritten_blocks: int
    damaged_blocks: int
    evicted_blocks: int
    expired_blocks: int

class _TierStats(TypedDict):
    loads: int
    failed_loads: int
    late_loads: int
    wasted_tokens: int
    declined_tokens: int
    regained_tokens: int
    load_s: float
    stored_blocks: int
    failed_blocks: int
    skipped_blocks: int
    load_bytes: int
    store_bytes: int
    pinned_bytes: Optional[int]
    pinned_used_bytes: Optional[int]
    unpinned_blocks: Optional[int]
    stores: list[_StoreStats]

class _Retention(TypedDict, total=False):
    pin: Optional[bool]
    ttl_s: Optional[float]
    priority: Optional[int]

class _Forgotten(TypedDict):
    deleted_blocks: int
    pending_tiers: list[str]

class _BatchStats(TypedDict, total=False):
    running: Required[int]
    waiting: Required[int]
    capacity_cells: Required[int]
    used_cells: Required[int]
    evictable_cells: Required[int]
    free_cells: Required[int]
    stored_blocks: Required[int]
    evicted_blocks: Required[int]
    retained_tokens: Required[int]
    recent_hit_tokens: Required[int]
    recent_prompt_tokens: Required[int]
    kv_bytes: Required[int]
    kv_bytes_read: Required[int]
    busy_s: Required[float]
    removed_tokens: int
    speculation: _Speculation
    tiers: _TierStats

class _SamplingAndStorage(_Sampling, _Session, total=False): ...

@final
class Model:
    def __new__(
        cls,
        path: Optional[Union[str, os.PathLike[str]]] = None,
        *,
        weights: Literal["as-stored", "f32", "q8_0", "int8"] = "as-stored",
        context: Optional[int] = None,
        threads: Optional[int] = None,
        deterministic: bool = False,
        fast_prefill: bool = False,
        memory: Optional[Union[int, str]] = None,
        backend: str = "cpu",
        mmap: bool = True,
        offline: bool = False,
    ) -> Self: ...
    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def end_tokens(self) -> list[int]: ...
    @property
    def has_chat_template(self) -> bool: ...
    def encode(self, text: str, *, special: bool = True) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def session(
        self,
        *,
        kind: Optional[str] = None,
        prefix: Optional[Union[Prefix, _Path]] = None,
        **options: Unpack[_Session],
    ) -> Session: ...
    def resume(
        self,
        saved: Union[SavedSession, _Path],
        *,
        kind: Optional[str] = None,
        **options: Unpack[_Resumed],
    ) -> Session: ...
    def freeze_prefix(
        self,
        prompt: Prompt,
        path: _Path,
        *,
        system: bool = False,
        **options: Unpack[_Steps],
    ) -> Prefix: ...
    def share_prefix(
        self,
        prompt: Prompt,
        *,
        system: bool = False,
        **options: Unpack[_Steps],
    ) -> Prefix: ...
    def generate(self, prompt: Prompt, **options: Unpack[_SamplingAndStorage]) -> Generation: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Optional[Sequence[Mapping[str, Any]]] = None,
        template: Optional[Mapping[str, Any]] = None,
        **options: Unpack[_SamplingAndStorage],
    ) -> Generation: ...
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Optional[Sequence[Mapping[str, Any]]] = None,
        template: Optional[Mapping[str, Any]] = None,
    ) -> list[int]: ...

@final
class Session:
    def generate(self, prompt: Optional[Prompt] = None, **options: Unpack[_Sampling]) -> Generation: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Optional[Sequence[Mapping[str, Any]]] = None,
        template: Optional[Mapping[str, Any]] = None,
        **options: Unpack[_Sampling],
    ) -> Generation: ...
    def forward(
        self,
        tokens: Prompt,
        *,
        rows: Literal["last", "all"] = "last",
        parents: Optional[Sequence[Optional[int]]] = None,
    ) -> npt.NDArray[np.float32]: ...
    def accept(self, path: Sequence[int]) -> None: ...
    def fork(self) -> Session: ...
    def rollback(self, n: int) -> None: ...
    def save(self, path: _Path, *, messages: Optional[Sequence[Mapping[str, str]]] = None) -> None: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def removed_tokens(self) -> int: ...
    @property
    def speculation(self) -> Optional[_Speculation]: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def kind(self) -> str: ...
    def report(self) -> list[dict[str, Any]]: ...
    def __len__(self) -> int: ...

@final
class SavedSession:
    def __new__(cls, path: _Path) -> Self: ...
    @property
    def path(self) -> pathlib.Path: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def messages(self) -> list[dict[str, str]]: ...
    @property
    def kind(self) -> Optional[str]: ...
    def __len__(self) -> int: ...

@final
class Prefix:
    def __new__(cls, path: _Path) -> Self: ...
    @property
    def path(self) -> Optional[pathlib.Path]: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def system(self) -> Optional[str]: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...

@final
class Generation(Iterator[str], AsyncIterator[str]):
    def __next__(self) -> str: ...
    async def __anext__(self) -> str: ...
    def result(self) -> str: ...
    def close(self) -> None: ...
    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def finish_reason(self) -> Optional[FinishReason]: ...
    @property
    def times(self) -> tuple[float, float]: ...

@final
class Batch:
    def __new__(
        cls,
        model: Model,
        *,
        max_batch: int = 32,
        batch_tokens: Optional[int] = None,
        block_tokens: int = 16,
        policy: Literal["fcfs", "sjf", "srpt", "edf", "laxity", "priority"] = "fcfs",
        prefix_cache: bool = True,
        max_queue: int = 4096,
        prefix: Optional[Union[Prefix, _Path]] = None,
        tiers: Optional[Tiers] = None,
        **options: Unpack[_BatchStorage],
    ) -> Self: ...
    def submit(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        salt: str = "",
        cache: Optional[_Retention] = None,
        **options: Unpack[_Sampling],
    ) -> BatchGeneration: ...
    def generate(self, prompts: Sequence[Prompt], **options: Unpack[_Sampling]) -> list[str]: ...
    def stats(self) -> _BatchStats: ...
    def forget(self, salt: str = "") -> _Forgotten: ...
    def resize(self, tokens: int, *, timeout: float = 30.0) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

@final
class BatchGeneration(Iterator[str], AsyncIterator[str]):
    def __next__(self) -> str: ...
    async def __anext__(self) -> str: ...
    def result(self) -> str: ...
    def close(self) -> None: ...
    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def loaded_tokens(self) -> dict[str, int]: ...
    @property
    def finish_reason(self) -> Optional[Union[FinishReason, Literal["failed"]]]: ...

@final
class Tiers:
    built: list[str]
    def __new__(
        cls,
        *,
        ram: Optional[Union[int, str]] = None,
        ram_packed: bool = False,
        disk: Optional[_Path] = None,
        disk_size: Optional[Union[int, str]] = None,
        store: Optional[str] = None,
        write: Literal["through", "back"] = "through",
        load: Literal["auto", "always"] = "auto",
        grace: float = 0.25,
    ) -> Self: ...

@final
class Cache:
    def __new__(
        cls,
        kind: str,
        capacity: int,
        *,
        windows: Optional[Sequence[Optional[int]]] = None,
        sinks: int = 0,
        max_step_tokens: int = 256,
    ) -> Self: ...
    @staticmethod
    def paged(
        capacity: int,
        *,
        block_tokens: int = 16,
        windows: Optional[Sequence[Optional[int]]] = None,
        sinks: int = 0,
        prefix: bool = True,
        policy: str = "lru",
        half_life: Optional[str] = None,
        rollback_tokens: int = 0,
    ) -> Cache: ...
    def new_sequence(self, seq: int) -> None: ...
    def open(self, seq: int, tokens: Sequence[int], *, salt: str = "") -> int: ...
    def lookup(self, tokens: Sequence[int], *, salt: str = "") -> int: ...
    def explain(self, tokens: Sequence[int], *, salt: str = "") -> tuple[str, int]: ...
    def store(self, seq: int, tokens: Sequence[int]) -> int: ...
    def evict(self, tokens: int) -> int: ...
    def fork(self, src: int, dst: int) -> None: ...
    def remove(self, seq: int, start: int = 0, end: Optional[int] = None) -> None: ...
    def rollback(self, seq: int, n: int) -> None: ...
    def clear(self) -> None: ...
    def length(self, seq: int) -> Optional[int]: ...
    def commit_path(self, seq: int, path: Sequence[int]) -> None: ...
    def block_table(self, seq: int, *, group: int = 0) -> npt.NDArray[np.int32]: ...
    def begin(self, spans: Sequence[tuple[int, Union[int, Sequence[Optional[int]]]]]) -> Step: ...
    def watch(self, on: bool = True) -> None: ...
    def events(self) -> list[dict[str, Any]]: ...
    def prefix_events(self) -> list[dict[str, Any]]: ...
    def report(self) -> list[dict[str, Any]]: ...
    @property
    def free_cells(self) -> int: ...
    @property
    def capacity_cells(self) -> list[int]: ...
    @property
    def n_groups(self) -> int: ...

@final
class Step:
    def group(self, group: int) -> Step: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def slots(self) -> npt.NDArray[np.uint32]: ...
    @property
    def positions(self) -> npt.NDArray[np.uint32]: ...
    @property
    def copies(self) -> npt.NDArray[np.uint32]: ...
    @property
    def cells_end(self) -> int: ...
    @property
    def query_start(self) -> npt.NDArray[np.uint32]: ...
    @property
    def kv_len(self) -> npt.NDArray[np.uint32]: ...
    def block_tables(self, block_tokens: Optional[int] = None) -> npt.NDArray[np.int32]: ...
    def mask(self) -> npt.NDArray[np.bool_]: ...
    def moves(self, keep: Keep) -> npt.NDArray[np.uint32]: ...
    def commit(self, keep: Optional[Keep] = None) -> None: ...
    def drop(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

# Rows of any strides; float32, float16, or bfloat16 as uint16.
_Rows = Union[npt.NDArray[np.float32], npt.NDArray[np.float16], npt.NDArray[np.uint16]]

@final
class Attention:
    def __new__(
        cls,
        layers: Sequence[tuple[int, int, Optional[int]]],
        n_heads: int,
        *,
        kind: str = "cells",
        capacity: int = 1 << 24,
        max_step_tokens: int = 4096,
        kv: str = ...,
        kv_v: Optional[str] = ...,
        recent: int = ...,
        sinks: int = ...,
    ) -> Self: ...
    def new_sequence(self, seq: int) -> None: ...
    def fork(self, src: int, dst: int) -> None: ...
    def remove(self, seq: int) -> None: ...
    def truncate(self, seq: int, n: int) -> None: ...
    def length(self, seq: int) -> Optional[int]: ...
    @property
    def kv_bytes(self) -> int: ...
    def report(self) -> list[dict[str, Any]]: ...
    def begin(self, spans: Sequence[tuple[int, int]]) -> None: ...
    def attend(
        self,
        layer: int,
        q: _Rows,
        k: _Rows,
        v: _Rows,
        out: _Rows,
        *,
        scale: float,
        softcap: Optional[float] = None,
    ) -> None: ...
    def store(
        self,
        layer: int,
        k: _Rows,
        v: _Rows,
        past_k: npt.NDArray[np.float32],
        past_v: npt.NDArray[np.float32],
    ) -> None: ...
    def commit(self) -> None: ...

@final
class Simulation:
    report: str
    text: str
    requests_csv: str
    page: str
    pictures: list[tuple[str, str]]
    remarks: list[str]

def run_program(arguments: Sequence[str], file: Union[str, os.PathLike[str]]) -> int: ...
def simulate(arguments: Sequence[str]) -> Simulation: ...
def sweep(arguments: Sequence[str], file: Union[str, os.PathLike[str]]) -> str: ...
