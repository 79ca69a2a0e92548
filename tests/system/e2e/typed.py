"""Commands as they are typed, in a process of their own, and what they print."""

import asyncio
import os
import re
import sys
from pathlib import Path

from tests.support.forked import WITHIN_S, Ended, forked


async def begun(*arguments: str | Path) -> asyncio.subprocess.Process:
    """Start Python with these arguments, without our settings in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *map(str, arguments)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )


async def ended(process: asyncio.subprocess.Process) -> Ended:
    """Wait for the end of the process, which must not end by a defect."""
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate()
    return _checked(Ended(process.returncode, out.decode(), err.decode()))


async def typed(*arguments: str | Path, **variables: str) -> Ended:
    """Run Python with these arguments until it ends; of our settings, only these variables are in its environment."""
    return _checked(await asyncio.to_thread(forked, *arguments, **variables))


def _checked(found: Ended) -> Ended:
    assert "Traceback" not in found.err, found.err
    return found


def figure(name: str, report: str) -> int:
    """Return the number behind a name of the report."""
    found = re.search(rf"^{name} +(\d+)", report, re.MULTILINE)
    assert found is not None, report
    return int(found[1])
