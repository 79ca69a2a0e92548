"""`router replay` as it is typed, and the figures of its report."""

import asyncio
import re
import sys


async def replayed(nats_url: str) -> str:
    """Return the report on the only journal of the event log."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "replay", "--nats-url", nats_url),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    return out.decode()


def figure(name: str, report: str) -> int:
    """Return the number behind a name of the report."""
    found = re.search(rf"^{name} +(\d+)", report, re.MULTILINE)
    assert found is not None, report
    return int(found[1])
