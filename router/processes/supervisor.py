"""Starts the processes of one router, starts each one again that ends, and ends with the last of them.

    a process ends               another starts after a pause; if it ends too often, or before it ever served, all end
    it does not answer (`/live`) for `SILENT_CALLS` calls, 5 s each: it is killed, and so started again
    stop                         SIGTERM to all; what has not ended after `stop_s` is killed
    cancelled                    SIGTERM again, which cuts off what they still do; killed after `AT_ONCE_S`

Processes are forks of one that has imported the router (`forkserver`), and share its modules' memory. A process leaves
the terminal's process group, so that Ctrl-C reaches only the supervisor, and stops when the supervisor is gone.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

import aiohttp
import structlog
from yarl import URL

from kv_runtime.clock import Clock
from kv_runtime.supervise import RESTARTS, Failures, PartGaveUp, Restarts, until
from kv_runtime.telemetry import Family, RateLimitedLog, by_name, counter, gauge

CALL_S = 5.0
"""A process that takes longer for an answer counts as silent."""
_log = structlog.get_logger("router")
LOOK_S, LOOK_AGAIN_S = 5.0, 1.0
"""Seconds until the next look: after a look that all processes answered, and after any other."""
SILENT_CALLS = 2
AT_ONCE_S = 1.0
_ENDED_AS_ASKED = (0, -signal.SIGTERM)
"""Exit codes after SIGTERM; the second if the process did not handle signals yet."""
Work = Callable[[Connection], None]
"""What a process does. It sends the URL of its control plane once it serves."""


class Answer(NamedTuple):
    """What one process answered."""

    status: int
    body: bytes
    content_type: str

    @property
    def is_ok(self) -> bool:
        """Whether the process did what it was asked."""
        return self.status < HTTPStatus.MULTIPLE_CHOICES


class Links:
    """Calls the control planes of the processes, by name, within `async with`. A process that serves has a URL."""

    def __init__(self, names: Sequence[str], clock: Clock, *, token: str = "") -> None:
        """`token` is the token of the processes' control planes."""
        self.names = tuple(names)
        self._token = token
        self.urls: dict[str, str] = {}
        """Addresses of the processes that serve, by name."""
        self._failures = RateLimitedLog(_log, clock)
        self.silent_total = dict.fromkeys(names, 0)
        """Calls that a process did not answer."""
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"},
            skip_auto_headers=("Accept-Encoding",),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(sock_connect=CALL_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def one(self, name: str, method: str, path: str, body: bytes = b"", more_s: float = 0.0) -> Answer | None:
        """Return the process's answer. None: it does not serve, or did not answer within `CALL_S` and `more_s`.

        A missing answer of a process that serves is counted and logged.
        """
        if name not in self.urls:
            return None
        target = URL(self.urls[name] + path, encoded=True)
        try:
            async with asyncio.timeout(CALL_S + more_s):
                async with self._session.request(method, target, data=body or None) as response:
                    return Answer(response.status, await response.read(), response.content_type)
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            self.silent_total[name] += 1
            reason = str(error) or type(error).__name__
            self._failures.warning("process_silent", key=name, of=name, call=f"{method} {path}", reason=reason)
            return None

    async def all(self, path: str, more_s: float = 0.0) -> dict[str, Answer]:
        """GET `path` of all processes; return the answers, in the order of `names`."""
        calls = [self.one(name, "GET", path, more_s=more_s) for name in self.names]
        found: Sequence[Answer | None] = await asyncio.gather(*calls)
        return {name: answer for name, answer in zip(self.names, found, strict=True) if answer is not None}


class ProcessState(NamedTuple):
    """One process now. `pid` is 0 while there is none; `is_up`: it has started."""

    name: str
    pid: int
    is_up: bool
    restarts: int


def process_families(states: Iterable[ProcessState], silent_calls: Mapping[str, int]) -> Iterator[Family]:
    """Yield the metrics; `silent_calls` are the numbers of calls that a process did not answer, by its name."""
    known = list(states)
    up, restarts = {each.name: each.is_up for each in known}, {each.name: each.restarts for each in known}
    yield gauge("process_up", "1 while this process of the router runs", ("process",), by_name((), up))
    meaning = "How often this process ended and was started again"
    yield counter("process_restarts", meaning, ("process",), by_name((), restarts))
    meaning = "Calls of the control plane that this process did not answer"
    yield counter("process_silent_calls", meaning, ("process",), by_name((), silent_calls))


class ProcessesFailed(PartGaveUp):
    """A process could not start, ended too often, or did not end as it should; all have ended."""


class Supervisor:
    """Runs one process for each name."""

    def __init__(
        self,
        names: Sequence[str],
        work_of: Callable[[str], Work],
        links: Links,
        clock: Clock,
        *,
        stop_s: float,
        on_started: Callable[[], None],
        restarts: Restarts = RESTARTS,
    ) -> None:
        """`work_of` returns what a process that starts now has to do; it is pickled.

        `links` learns the addresses of the processes. `on_started` is called when all serve for the first time.
        """
        self._processes = [_Process(name, work_of, links) for name in names]
        self._links, self._clock, self._stop_s, self._restarts = links, clock, stop_s, restarts
        self._on_started = on_started
        self._failure = ""
        self._over = asyncio.Event()

    def states(self) -> list[ProcessState]:
        """Return the processes as they are."""
        return [
            ProcessState(each.name, each.pid, each.name in self._links.urls, each.restarts) for each in self._processes
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Start the processes and keep them running until `stop` is set; none runs afterwards, also after an error.

        Raises:
            ProcessesFailed: one could not start, ended too often, or not as it should.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for each in self._processes:
                    group.create_task(self._keep(each))
                looks = group.create_task(self._look())
                await until(stop, self._over.wait())
                self._over.set()
                looks.cancel()
                await self._end(self._stop_s)
        finally:
            self._over.set()
            await self._end(AT_ONCE_S)
        if self._failure:
            raise ProcessesFailed(self._failure)

    async def _keep(self, process: "_Process") -> None:
        """Start the process, and again whenever it ends, until all are to end."""
        failures = Failures(self._restarts, self._clock)
        while True:
            process.start()
            code = await asyncio.shield(process.ended)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            if self._over.is_set():
                return None if code in _ENDED_AS_ASKED else self._fail(f"process {process.name} {how}")
            if not process.has_served.is_set():
                return self._fail(f"process {process.name} {how} before it had started")
            if (pause_s := failures.count()) is None:
                often = f"{self._restarts.failures_max} times in {self._restarts.window_s:g} s"
                return self._fail(f"process {process.name} {how}, {often}")
            _log.error("process_ended", process=process.name, how=how, starts_again_in_s=pause_s)
            await self._clock.wait(self._over, pause_s)
            if self._over.is_set():
                return None
            process.restarts += 1

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._over.set()

    async def _look(self) -> None:
        """Report the start; kill processes that do not answer."""
        for each in self._processes:
            await each.has_served.wait()
        self._on_started()
        while True:
            is_any_silent = any(each.silent_calls for each in self._processes)
            await self._clock.sleep(LOOK_AGAIN_S if is_any_silent else LOOK_S)
            answers = await self._links.all("/live")
            for each in self._processes:
                is_silent = each.name in self._links.urls and each.name not in answers
                each.silent_calls = each.silent_calls + 1 if is_silent else 0
                if each.silent_calls >= SILENT_CALLS:
                    each.kill("it does not answer")

    async def _end(self, within_s: float) -> None:
        """Ask all processes to stop, and kill each that has not ended in time."""
        living = [each for each in self._processes if each.pid]
        for each in living:
            each.signal(signal.SIGTERM)
        if living:
            await asyncio.wait([each.ended for each in living], timeout=within_s)
        for each in living:
            if each.pid:
                each.kill("it did not end in time")
            await asyncio.shield(each.ended)


class _Process:
    """One process, and those that replace it after its end."""

    def __init__(self, name: str, work_of: Callable[[str], Work], links: Links) -> None:
        self.name = name
        self._work_of, self._links = work_of, links
        self.pid = self.restarts = self.silent_calls = 0
        self.has_served = asyncio.Event()
        """Set when it serves for the first time."""
        self.ended: asyncio.Future[int]
        """The exit code of the present process; negative: the signal that killed it."""

    def start(self) -> None:
        """Start the process; `ended` gets its exit code, and `links` its URL once it serves."""
        context, loop = multiprocessing.get_context("forkserver"), asyncio.get_running_loop()
        context.set_forkserver_preload(["router.cli.router_parts"])
        said, say = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(self._work_of(self.name), say), name=self.name, daemon=True)
        process.start()
        say.close()
        self.pid, self.silent_calls, self.ended = process.pid or 0, 0, loop.create_future()

        def on_said() -> None:
            loop.remove_reader(said)
            with suppress(EOFError):
                self._links.urls[self.name] = said.recv()
                self.has_served.set()
            said.close()

        def on_ended() -> None:
            loop.remove_reader(process.sentinel)
            if not said.closed:
                on_said()
            self._links.urls.pop(self.name, None)
            process.join()
            self.pid = 0
            self.ended.set_result(process.exitcode or 0)
            process.close()

        loop.add_reader(said, on_said)
        loop.add_reader(process.sentinel, on_ended)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it has not ended."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self, why: str) -> None:
        """End the process at once."""
        _log.error("process_killed", process=self.name, why=why)
        self.signal(signal.SIGKILL)


def _run(work: Work, say: Connection) -> None:
    os.setpgid(0, 0)
    structlog.contextvars.bind_contextvars(process=multiprocessing.current_process().name)
    work(say)
