"""Asynchronous iteration: a piece is computed in a thread, while the event loop goes on."""

import asyncio
from typing import Any


async def next_piece(generation: Any) -> Any:
    try:
        loop = asyncio.get_running_loop()
        piece = await loop.run_in_executor(None, generation._next)
    except asyncio.CancelledError:
        generation.close()
        raise
    if piece is None:
        raise StopAsyncIteration
    return piece
