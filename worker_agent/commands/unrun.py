"""Closes parts that were made and are not going to run."""

import asyncio
from collections.abc import Iterable

from kv_runtime.supervise import Part, run_parts

_END_S = 5.0


async def end_unrun(parts: Iterable[Part]) -> None:
    """Parts that have opened sockets give them back: they run to their end at once.

    A context of ZeroMQ cannot be destroyed before all its sockets are closed, and these belong to their parts.
    """
    stop = asyncio.Event()
    stop.set()
    await run_parts(parts, stop=stop, drain_s=_END_S)
