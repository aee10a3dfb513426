"""The bookkeeping of a KV cache, for engines that keep K and V themselves.

A cache hands out *cells*, each with room for one token's K and V in every layer of a layer group, and says which cells a
query may read. It never touches K or V. Begin a step, let your kernels do what it says, and commit it; a step that is
dropped leaves the cache as it was.
"""

from __future__ import annotations

from typing import Any

from ._native import KINDS, Cache, Step

__all__ = ["KINDS", "Cache", "Paged", "Step"]


def Paged(capacity: int, *, block_tokens: int = 16, **options: Any) -> Cache:
    """A cache of blocks with reference counts, block tables and, with ``prefix=True``, a prefix index.

    ``capacity`` is the number of cells; it is rounded down to whole blocks. The other options are those of
    :meth:`Cache.paged`.
    """
    return Cache.paged(capacity, block_tokens=block_tokens, **options)
