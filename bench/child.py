"""A process of a bench, which runs one role and answers the requests of its parent; and the parent's side of it.

    started    `python -m bench.child MODULE:CLASS ARGUMENTS`, the arguments as JSON
    first      a line of JSON: the result of `begin`
    then       each request line {"command": a method, ...} gets a response line or {"error": why}, until stdin ends

Times are in nanoseconds since 1970, so that times of different processes of one host can be compared.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from importlib import import_module
from tempfile import TemporaryFile
from typing import IO, Any, Self, TypeVar

import click
import msgspec

from bench.processes import own_environment
from kv_runtime.process import run_process
from kv_runtime.supervise import Part, run_parts, until
from kv_runtime.telemetry import configure_logs

Answer = dict[str, Any]
FoundT = TypeVar("FoundT")
_DRAIN_S = 5.0
_ANSWER_S = 120.0
_ANSWER_BYTES_MAX = 1 << 28


class Role:
    """What a process does. Its public coroutines other than `begin` and `end` are its commands."""

    async def begin(self) -> Answer:
        """Set up everything that does not need the parts to run."""
        return {}

    def parts(self) -> list[Part]:
        """Return the parts to run after `begin`, from stage 1 on."""
        return []

    async def end(self) -> None:
        """Free all resources."""

    async def cpu(self) -> Answer:
        """Return the CPU time that this process has used."""
        return {"cpu_ns": time.process_time_ns()}


def serve() -> None:
    """Run the role that the arguments of this process name, until the parent closes stdin."""
    module, _, name = sys.argv[1].partition(":")
    role: Role = getattr(import_module(module), name)(**json.loads(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is not an answer
    configure_logs("critical")

    def write(answer: Answer) -> None:
        answers.write(msgspec.json.encode(answer).decode() + "\n")

    async def main(stop: asyncio.Event) -> None:
        async def questions(part_stop: asyncio.Event) -> None:
            await until(part_stop, _answer_all(role, write))
            stop.set()

        try:
            write(await role.begin())
            await run_parts([Part("questions", questions), *role.parts()], stop=stop, drain_s=_DRAIN_S)
        except Exception as error:
            write(_error(error))
            raise
        finally:
            await role.end()

    run_process(main)


async def _answer_all(role: Role, write: Callable[[Answer], None]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        request = json.loads(line)
        try:
            write(await getattr(role, request.pop("command"))(**request))
        except Exception as error:  # noqa: BLE001 - the parent shows it, whatever it is
            write(_error(error))


def _error(error: BaseException) -> Answer:
    return {"error": f"{type(error).__name__}: {error}"}


class BenchFailed(Exception):
    """A measured process ended, failed a command, or did not answer in time."""


def finished(work: Coroutine[Any, Any, FoundT], failures: tuple[type[Exception], ...] = (BenchFailed,)) -> FoundT:
    """Run the work of a bench's command, and return what it found.

    Raises:
        click.ClickException: the work raised some of `failures`.
        click.Abort: a signal stopped it.
    """
    found: list[FoundT] = []

    async def main(stop: asyncio.Event) -> None:
        if (result := await until(stop, work)) is not None:
            found.append(result)

    try:
        run_process(main)
    except* failures as group:
        raise click.ClickException("; ".join(map(str, _errors(group)))) from group
    if not found:
        raise click.Abort
    return found[0]


def _errors(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group, and of the groups in it."""
    for error in group.exceptions:
        yield from _errors(error) if isinstance(error, BaseExceptionGroup) else (error,)


class Child:
    """A process that runs a role."""

    started: Answer
    """Its first line: the result of `begin`."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, errors: IO[bytes], answer_s: float | None, spawned_ns: int
    ) -> None:
        self._name, self._process, self._errors, self._answer_s = name, process, errors, answer_s
        self.spawned_ns = spawned_ns

    @classmethod
    async def start(
        cls,
        program: type[Role] | str,
        arguments: dict[str, Any],
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        answer_s: float | None = _ANSWER_S,
    ) -> Self:
        """Start a process and return it after its `begin`. `answer_s`: how long a command may take; None: for ever.

        `program` is a role, or the name of a module that answers as one.

        Raises:
            BenchFailed: `begin` failed.
            OSError: the interpreter cannot be started.
        """
        name = program if isinstance(program, str) else f"{program.__module__}:{program.__name__}"
        command = (name,) if isinstance(program, str) else ("bench.child", name)
        errors = TemporaryFile()  # noqa: SIM115 - closed by `close`
        spawned_ns = time.time_ns()
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, "-m", *command, json.dumps(arguments)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=own_environment() if environment is None else environment,
                limit=_ANSWER_BYTES_MAX,
            )
        except OSError:
            errors.close()
            raise
        child = cls(name, process, errors, answer_s, spawned_ns)
        try:
            child.started = await child._answer("begin")
        except BaseException:
            await child.close()
            raise
        return child

    async def call(self, command: str, **parameters: Any) -> Answer:  # noqa: ANN401 - as the role takes it
        """Send the command, and return its answer.

        Raises:
            BenchFailed: the command failed, took too long, or the process has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command} | parameters).encode() + b"\n")
        return await self._answer(command)

    async def _answer(self, command: str) -> Answer:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._answer_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchFailed(
                f"{self._name}: {command}: no answer within {self._answer_s} s; {self._error_output()}"
            ) from None
        if not line:
            raise BenchFailed(f"{self._name}: {command}: it ended: {self._error_output()}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise BenchFailed(f"{self._name}: {command}: {answer['error']}")
        return answer

    def _error_output(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-2000:] or "no word"

    async def close(self) -> None:
        """Kill the process and wait for its end."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._errors.close()


if __name__ == "__main__":
    serve()
