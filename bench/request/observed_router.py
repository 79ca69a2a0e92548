"""A `router` process that can be observed: `python -m bench.request.observed_router DIRECTORY OPTIONS`.

SIGUSR1    starts to sample the stack of the main thread, which runs the event loop, every `SAMPLE_S`
SIGUSR2    stops, and writes DIRECTORY/stacks.json (`stages.SampledStack`)
"""

import signal
import sys
from collections import Counter
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType

import msgspec

from bench.request.stages import OBSERVER, RUNNER, SampledStack
from router.__main__ import main

SAMPLE_S = 0.002
_ROOTS = sorted({Path(__file__).parents[2], *map(Path, sys.path)}, key=lambda root: -len(str(root)))


@cache
def place_of(code: CodeType) -> str:
    """Return `package.module:Class.function`; without a module for generated code."""
    path, name = Path(code.co_filename), getattr(code, "co_qualname", code.co_name)
    if path == Path(__file__):
        return f"{OBSERVER}:{name}"
    root = next((each for each in _ROOTS if path.is_absolute() and path.is_relative_to(each)), None)
    if root is None:
        return f":{name}"
    return f"{'.'.join(path.relative_to(root).with_suffix('').parts).removesuffix('.__init__')}:{name}"


class Sampling:
    """Samples of the stack, `SAMPLE_S` apart.

    The loop is not woken up for samples: a sample during the loop's own work is taken when it calls the next function.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._wakeup = directory, -1
        self._codes: dict[int, CodeType] = {}
        """The code objects by their ids, because hashing them is slow."""
        self._found: Counter[tuple[bool, tuple[int, ...]]] = Counter()

    def start(self, *_signal: object) -> None:
        """Start the timer."""
        self._found.clear()
        self._wakeup = signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGALRM, self._on_timer)
        signal.setitimer(signal.ITIMER_REAL, SAMPLE_S, SAMPLE_S)

    def _on_timer(self, _number: int, frame: FrameType | None) -> None:
        begins, stack, codes = frame is not None and frame.f_lasti <= 0, list[int](), self._codes
        while frame is not None:
            code = frame.f_code
            codes[id(code)] = code
            stack.append(id(code))
            frame = frame.f_back
        self._found[begins, tuple(stack)] += 1

    def _place(self, code_id: int) -> str:
        return place_of(self._codes[code_id])

    def stop(self, *_signal: object) -> None:
        """Stop the timer, and write the sampled stacks; the file is there complete or not at all."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.set_wakeup_fd(self._wakeup)
        stacks = [
            SampledStack(
                times, begins, list(takewhile(lambda place: not place.startswith(RUNNER), map(self._place, stack)))
            )
            for (begins, stack), times in self._found.items()
        ]
        own = f"{OBSERVER}:Sampling"
        routers = [each for each in stacks if not any(place.startswith(own) for place in each.places)]
        part = self._directory / "stacks.part"
        part.write_bytes(msgspec.json.encode(routers))
        part.rename(self._directory / "stacks.json")


if __name__ == "__main__":
    sampling = Sampling(Path(sys.argv.pop(1)))
    signal.signal(signal.SIGUSR1, sampling.start)
    signal.signal(signal.SIGUSR2, sampling.stop)
    main()
