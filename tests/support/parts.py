"""Parts of a process, at work for as long as a block lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kv_runtime.supervise import Part, run_parts


@asynccontextmanager
async def at_work(*parts: Part, stop: asyncio.Event | None = None) -> AsyncIterator[None]:
    """Be where the parts run; they are asked to stop at the end, or when a test sets `stop`."""
    stop = stop or asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_parts(parts, stop=stop, drain_s=5.0))
        try:
            yield
        finally:
            stop.set()
