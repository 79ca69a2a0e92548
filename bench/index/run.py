"""Runs the cells of the index bench: every subject in its own process, all on one core, in turns.

Only one process works at a time. A round is one turn of each seat, so a disturbance of the machine affects all of them.
"""

import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple, Self

from bench.index.plan import SEATS, IndexCell
from bench.index.results import IndexResults
from kv_runtime.process import child_environment

_ROOT = Path(__file__).parents[2]
_SEED = 1000
"""Of the first round."""


class SubjectAbsent(Exception):
    """A subject cannot be measured; the message has the reason."""


class BenchFailed(Exception):
    """A measured process ended, or failed a request."""


class Interpreters(NamedTuple):
    """What runs the processes: ours and the peer's, and the core they share (-1: any)."""

    python: str
    peer_python: str
    core: int


class SubjectProcess:
    """A process with a subject in it: native or peer. It ends with `close`.

    Raises:
        SubjectAbsent: its interpreter is not there, or has no such subject.
    """

    def __init__(self, python: str, subject: str, core: int) -> None:
        self._name = subject
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._process = subprocess.Popen(
                [python, "-m", "bench.index.child", subject, str(core)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={**child_environment(), "PYTHONPATH": str(_ROOT), "DYN_LOG": "error"},
            )
        except OSError as error:
            self._errors.close()
            raise SubjectAbsent(f"{python}: {error.strerror}") from error
        first = self._answer()
        if "absent" in first:
            self.close()
            raise SubjectAbsent(first["absent"])
        self.version: str = first["version"]

    def call(self, **request: Any) -> dict[str, Any]:  # noqa: ANN401 - as the process takes it
        """Return the answer.

        Raises:
            BenchFailed: the request failed, or the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed() from error
        answer = self._answer()
        if "error" in answer:
            raise BenchFailed(f"{self._name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process and free its resources."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it may have ended, and not have read all
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> BenchFailed:
        self._process.wait()
        self._errors.seek(0)
        output_lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return BenchFailed(
            f"{self._name}: ended with {self._process.returncode}: {output_lines[-1] if output_lines else 'no word'}"
        )


class Runner:
    """The processes that some cells need, from the beginning of a `with` statement to its end.

    Raises:
        SubjectAbsent: our own index is not there.
    """

    def __init__(self, interpreters: Interpreters, cells: Iterable[IndexCell]) -> None:
        self._interpreters = interpreters
        seated = {SEATS[seat].process for cell in cells for seat in cell.seats}
        self._names = ("ours", *sorted(seated - {"ours", "peer"}))
        self._processes: dict[str, SubjectProcess] = {}
        self.peer = ""
        """Its version, or why it is not measured."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._processes = {name: stack.enter_context(closing(self._new(name))) for name in self._names}
            try:
                peer = self._processes["peer"] = stack.enter_context(closing(self._new("peer")))
                self.peer = peer.version
            except SubjectAbsent as error:
                self.peer = f"absent ({error})"
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def steps(self, cell: IndexCell) -> int:
        """Return how many steps a cell takes here."""
        return len(self._seats(cell)) * (cell.rounds + (not cell.in_own_process))

    def run(self, cells: Sequence[IndexCell], on_progress: Callable[[str], None]) -> IndexResults:
        """Run all cells and return the results; `on_progress` gets the name of a cell after each of its rounds.

        Raises:
            BenchFailed: a process ended, or failed a request.
        """
        results = IndexResults()
        for cell in cells:
            (self._isolated if cell.in_own_process else self._together)(cell, results, on_progress)
        return results

    def _together(self, cell: IndexCell, results: IndexResults, on_progress: Callable[[str], None]) -> None:
        seats = self._seats(cell)
        for name in seats:
            seat = SEATS[name]
            parameters = cell.parameters | dict(seat.changes)
            self._processes[seat.process].call(make=name, work=cell.work, shape=seat.shape, parameters=parameters)
            on_progress(cell.name)
        for number in range(cell.rounds):
            for name in seats:
                found = self._processes[SEATS[name].process].call(round=name, seed=_SEED + number)
                results.add(cell, name, found)
                on_progress(cell.name)
        for name in seats:
            self._processes[SEATS[name].process].call(drop=name)

    def _isolated(self, cell: IndexCell, results: IndexResults, on_progress: Callable[[str], None]) -> None:
        for number in range(cell.rounds):
            for name in self._seats(cell):
                seat = SEATS[name]
                parameters = cell.parameters | dict(seat.changes)
                with closing(self._new(seat.process)) as process:
                    process.call(make=name, work=cell.work, shape=seat.shape, parameters=parameters)
                    results.add(cell, name, process.call(round=name, seed=_SEED + number))
                on_progress(cell.name)

    def _seats(self, cell: IndexCell) -> list[str]:
        return [name for name in cell.seats if SEATS[name].process in self._processes]

    def _new(self, process: str) -> SubjectProcess:
        interpreters = self._interpreters
        if process == "peer":
            return SubjectProcess(interpreters.peer_python, "peer", interpreters.core)
        return SubjectProcess(interpreters.python, "native", interpreters.core)
