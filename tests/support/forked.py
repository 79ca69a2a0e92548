"""A command in a process of its own, forked from one that has imported what commands import.

Python takes a second to import a command, and a fork milliseconds. The process is as one that was started: it has its
own environment, directory, standard streams and event loop, and ends by itself.
"""

import json
import multiprocessing
import multiprocessing.reduction
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

WITHIN_S = 100.0
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        "router.cli.serve",
        "router.cli.replay",
        "router.cli.doctor",
        "worker_agent.commands.serve",
        "bench.what_if.command",
    ]
)


class Ended(NamedTuple):
    """The exit status (minus the signal that ended it), and what stood on standard output and standard error."""

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


def forked(*arguments: str | Path, **variables: str) -> Ended:
    """Run Python with these arguments, `-m MODULE ...` or `-c CODE ...`; of our settings, it has only these variables.

    Raises:
        TimeoutError: it has not ended in time, and was killed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = [multiprocessing.reduction.DupFd(each.fileno()) for each in (out, err)]
        command = [str(argument) for argument in arguments]
        child = _PROCESSES.Process(target=_run, args=(command, environment | variables, Path.cwd(), streams))
        child.start()
        child.join(WITHIN_S)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise TimeoutError(f"{command} had not ended after {WITHIN_S:g} s")
        texts = [(each.seek(0), each.read().decode())[1] for each in (out, err)]
        return Ended(child.exitcode, *texts)


def _run(command: list[str], environment: Mapping[str, str], directory: Path, streams: list[Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream.detach(), target)
    kind, what, *rest = command
    sys.argv = [what, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<command>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as `python -c`
