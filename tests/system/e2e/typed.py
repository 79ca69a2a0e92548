"""Commands as they are typed, in a process of their own, and what they print."""

import asyncio
import json
import os
import sys
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """The exit status, and what stood on standard output and standard error."""

    code: int | None
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON that a command that ended well printed."""
        assert self.code == 0, self.err
        return json.loads(self.out)


async def typed(*arguments: str, within_s: float = 100.0) -> Ended:
    """Run Python with these arguments and without settings of ours in its environment; it must not end by a defect."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    async with asyncio.timeout(within_s):
        out, err = await process.communicate()
    assert "Traceback" not in err.decode(), err.decode()
    return Ended(process.returncode, out.decode(), err.decode())
