"""A sweep: run after run, each into its file; what is there already is not measured again.

The endpoint of a run exists, or is a fleet that is started for the run. Both are ready when they are used.

The load of a run:

concurrency   each user sends the next request when its answer has ended
rate          a request is sent at its moment, whether or not others are answered; at most all requests of the run
              are open at once
warm-up       before: requests of the same kind, at most 8 at once, that are not measured
prompt        `prefix_share` of its tokens are one of `prefixes` texts, drawn at random; the rest is drawn for it alone
ids           32..126: printable ASCII in the byte tokenizer, ordinary tokens in the vocabularies of models

Prompts are ids, so that their length is exact at any endpoint, without its tokenizer. Runs with different lengths,
shares or loads share no prompt: at an endpoint that goes on between runs, no run finds what another one left.
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
import msgspec

from bench.processes import FleetProcesses, FleetShape
from bench.report import lag_s, machine_line
from bench.streaming_client import Measured, StreamingClient
from bench.sweep import results
from bench.sweep.results import RunFigures, RunInputs, RunRecord, difference, figures, left, time_left
from bench.tables import commit
from kv_runtime.clock import Clock, SystemClock
from kv_runtime.extras import DISTRIBUTION

_WARMUP_AT_ONCE = 8
_IDS = range(32, 127)


class SweepLoad:
    """Sends the requests of one run; `timeout_s` is for one answer, from its request's sending to its end."""

    def __init__(self, inputs: RunInputs, clock: Clock, *, timeout_s: float) -> None:
        self._inputs, self._clock = inputs, clock
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._prompts = prompts(inputs)

    async def warm_up(self, url: str) -> list[Measured]:
        """Return how the warm-up's requests fared."""
        inputs = self._inputs
        async with self._session() as session:
            client = StreamingClient(session, url, self._clock, began_s=self._clock.now())
            bodies = islice(self._bodies(), inputs.warmup)
            return await self._closed(client, bodies, min(_WARMUP_AT_ONCE, inputs.warmup))

    async def play(self, url: str) -> list[Measured]:
        """Return how the run's requests fared. `warm_up` comes first, if at all."""
        inputs, bodies = self._inputs, islice(self._bodies(), self._inputs.requests)
        async with self._session() as session:
            client = StreamingClient(session, url, self._clock, began_s=self._clock.now())
            if inputs.concurrency:
                return await self._closed(client, bodies, inputs.concurrency)
            return await self._open(client, bodies)

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout)

    def _bodies(self) -> Iterator[dict[str, object]]:
        inputs = self._inputs
        for prompt in self._prompts:
            yield {"model": inputs.model, "prompt": prompt, "max_tokens": inputs.osl_tokens, "ignore_eos": True}

    async def _closed(self, client: StreamingClient, bodies: Iterator[dict[str, object]], users: int) -> list[Measured]:
        measured: list[Measured] = []

        async def user() -> None:
            for body in bodies:
                answer = await _sent(client, body)
                measured.append(answer)

        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())
        return measured

    async def _open(self, client: StreamingClient, bodies: Iterator[dict[str, object]]) -> list[Measured]:
        began_s, sent = self._clock.now(), list[asyncio.Task[Measured]]()
        async with asyncio.TaskGroup() as group:
            for at_s, body in zip(arrivals_s(self._inputs), bodies, strict=False):  # arrivals have no end
                await self._clock.sleep(began_s + at_s - self._clock.now())
                sent.append(group.create_task(_sent(client, body)))
        return [each.result() for each in sent]


async def _sent(client: StreamingClient, body: dict[str, object]) -> Measured:
    return (await client.send("/v1/completions", body))[1]


def prompts(inputs: RunInputs) -> Iterator[list[int]]:
    """Yield the prompts of the warm-up and then of the run, without an end."""
    draw = Random(f"{inputs.seed} {_workload(inputs)}")  # noqa: S311 - a workload, not a secret
    prefix_tokens = round(inputs.isl_tokens * inputs.prefix_share)
    prefixes = [draw.choices(_IDS, k=prefix_tokens) for _ in range(inputs.prefixes)]
    while True:
        yield draw.choice(prefixes) + draw.choices(_IDS, k=inputs.isl_tokens - prefix_tokens)


def arrivals_s(inputs: RunInputs) -> Iterator[float]:
    """Yield when each request is sent, in seconds from the first; `rate` is above 0."""
    draw, at_s = Random(f"{inputs.seed} arrivals {_workload(inputs)}"), 0.0  # noqa: S311 - as above
    while True:
        yield at_s
        at_s += draw.expovariate(inputs.rate)


def _workload(inputs: RunInputs) -> str:
    return f"{inputs.isl_tokens} {inputs.osl_tokens} {inputs.prefix_share:g} {inputs.load}"


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


_POLL_S = 0.5
_ANSWER_S = 10.0
_OK, _NOT_FOUND = 200, 404
_QUIET = "telemetry.log_level=warning"
_LAYOUT = re.compile(r"(?:([1-9]\d?)a|([1-9]\d?)p([1-9]\d?)d)")


class EndpointNotReady(Exception):
    """The endpoint did not become ready in time; the message has what it answered last."""


Lags = Callable[[], Awaitable[dict[str, Counter[float]]]]


@asynccontextmanager
async def endpoint_of(inputs: RunInputs, *, wait_s: float) -> AsyncIterator[tuple[str, Lags | None]]:
    """Yield the endpoint's URL once it is healthy and serves the model, and how the fleet's event-loop lag is read.

    Raises:
        EndpointNotReady: it was not, within `wait_s`.
        ProcessFailed: the fleet did not start.
    """
    if inputs.url:
        await until_served(inputs.url, inputs.model, wait_s=wait_s)
        yield inputs.url, None
        return
    async with FleetProcesses(shape_of(inputs)) as fleet:
        await until_served(fleet.data_url, inputs.model, wait_s=wait_s)
        yield fleet.data_url, fleet.lags


def workers_of(layout: str) -> tuple[int, int, int]:
    """Return the aggregated, prefill and decode workers of a layout such as `4a` or `1p3d`.

    Raises:
        ValueError: it is none.
    """
    found = _LAYOUT.fullmatch(layout)
    if found is None:
        raise ValueError(layout)
    aggregated, prefill, decode = (int(each or 0) for each in found.groups())
    return aggregated, prefill, decode


def shape_of(inputs: RunInputs) -> FleetShape:
    """Return the fleet of a run."""
    aggregated, prefill, decode = workers_of(inputs.layout)
    return FleetShape(
        workers=aggregated,
        prefill=prefill,
        decode=decode,
        mode=inputs.mode,
        model=inputs.model,
        worker_settings=(_QUIET, *inputs.worker_settings),
        router_settings=(_QUIET, f"policy.seed={inputs.seed}", *inputs.router_settings),
    )


async def until_served(url: str, model: str, *, wait_s: float) -> None:
    """Return once `/health`, if it is there, is 200, `/v1/models` lists the model, and a request is answered."""
    clock, problem = SystemClock(), ""
    ends_s = clock.now() + wait_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
        while True:
            problem = await _problem(session, url, model)
            if not problem:
                return
            if clock.now() >= ends_s:
                raise EndpointNotReady(f"{url} is not ready after {wait_s:g} s: {problem}")
            await clock.sleep(_POLL_S)


async def _problem(session: aiohttp.ClientSession, url: str, model: str) -> str:
    try:
        async with session.get(f"{url}/health") as response:
            if response.status not in (_OK, _NOT_FOUND):
                return f"/health: found status {response.status}, allowed 200"
        async with session.get(f"{url}/v1/models") as response:
            if response.status != _OK:
                return f"/v1/models: found status {response.status}, allowed 200"
            names = [str(each["id"]) for each in msgspec.json.decode(await response.read())["data"]]
        if model not in names:
            return f"model: found {', '.join(names) or 'none'}, allowed {model}"
        asked = {"model": model, "prompt": [32], "max_tokens": 1}
        async with session.post(f"{url}/v1/completions", json=asked) as response:
            return "" if response.status == _OK else f"a request: found status {response.status}, allowed 200"
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


async def version_of(url: str) -> str:
    """Return what the endpoint says of its version at `/version`; empty: it says nothing."""
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/version") as response:
            return (await response.text())[:200] if response.status == _OK else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""
