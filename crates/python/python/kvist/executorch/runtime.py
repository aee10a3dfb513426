"""Programs and their caches, over ExecuTorch's Python runtime."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch

from .export import SCHEMA_VERSION
from .needs import needs_executorch

_I32P = ctypes.POINTER(ctypes.c_int32)
# ScalarType of the runtime. Byte stands for codes of `bits` bits.
_DTYPES = {torch.float32: 6, torch.float16: 5, torch.bfloat16: 15, torch.uint8: 0}


class CacheError(RuntimeError):
    """A cache refused. Nothing has changed."""


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "capacity", "n_layers", "n_kv_heads", "head_dim", "min_chunk", "kv_dtype", "group_size", "bits",
            "max_step_tokens", "threads",
        )),
        ("windows", _I32P),
        ("n_windows", ctypes.c_int32),
    ]


_library: Optional[ctypes.CDLL] = None


def library() -> ctypes.CDLL:
    """libkvist_executorch.so: from $KVIST_EXECUTORCH_LIBRARY, or beside this file. Loading it registers the kernel."""
    global _library
    if _library is not None:
        return _library
    needs_executorch()
    # The runtime comes first: the kernel goes into the registry of the libexecutorch.so that it has loaded.
    import executorch.extension.pybindings.portable_lib  # noqa: F401

    path = os.environ.get("KVIST_EXECUTORCH_LIBRARY") or Path(__file__).with_name("libkvist_executorch.so")
    if not os.path.exists(path):
        raise CacheError(
            f"there is no {path}: build libkvist_executorch.so with crates/executorch/build.sh of kvist's repository, and set "
            "KVIST_EXECUTORCH_LIBRARY to its path"
        )
    lib = ctypes.CDLL(str(path))
    lib.kvist_et_last_error.restype = ctypes.c_char_p
    lib.kvist_et_session.restype = ctypes.c_void_p
    lib.kvist_et_session.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Config)]
    lib.kvist_et_key.restype = ctypes.c_char_p
    i32 = ctypes.c_int32
    verbs: Dict[str, List[Any]] = {
        "free": [], "key": [], "enter": [], "leave": [], "can_extend": [i32], "clear": [], "len": [i32], "rewind": [i32],
        "begin_step": [_I32P, i32], "seq_cp": [i32] * 4, "seq_rm": [i32] * 3, "seq_keep": [i32], "propose": [_I32P, i32],
        "commit": [_I32P, i32],
    }
    for verb, arguments in verbs.items():
        function = getattr(lib, f"kvist_et_{verb}")
        function.argtypes = [ctypes.c_void_p] + arguments
        if verb not in ("key", "free", "leave"):
            function.restype = ctypes.c_long
    _library = lib
    return lib


@dataclass(frozen=True)
class ModelCacheParams:
    """What a program says about its model."""

    n_layers: int
    n_kv_heads: int
    head_dim: int


@dataclass
class CacheConfig:
    """The model's facts, and what the caller chooses for one session."""

    capacity: int
    n_layers: int
    n_kv_heads: int
    head_dim: int
    min_chunk: int = 512
    kv_dtype: torch.dtype = torch.float16  # or float32, bfloat16; uint8 for codes of `bits` bits
    group_size: int = 64
    bits: int = 4
    windows: Sequence[int] = ()  # positions that a query sees: one for all layers, or one per layer; 0 is all
    max_step_tokens: int = 0
    threads: int = 0


def make_config(
    params: ModelCacheParams, capacity: int, kv_dtype: torch.dtype = torch.float16, min_chunk: int = 512, **more: Any
) -> CacheConfig:
    return CacheConfig(capacity, params.n_layers, params.n_kv_heads, params.head_dim, min_chunk, kv_dtype, **more)


def _array(values: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(values))(*values)


class Session:
    """One cache, installed under `cache_key` while the session lives."""

    def __init__(self, backend: str, kind: str, config: CacheConfig) -> None:
        self._handle: Optional[int] = None
        if config.kv_dtype not in _DTYPES:
            raise CacheError(f"kv_dtype is {config.kv_dtype}: use float32, float16, bfloat16, or uint8 with bits and group_size")
        windows = _array(config.windows)
        c = _Config(
            config.capacity, config.n_layers, config.n_kv_heads, config.head_dim, config.min_chunk, _DTYPES[config.kv_dtype],
            config.group_size, config.bits, config.max_step_tokens, config.threads, ctypes.cast(windows, _I32P), len(windows),
        )
        handle = library().kvist_et_session(backend.encode(), kind.encode(), ctypes.byref(c))
        if not handle:
            raise CacheError(library().kvist_et_last_error().decode())
        self._handle = handle
        self.capacity = config.capacity
        self.cache_key = library().kvist_et_key(handle).decode()

    def _call(self, verb: str, *arguments: Any) -> int:
        if self._handle is None:
            raise CacheError("the session is closed")
        result: int = getattr(library(), f"kvist_et_{verb}")(self._handle, *arguments)
        if result == -1:
            raise CacheError(library().kvist_et_last_error().decode())
        return result

    def __enter__(self) -> Session:
        """Executions of this thread use this cache until the end of the block."""
        self._call("enter")
        return self

    def __exit__(self, *_: object) -> None:
        library().kvist_et_leave(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            library().kvist_et_free(self._handle)
            self._handle = None

    __del__ = close

    def can_extend(self, n: int = 1) -> bool:
        return bool(self._call("can_extend", n))

    def clear(self) -> None:
        self._call("clear")

    def seq_len(self, seq: int = 0) -> int:
        return self._call("len", seq)

    def rewind(self, new_len: int) -> None:
        self._call("rewind", new_len)

    def begin_step(self, seq_ids: Sequence[int]) -> None:
        self._call("begin_step", _array(seq_ids), len(seq_ids))

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: Optional[int] = None) -> None:
        self._call("seq_cp", src, dst, p0, 0x7FFFFFFF if p1 is None else p1)

    def seq_rm(self, seq: int, p0: int = 0, p1: Optional[int] = None) -> None:
        self._call("seq_rm", seq, p0, 0x7FFFFFFF if p1 is None else p1)

    def seq_keep(self, seq: int) -> None:
        self._call("seq_keep", seq)

    def propose(self, parents: Sequence[int]) -> None:
        self._call("propose", _array(parents), len(parents))

    def commit(self, accepted: Sequence[int]) -> None:
        self._call("commit", _array(accepted), len(accepted))


def make_decode_session(backend: str, config: CacheConfig) -> Session:
    """One sequence. With one window for all layers it takes constant memory."""
    return Session(backend, "contiguous", config)


def make_seq_session(backend: str, config: CacheConfig) -> Session:
    """Many sequences that share cells; each execution needs a `begin_step`."""
    return Session(backend, "seq", config)


def make_tree_session(backend: str, config: CacheConfig) -> Session:
    """Draft trees of sequence 0: `propose`, run, `commit`."""
    return Session(backend, "tree", config)


def read_kv_cache_metadata(constant: Callable[[str], int]) -> ModelCacheParams:
    """Reads what a program says about its model; `constant(name)` gives the value of a constant method."""
    version = constant("kv_cache.schema_version")
    if version != SCHEMA_VERSION:
        raise CacheError(f"kv_cache.schema_version is {version}, this reader knows {SCHEMA_VERSION}: export the program again")
    values = [constant(f"kv_cache.{name}") for name in ("n_layers", "n_kv_heads", "head_dim")]
    return ModelCacheParams(*values)


class Program:
    """A .pte file, loaded once. Any number of sessions run it, one after the other."""

    def __init__(self, path: Union[str, os.PathLike[str]]) -> None:
        library()
        needs_executorch()
        from executorch.runtime import Runtime, Verification

        self._program = Runtime.get().load_program(Path(path), verification=Verification.Minimal)
        self._forward = self._program.load_method("forward")
        self.cache_params = read_kv_cache_metadata(self._constant)

    def _constant(self, name: str) -> int:
        if name not in self._program.method_names:
            raise CacheError(f"the program has no {name}: it was not exported for kvcache::update_and_attend")
        return int(self._program.load_method(name).execute([])[0])

    def run(
        self,
        session: Session,
        tokens: Sequence[int],
        positions: Sequence[int],
        rows: Optional[Sequence[int]] = None,
    ) -> Tuple[torch.Tensor, ...]:
        """One execution. `rows` are the tokens whose logits are wanted: by default the last one."""
        rows = [len(tokens) - 1] if rows is None else rows
        inputs = (torch.tensor([list(tokens)]), torch.tensor(list(positions)).unsqueeze(-1), torch.tensor(list(rows)))
        return self.execute(session, inputs)

    def execute(self, session: Session, inputs: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
        """One execution with these inputs. The results are copies."""
        with session:
            try:
                return tuple(out.clone() for out in self._forward.execute(list(inputs)))
            except RuntimeError as why:
                reason = library().kvist_et_last_error().decode()
                raise CacheError(f"{reason} ({why})" if reason else str(why)) from None
