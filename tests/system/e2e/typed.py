"""Commands as they are typed, in a process of their own, and what they print."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

WITHIN_S = 100.0


class Ended(NamedTuple):
    """The exit status, and what stood on standard output and standard error."""

    code: int | None
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value that was printed."""
        assert self.out, self.err
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """The JSON values that were printed, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]


async def begun(*arguments: str | Path, **variables: str) -> asyncio.subprocess.Process:
    """Start Python with these arguments; of our settings, only these variables are in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *map(str, arguments)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment | variables,
    )


async def ended(process: asyncio.subprocess.Process) -> Ended:
    """Wait for the end of the process, which must not end by a defect."""
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate()
    assert "Traceback" not in err.decode(), err.decode()
    return Ended(process.returncode, out.decode(), err.decode())


async def typed(*arguments: str | Path, **variables: str) -> Ended:
    """Run Python with these arguments until it ends."""
    return await ended(await begun(*arguments, **variables))
