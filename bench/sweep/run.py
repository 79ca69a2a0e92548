"""A sweep: run after run, each into its file; what is there already is not measured again."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import aiohttp

from bench.report import lag_s, machine_line
from bench.streaming_client import Measured
from bench.sweep import results
from bench.sweep.endpoint import endpoint_of, version_of
from bench.sweep.figures import RunFigures, figures
from bench.sweep.load import SweepLoad
from bench.sweep.plan import RunInputs, difference, left, time_left
from bench.sweep.results import RunRecord
from bench.tables import commit
from kv_runtime.clock import SystemClock
from kv_runtime.extras import DISTRIBUTION

Say = Callable[[str], None]


class NothingAnswered(Exception):
    """No request of a run, or of its warm-up, was answered; the message has the run and the most frequent errors."""


class Sweep:
    """Runs whose files are in one directory; `say` gets a line for each."""

    def __init__(
        self, runs: Sequence[RunInputs], directory: Path, *, say: Say, wait_s: float, timeout_s: float
    ) -> None:
        self._runs, self._directory, self._say = runs, directory, say
        self._wait_s, self._timeout_s = wait_s, timeout_s
        self._clock = SystemClock()
        self._took_s: dict[RunInputs, float] = {}

    async def go(self) -> int:
        """Return how many runs were measured, once every run has a file with its inputs.

        Raises:
            NothingAnswered: of a run; the runs after it were not begun.
            EndpointNotReady, ProcessFailed: the endpoint or the fleet of a run.
            ResultInvalid: the directory has a file that is no run.
        """
        runs = self._still_left()
        for done, inputs in enumerate(runs, 1):
            record = await self._measured(inputs)
            results.write(self._directory, record)
            self._took_s[inputs] = record.took_s
            number = len(self._runs) - len(runs) + done
            rest = time_left(self._took_s, runs[done:])
            self._say(f"{number}/{len(self._runs)} {inputs.name}: {_in_words(record.figures)}; {rest}")
        return len(runs)

    def _still_left(self) -> list[RunInputs]:
        records = results.read(self._directory)
        found = {name: record.inputs for name, record in records.items()}
        self._took_s = {record.inputs: record.took_s for record in records.values()}
        runs = left(self._runs, found)
        for each in runs:
            if each.name in found:
                self._say(f"{each.name} is measured again: {difference(each, found[each.name])}")
        there = len(self._runs) - len(runs)
        self._say(f"{len(self._runs)} runs, of which {there} are there already; {time_left(self._took_s, runs)}")
        return runs

    async def _measured(self, inputs: RunInputs) -> RunRecord:
        began, began_s = datetime.now(UTC), self._clock.now()
        load = SweepLoad(inputs, self._clock, timeout_s=self._timeout_s)
        async with endpoint_of(inputs, wait_s=self._wait_s) as (url, lags):
            if inputs.warmup:
                _check(inputs, await load.warm_up(url), "the warm-up")
            before = await lags() if lags else {}
            measured = await load.play(url)
            after = await lags() if lags else {}
            served_by = await version_of(url)
        _check(inputs, measured, "the run")
        return RunRecord(
            inputs=inputs,
            figures=figures(measured, workers=inputs.workers, lag_p99_s=_worst(before, after)),
            versions=_versions(served_by),
            machine=machine_line(),
            began=began.isoformat(timespec="seconds"),
            took_s=self._clock.now() - began_s,
        )


def _check(inputs: RunInputs, measured: Sequence[Measured], phase: str) -> None:
    if all(each.error for each in measured):
        (reason, count), *_ = Counter(each.error for each in measured).most_common(1)
        raise NothingAnswered(f"{inputs.name}: no request of {phase} was answered: {count} x {reason}")


def _worst(before: dict[str, Counter[float]], after: dict[str, Counter[float]]) -> float | None:
    return max((lag_s(before[url], after[url], 0.99) for url in after), default=None)


def _versions(served_by: str) -> dict[str, str]:
    """Return what measured, and what was measured."""
    return {
        DISTRIBUTION: version(DISTRIBUTION),
        "commit": commit(),
        "aiohttp": aiohttp.__version__,
        "endpoint": served_by,
    }


def _in_words(each: RunFigures) -> str:
    failed = f", {each.failed} failed" if each.failed else ""
    return (
        f"{each.tokens_s_worker:.0f} tok/s a worker, {each.tokens_s_user:.0f} a user, "
        f"TTFT p50 {each.ttft_s[0] * 1e3:.0f} ms, hit rate {each.hit_rate:.0%}{failed}"
    )
