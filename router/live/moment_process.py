"""A past moment of the index, and the process that restores and serves it (`indexer at --serve`).

| the process | the moment |
|---|---|
| says how far it is (`MomentProgress`) | reading, then ready |
| is not ready after `restore_s` | failed; the process is ended |
| ends | failed, with the last line that it said, or its exit code |
| is ready, and was not used for `idle_s` | over; the process is ended |
"""

import asyncio
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from indexer.embedded import MomentProgress
from kv_protocol.errors import UNDECODABLE
from kv_runtime.clock import Clock

_END_S = 5.0
"""How long a process may take to end before it is killed."""
_CALL_S = 30.0
_REASON_CHARACTERS_MAX = 2000


class MomentLimits(NamedTuple):
    """How long a moment may take to be restored, and how long it is kept after its last use, in seconds."""

    restore_s: float = 120.0
    idle_s: float = 600.0


class PastMoment:
    """One moment; `path` is the Unix socket of its process."""

    def __init__(self, moment_id: str, at_s: float, path: Path, clock: Clock, limits: MomentLimits) -> None:
        self.moment_id, self.at_s = moment_id, at_s
        self._path, self._clock, self._limits = path, clock, limits
        self._begun_s = self.used_s = clock.now()
        self._progress: MomentProgress | None = None
        self._took_s: float | None = None
        self._said = ""
        self.failure = ""
        """Why it is not served; empty: it is, or will be."""

    @property
    def state(self) -> str:
        """`reading`, `ready` or `failed`."""
        if self.failure:
            return "failed"
        return "reading" if self._progress is None else self._progress.state

    def use(self) -> None:
        """The moment is in use now."""
        self.used_s = self._clock.now()

    def status(self) -> dict[str, object]:
        """Return what people see of it."""
        progress = self._progress
        return {
            "id": self.moment_id,
            "at_s": self.at_s,
            "state": self.state,
            "progress": None if progress is None else {"messages": progress.messages, "of": progress.of},
            "message": self.failure,
            "stream_seq": progress.stream_seq if progress else 0,
            "snapshot": progress.snapshot if progress else "",
            "took_s": self._took_s,
        }

    async def tree(self, query: Mapping[str, str]) -> tuple[int, bytes]:
        """Return the process's answer to `GET /v1/prefix-tree`: status and body.

        Raises:
            OSError, aiohttp.ClientError, TimeoutError: the process does not answer.
        """
        connector, timeout = aiohttp.UnixConnector(str(self._path)), aiohttp.ClientTimeout(_CALL_S)
        async with (
            aiohttp.ClientSession("http://localhost", connector=connector, timeout=timeout) as session,
            session.get("/v1/prefix-tree", params=query) as response,
        ):
            return response.status, await response.read()

    async def run(self, program: Sequence[str], environment: Mapping[str, str]) -> str:
        """Run `program`, an `indexer at`, until the moment is over; return why it failed, empty: it was not used."""
        time = datetime.fromtimestamp(self.at_s, UTC).isoformat(timespec="microseconds")
        command = (*program, "--time", time, "--serve", str(self._path))
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, env=environment
            )
        except OSError as error:
            return f"its process cannot be started: {error}"
        try:
            return await self._watched(process)
        finally:
            self._path.unlink(missing_ok=True)
            await self._end(process)

    async def _watched(self, process: Process) -> str:
        assert process.stdout is not None
        while True:
            try:
                async with asyncio.timeout(self._left_s()):
                    line = await process.stdout.readline()
            except TimeoutError:
                if self.state == "reading":
                    return f"it was not restored within {self._limits.restore_s:g} s"
                if self._left_s() <= 0:
                    return ""
                continue
            except ValueError:  # a line that is too long; the reader dropped it
                continue
            if not line:
                code = await process.wait()
                return self._said if code > 0 and self._said else f"its process ended with code {code}"
            self._hear(line)

    def _left_s(self) -> float:
        if self.state == "reading":
            return self._begun_s + self._limits.restore_s - self._clock.now()
        return self.used_s + self._limits.idle_s - self._clock.now()

    def _hear(self, line: bytes) -> None:
        """Take progress; any other line may be the reason why the process ends."""
        try:
            self._progress = msgspec.json.decode(line, type=MomentProgress)
        except UNDECODABLE:
            said = line.decode(errors="replace").strip()
            self._said = said.removeprefix("indexer: ")[:_REASON_CHARACTERS_MAX] or self._said
            return
        if self._progress.state == "ready" and self._took_s is None:
            self._took_s = round(self._clock.now() - self._begun_s, 3)
            self.use()

    async def _end(self, process: Process) -> None:
        """End the process: it leaves when its input ends; if it does not, or has not begun to read, it is killed."""
        try:
            if process.stdin is not None:
                process.stdin.close()
            async with asyncio.timeout(0 if self._progress is None else _END_S):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()
