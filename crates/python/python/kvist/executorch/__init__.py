"""kvist's caches behind ExecuTorch's op `kvcache::update_and_attend`: export a model once, and choose its cache when it runs.

    import kvist.executorch as ke
    ke.export("./Qwen3-0.6B", out="model.pte")
    program = ke.Program("model.pte")
    session = ke.make_decode_session("kvist", ke.make_config(program.cache_params, capacity=8192))
    logits, = program.run(session, tokens=[1, 2, 3], positions=[0, 1, 2])

docs/executorch.md explains the rest.
"""

from ..torch import Exportable
from .export import SCHEMA_VERSION, export, export_module, write_kv_cache_metadata
from .runtime import (
    CacheConfig,
    CacheError,
    ModelCacheParams,
    Program,
    Session,
    make_config,
    make_decode_session,
    make_seq_session,
    make_tree_session,
    read_kv_cache_metadata,
)

__all__ = [
    "SCHEMA_VERSION",
    "CacheConfig",
    "CacheError",
    "Exportable",
    "ModelCacheParams",
    "Program",
    "Session",
    "export",
    "export_module",
    "make_config",
    "make_decode_session",
    "make_seq_session",
    "make_tree_session",
    "read_kv_cache_metadata",
    "write_kv_cache_metadata",
]
