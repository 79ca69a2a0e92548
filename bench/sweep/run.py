"""A sweep: run after run, each into its file; what is there already is not measured again.

The endpoint of a run exists, or is a fleet that is started for the run. Both are ready when they are used.

The load of a run:

concurrency   each user sends the next request when its answer has ended
rate          a request is sent at its moment, whether or not others are answered: nothing limits how many are open
              at once
warm-up       before: requests of the same kind, at most 8 at once, that are not measured
prompt        `prefix_share` of its tokens are one of `prefixes` texts, drawn at random; the rest only this prompt has
ids           32..126: printable ASCII in the byte tokenizer, ordinary tokens in the vocabularies of models

Prompts are ids, so that their length is exact at any endpoint, without its tokenizer. Runs with different lengths,
shares or loads share no prompt: at an endpoint that lasts over several runs, none finds cached blocks of another.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from random import Random

import aiohttp

from bench.child import BenchFailed
from bench.processes import FleetProcesses, FleetShape
from bench.report import lag_s, machine_line
from bench.streaming_client import Measured, StreamingClient, until_served
from bench.sweep import results
from bench.sweep.results import RunFigures, RunInputs, RunRecord, difference, figures, left, time_left
from bench.tables import commit
from kv_runtime.clock import Clock
from kv_runtime.extras import DISTRIBUTION

_PATH = "/v1/completions"
_WARMUP_AT_ONCE = 8
_IDS = range(32, 127)


class SweepLoad:
    """Sends the requests of one run; `timeout_s` is for one answer, from its request's sending to its end."""

    def __init__(self, inputs: RunInputs, clock: Clock, *, timeout_s: float) -> None:
        self._inputs, self._clock = inputs, clock
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._prompts = prompts(inputs)

    async def send(self, url: str, count: int, users: int) -> list[Measured]:
        """Send the next `count` requests and return their measurements.

        `users` send one at a time each; 0: requests are sent at the run's rate.
        """
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=self._timeout) as session:
            client = StreamingClient(session, url, self._clock, began_s=self._clock.now())
            bodies = islice(self._bodies(), count)
            return await (self._closed(client, bodies, users) if users else self._open(client, bodies))

    def _bodies(self) -> Iterator[dict[str, object]]:
        inputs = self._inputs
        for prompt in self._prompts:
            yield {"model": inputs.model, "prompt": prompt, "max_tokens": inputs.osl_tokens, "ignore_eos": True}

    async def _closed(self, client: StreamingClient, bodies: Iterator[dict[str, object]], users: int) -> list[Measured]:
        measured: list[Measured] = []

        async def user() -> None:
            for body in bodies:
                _, answer = await client.send(_PATH, body)
                measured.append(answer)

        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())
        return measured

    async def _open(self, client: StreamingClient, bodies: Iterator[dict[str, object]]) -> list[Measured]:
        began_s, sent = self._clock.now(), list[asyncio.Task[tuple[str, Measured]]]()
        async with asyncio.TaskGroup() as group:
            for at_s, body in zip(arrivals_s(self._inputs), bodies, strict=False):  # arrivals have no end
                await self._clock.sleep(began_s + at_s - self._clock.now())
                sent.append(group.create_task(client.send(_PATH, body)))
        return [each.result()[1] for each in sent]


def prompts(inputs: RunInputs) -> Iterator[list[int]]:
    """Yield the prompts of the warm-up and then of the run, without an end."""
    draw = Random(f"{inputs.seed} {_workload(inputs)}")  # noqa: S311 - a workload, not a secret
    prefix_tokens = round(inputs.isl_tokens * inputs.prefix_share)
    prefixes = [draw.choices(_IDS, k=prefix_tokens) for _ in range(inputs.prefixes)]
    while True:
        yield draw.choice(prefixes) + draw.choices(_IDS, k=inputs.isl_tokens - prefix_tokens)


def arrivals_s(inputs: RunInputs) -> Iterator[float]:
    """Yield when each request is sent, in seconds from the first; `rate` must be above 0."""
    draw, at_s = Random(f"{inputs.seed} arrivals {_workload(inputs)}"), 0.0  # noqa: S311 - as above
    while True:
        yield at_s
        at_s += draw.expovariate(inputs.rate)


def _workload(inputs: RunInputs) -> str:
    return f"{inputs.isl_tokens} {inputs.osl_tokens} {inputs.prefix_share:g} {inputs.load}"


class Sweep:
    """Runs whose files are in one directory; `say` gets a line for each."""

    def __init__(
        self, runs: Sequence[RunInputs], directory: Path, *, say: Callable[[str], None], wait_s: float, timeout_s: float
    ) -> None:
        self._runs, self._directory, self._say = runs, directory, say
        self._wait_s, self._timeout_s = wait_s, timeout_s
        self._clock = Clock()
        self._took_s: dict[RunInputs, float] = {}

    async def go(self) -> int:
        """Return how many runs were measured, once every run has a file with its inputs.

        Raises:
            BenchFailed: no request of a run was answered, or its endpoint did not become ready; the runs after it were
                not begun.
            ProcessFailed: the fleet of a run did not start.
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
                _check(inputs, await load.send(url, inputs.warmup, _WARMUP_AT_ONCE), "the warm-up")
            before = await lags() if lags else {}
            measured = await load.send(url, inputs.requests, inputs.concurrency)
            after = await lags() if lags else {}
            served_by = await version_of(url)
        _check(inputs, measured, "the run")
        lag_p99_s = max((lag_s(before[url], after[url], 0.99) for url in after), default=None)
        own = {DISTRIBUTION: version(DISTRIBUTION), "commit": commit(), "aiohttp": aiohttp.__version__}
        return RunRecord(
            inputs=inputs,
            figures=figures(measured, workers=inputs.workers, lag_p99_s=lag_p99_s),
            versions=own | {"endpoint": served_by},
            machine=machine_line(),
            began=began.isoformat(timespec="seconds"),
            took_s=self._clock.now() - began_s,
        )


def _check(inputs: RunInputs, measured: Sequence[Measured], phase: str) -> None:
    if all(each.error for each in measured):
        (reason, count), *_ = Counter(each.error for each in measured).most_common(1)
        raise BenchFailed(f"{inputs.name}: no request of {phase} was answered: {count} x {reason}")


def _in_words(each: RunFigures) -> str:
    failed = f", {each.failed} failed" if each.failed else ""
    return (
        f"{each.tokens_s_worker:.0f} tok/s a worker, {each.tokens_s_user:.0f} a user, "
        f"TTFT p50 {each.ttft_s[0] * 1e3:.0f} ms, hit rate {each.hit_rate:.0%}{failed}"
    )


_ANSWER_S = 10.0
_OK = 200
_QUIET = "telemetry.log_level=warning"
_LAYOUT = re.compile(r"(?:([1-9]\d?)a|([1-9]\d?)p([1-9]\d?)d)")


Lags = Callable[[], Awaitable[dict[str, Counter[float]]]]


@asynccontextmanager
async def endpoint_of(inputs: RunInputs, *, wait_s: float) -> AsyncIterator[tuple[str, Lags | None]]:
    """Yield the endpoint's URL once it answers a request for the model, and how the fleet's event-loop lag is read.

    Raises:
        BenchFailed: it did not answer within `wait_s`.
        ProcessFailed: the fleet did not start.
    """
    if inputs.url:
        await until_served(inputs.url, {"model": inputs.model, "prompt": [32], "max_tokens": 1}, wait_s=wait_s)
        yield inputs.url, None
        return
    aggregated, prefill, decode = workers_of(inputs.layout)
    shape = FleetShape(
        workers=aggregated,
        prefill=prefill,
        decode=decode,
        mode=inputs.mode,
        model=inputs.model,
        worker_settings=(_QUIET, *inputs.worker_settings),
        router_settings=(_QUIET, f"policy.seed={inputs.seed}", *inputs.router_settings),
    )
    async with FleetProcesses(shape) as fleet:
        yield fleet.data_url, fleet.lags


def workers_of(layout: str) -> tuple[int, int, int]:
    """Return the aggregated, prefill and decode workers of a layout such as `4a` or `1p3d`.

    Raises:
        ValueError: `layout` is not of that form.
    """
    found = _LAYOUT.fullmatch(layout)
    if found is None:
        raise ValueError(layout)
    aggregated, prefill, decode = (int(each or 0) for each in found.groups())
    return aggregated, prefill, decode


async def version_of(url: str) -> str:
    """Return what the endpoint says of its version at `/version`; empty: it says nothing."""
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/version") as response:
            return (await response.text())[:200] if response.status == _OK else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""
