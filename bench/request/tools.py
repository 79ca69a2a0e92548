"""`strace` and `perf` on a running process, where this machine has and permits them; and readers of what they print."""

import asyncio
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from kv_runtime.process import child_environment

STRACE, PERF = "strace", "perf"
_ATTACH_S = 0.5
_PERF_HZ = 997
_COLUMNS_MIN = 5


class ToolAbsent(Exception):
    """A tool is not on PATH, or may not be used; the message has the reason."""


async def counted_calls(pid: int, directory: Path, work: Callable[[], Awaitable[float]]) -> dict[str, float]:
    """Return the system calls of a process and its threads, by name, for each of the units that `work` returns.

    Raises:
        ToolAbsent: `strace` is absent, or printed no counts.
    """
    written = directory / "strace"
    units = await beside([STRACE, "-c", "-f", "-q", "-p", str(pid), "-o", str(written)], work)
    counts = system_calls(written.read_text())
    if not counts:
        raise ToolAbsent(f"{STRACE}: it counted nothing")
    return {name: count / units for name, count in counts.items() if units}


def system_calls(printed: str) -> dict[str, int]:
    """Return the numbers of calls by name in the table of `strace -c`."""
    counts = {}
    for line in printed.splitlines():
        columns = line.split()
        if len(columns) >= _COLUMNS_MIN and columns[3].isdigit() and columns[-1] != "total":
            counts[columns[-1]] = int(columns[3])
    return counts


async def sampled_objects(pid: int, directory: Path, work: Callable[[], Awaitable[float]]) -> dict[str, float]:
    """Return the shares of CPU time by shared object, `kernel.kallsyms` for the kernel, while `work` runs.

    Raises:
        ToolAbsent: `perf` is absent, or may not sample.
    """
    data = str(directory / "perf.data")
    command = [PERF, "record", "-e", "cpu-clock", "-F", str(_PERF_HZ), "-p", str(pid), "-o", data]
    await beside(command, work)
    report = [PERF, "report", "-i", data, "--stdio", "--sort", "dso", "--percent-limit", "0.1"]
    found = object_shares(await output_of(report))
    if not found:
        raise ToolAbsent(f"{PERF}: it sampled nothing")
    return found


def object_shares(printed: str) -> dict[str, float]:
    """Return the shares by shared object in what `perf report --sort dso` prints."""
    found = {}
    for line in printed.splitlines():
        share, _, name = line.strip().partition("%")
        if name and not line.startswith("#"):
            found[name.split()[0].strip("[]")] = float(share) / 100
    return found


async def beside(command: list[str], work: Callable[[], Awaitable[float]]) -> float:
    """Run a tool while `work` runs, and return what that returns.

    Raises:
        ToolAbsent: the tool is not on PATH, or ended at once.
    """
    if shutil.which(command[0]) is None:
        raise ToolAbsent(f"{command[0]}: not on PATH")
    tool = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=child_environment()
    )
    try:
        await asyncio.sleep(_ATTACH_S)
        if tool.returncode is not None:
            assert tool.stderr is not None
            said = (await tool.stderr.read()).decode(errors="replace").strip()
            raise ToolAbsent(f"{command[0]}: {said.splitlines()[-1] if said else 'it ended'}")
        return await work()
    finally:
        if tool.returncode is None:
            tool.send_signal(signal.SIGINT)
        await tool.communicate()


async def output_of(command: list[str]) -> str:
    """Return what a command prints."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=child_environment()
    )
    printed, _ = await process.communicate()
    return printed.decode(errors="replace")
