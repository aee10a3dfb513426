"""A KV cache for large language models, with a runner, the bookkeeping alone, and a simulator.

>>> import kvist
>>> session = kvist.Model().session()
>>> text = session.generate("The borrow checker", max_tokens=8, temperature=0).result()

The guide is docs/python.md in kvist's repository.
"""

from . import cache
from ._errors import (
    ArgumentError,
    Busy,
    Error,
    FileError,
    MismatchError,
    ModelError,
    NoSpace,
    OutOfMemory,
    Refused,
)
from ._native import Batch, BatchGeneration, Generation, Model, Prefix, SavedSession, Session, Tiers, __version__
from ._simulator import Simulation, Sweep, simulate, sweep

__all__ = [
    "ArgumentError",
    "Batch",
    "BatchGeneration",
    "Busy",
    "Error",
    "FileError",
    "Generation",
    "MismatchError",
    "Model",
    "ModelError",
    "NoSpace",
    "OutOfMemory",
    "Prefix",
    "Refused",
    "SavedSession",
    "Session",
    "Simulation",
    "Sweep",
    "Tiers",
    "__version__",
    "cache",
    "simulate",
    "sweep",
]
