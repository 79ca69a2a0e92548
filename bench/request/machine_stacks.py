"""Moments of a compiled router: stacks of machine code that `perf` samples, with the functions that mypyc made of ours.

mypyc names the machine code of `package.module:Class.function` `CPyDef_package___module___Class___function`. Functions
that are still interpreted have no symbol: they count to the compiled function that calls them, or to no stage.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from bench.request.stages import STAGES, WRITES, Moment
from bench.request.tools import PERF, beside, output_of
from router.compiled import MODULES

_HZ = 499
_STACK_BYTES = 16_384
_LOOP = "uv_run"
"""libuv's loop: what is outside of it is the same for every moment."""
_INTERPRETER = "_PyEval_EvalFrameDefault"
_WRITE = re.compile(r"__pyx_\w+UVStream_\w*write(?:lines)?")
_WRITING = STAGES[WRITES][0]
_MODULES = {name.replace(".", "___"): name for name in MODULES}
_OURS = re.compile(rf"CPy(?:Def|Py)_({'|'.join(sorted(_MODULES, key=len, reverse=True))})___(.+)")


async def machine_moments(pid: int, directory: Path, work: Callable[[], Awaitable[float]]) -> list[Moment]:
    """Return the moments of a process while `work` runs.

    Raises:
        ToolAbsent: `perf` is absent, or may not sample.
    """
    data = str(directory / "stacks.data")
    how = ("-e", "cpu-clock", "-F", str(_HZ), "--call-graph", f"dwarf,{_STACK_BYTES}")
    await beside([PERF, "record", *how, "-p", str(pid), "-o", data], work)
    printed = await output_of([PERF, "script", "-i", data, "-F", "ip,sym", "--no-inline"])
    return moments(printed)


def moments(printed: str) -> list[Moment]:
    """Return the moments in what `perf script -F ip,sym` prints."""
    found = Counter(_places(stack) for stack in _stacks(printed))
    return [Moment(times, begins=False, places=places) for places, times in found.items()]


def _stacks(printed: str) -> Iterator[list[str]]:
    for block in printed.split("\n\n"):
        symbols = [line.split(maxsplit=1)[-1] for line in block.splitlines() if line.strip()]
        if symbols:
            yield symbols[: symbols.index(_LOOP)] if _LOOP in symbols else symbols


def _places(symbols: list[str]) -> tuple[str, ...]:
    """Return the places of a stack; an unknown one if only interpreted functions are in it."""
    places = tuple(place for symbol in symbols if (place := place_of(symbol)) is not None)
    if all(place == _WRITING for place in places) and _INTERPRETER in symbols:
        return (":interpreted",)
    return places


def place_of(symbol: str) -> str | None:
    """Return the place of a compiled function of ours, or of a write to a socket; None: neither."""
    if _WRITE.fullmatch(symbol):
        return _WRITING
    found = _OURS.fullmatch(symbol)
    return None if found is None else f"{_MODULES[found[1]]}:{found[2].replace('___', '.', 1)}"
