"""The load of a run: users in a closed loop, or requests at a rate, against one endpoint.

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
from collections.abc import Iterator
from itertools import islice
from random import Random

import aiohttp

from bench.streaming_client import Measured, StreamingClient
from bench.sweep.results import RunInputs
from kv_runtime.clock import Clock

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
