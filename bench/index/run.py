"""Runs the cells of the index bench: every subject in its own process, all on one core, in turns.

Only one process works at a time. A round is one turn of each seat, so a disturbance of the machine affects all of them.
"""

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple, Self

from bench.child import BenchFailed
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
    """The processes of both subjects, from the beginning of a `with` statement to its end.

    Raises:
        SubjectAbsent: our own index is not there.
    """

    def __init__(self, interpreters: Interpreters) -> None:
        self._interpreters = interpreters
        self._processes: dict[str, SubjectProcess] = {}
        self.peer = ""
        """Its version, or why it is not measured."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._processes["native"] = stack.enter_context(closing(self._new("native")))
            try:
                peer = self._processes["peer"] = stack.enter_context(closing(self._new("peer")))
                self.peer = peer.version
            except SubjectAbsent as error:
                self.peer = f"absent ({error})"
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, cells: Sequence[IndexCell], on_progress: Callable[[str], None]) -> Rounds:
        """Return the figures of all cells by seat; `on_progress` gets the name of each cell once it is measured.

        Raises:
            BenchFailed: a process ended, or failed a request.
        """
        results = Rounds()
        for cell in cells:
            seats = [seat for seat in cell.seats if _process_of(seat) in self._processes]
            (self._isolated if cell.in_own_process else self._together)(cell, seats, results)
            on_progress(cell.name)
        return results

    def _together(self, cell: IndexCell, seats: Sequence[str], results: Rounds) -> None:
        for seat in seats:
            self._processes[_process_of(seat)].call(make=seat, **_request(cell, seat))
        for number in range(cell.rounds):
            for seat in seats:
                found = self._processes[_process_of(seat)].call(round=seat, seed=_SEED + number)
                results.add(seat, cell.name, found)
        for seat in seats:
            self._processes[_process_of(seat)].call(drop=seat)

    def _isolated(self, cell: IndexCell, seats: Sequence[str], results: Rounds) -> None:
        for number in range(cell.rounds):
            for seat in seats:
                with closing(self._new(_process_of(seat))) as process:
                    process.call(make=seat, **_request(cell, seat))
                    results.add(seat, cell.name, process.call(round=seat, seed=_SEED + number))

    def _new(self, process: str) -> SubjectProcess:
        interpreters = self._interpreters
        python = interpreters.peer_python if process == "peer" else interpreters.python
        return SubjectProcess(python, process, interpreters.core)


def _process_of(seat: str) -> str:
    return "native" if seat in OURS else "peer"


def _request(cell: IndexCell, seat: str) -> dict[str, Any]:
    parameters = cell.parameters | ({"held": "none"} if seat == "floor" else {})
    return {"work": cell.work, "shape": seat, "parameters": parameters}
