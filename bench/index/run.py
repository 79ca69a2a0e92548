"""Runs the cells of the index bench: every subject in its own process, all on one core, in turns.

Only one process works at a time. A round is one turn of each seat, so a disturbance of the machine affects all of them.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.child import Child
from bench.index.plan import OURS, IndexCell
from bench.rounds import Rounds
from kv_runtime.process import child_environment

_ROOT = Path(__file__).parents[2]
_SEED = 1000
"""Of the first round."""


class SubjectAbsent(Exception):
    """A subject cannot be measured; the message has the reason."""


class Interpreters(NamedTuple):
    """What runs the processes: ours and the peer's, and the core they share (-1: any)."""

    python: str
    peer_python: str
    core: int


class Runner:
    """Measures cells with the processes of both subjects, which it starts."""

    def __init__(self, interpreters: Interpreters) -> None:
        self._interpreters = interpreters
        self._processes: dict[str, Child] = {}
        self.peer = ""
        """Its version, or why it is not measured."""

    async def run(self, cells: Sequence[IndexCell], on_progress: Callable[[str], None]) -> Rounds:
        """Return the figures of all cells by seat; `on_progress` gets the name of each cell once it is measured.

        Raises:
            SubjectAbsent: our own index is not there.
            BenchFailed: a process ended, or failed a request.
        """
        results = Rounds()
        async with AsyncExitStack() as stack:
            self._processes["native"] = await stack.enter_async_context(self._process("native"))
            try:
                peer = self._processes["peer"] = await stack.enter_async_context(self._process("peer"))
                self.peer = peer.started["version"]
            except SubjectAbsent as error:
                self.peer = f"absent ({error})"
            for cell in cells:
                seats = [seat for seat in cell.seats if _process_of(seat) in self._processes]
                await (self._isolated if cell.in_own_process else self._together)(cell, seats, results)
                on_progress(cell.name)
        return results

    async def _together(self, cell: IndexCell, seats: Sequence[str], results: Rounds) -> None:
        processes = {seat: self._processes[_process_of(seat)] for seat in seats}
        for seat, process in processes.items():
            await process.call("make", key=seat, **_request(cell, seat))
        for number in range(cell.rounds):
            for seat, process in processes.items():
                results.add(seat, cell.name, await process.call("round", key=seat, seed=_SEED + number))
        for seat, process in processes.items():
            await process.call("drop", key=seat)

    async def _isolated(self, cell: IndexCell, seats: Sequence[str], results: Rounds) -> None:
        for number in range(cell.rounds):
            for seat in seats:
                async with self._process(_process_of(seat)) as process:
                    await process.call("make", key=seat, **_request(cell, seat))
                    results.add(seat, cell.name, await process.call("round", key=seat, seed=_SEED + number))

    @asynccontextmanager
    async def _process(self, subject: str) -> AsyncIterator[Child]:
        """Yield a process with a subject in it: native or peer.

        Raises:
            SubjectAbsent: its interpreter is not there, or has no such subject.
        """
        python = self._interpreters.peer_python if subject == "peer" else self._interpreters.python
        arguments = {"subject": subject, "core": self._interpreters.core}
        environment = {**child_environment(), "PYTHONPATH": str(_ROOT), "DYN_LOG": "error"}
        try:
            child = await Child.start(
                "bench.index.child", arguments, python=python, environment=environment, answer_s=None
            )
        except OSError as error:
            raise SubjectAbsent(f"{python}: {error.strerror}") from error
        try:
            if "absent" in child.started:
                raise SubjectAbsent(child.started["absent"])
            yield child
        finally:
            await child.close()


def _process_of(seat: str) -> str:
    return "native" if seat in OURS else "peer"


def _request(cell: IndexCell, seat: str) -> dict[str, Any]:
    parameters = cell.parameters | ({"held": "none"} if seat == "floor" else {})
    return {"work": cell.work, "shape": seat, "parameters": parameters}
