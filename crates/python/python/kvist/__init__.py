"""A KV cache for large language models, with a runner, the bookkeeping alone, and a simulator.

>>> import kvist
>>> session = kvist.Model().session()
>>> text = session.generate("The borrow checker", max_tokens=8, temperature=0).result()

The guide is docs/python.md in kvist's repository.
"""

from . import cache
from ._errors import ArgumentError, Busy, Error, ModelError, NoSpace, OutOfMemory, Refused
from ._native import Batch, BatchGeneration, Generation, Model, Session, __version__
from ._simulator import Simulation, Sweep, simulate, sweep

__all__ = [
    "ArgumentError",
    "Batch",
    "BatchGeneration",
    "Busy",
    "Error",
    "Generation",
    "Model",
    "ModelError",
    "NoSpace",
    "OutOfMemory",
    "Refused",
    "Session",
    "Simulation",
    "Sweep",
    "__version__",
    "cache",
    "simulate",
    "sweep",
]
