"""Closes parts that were built and will not run."""

import asyncio
from collections.abc import Iterable

from kv_runtime.supervise import Part, run_parts

_END_S = 5.0


async def end_unrun(parts: Iterable[Part]) -> None:
    """Run the parts with `stop` set, so that they close their sockets and end.

    A ZeroMQ context cannot be destroyed before all its sockets are closed, and the parts own these sockets.
    """
    stop = asyncio.Event()
    stop.set()
    await run_parts(parts, stop=stop, drain_s=_END_S)
