"""The endpoint of a run: one that exists, or a fleet that is started for the run. Both are ready when they are used."""

import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from bench.processes import FleetProcesses, FleetShape, roles_of, settings_of
from bench.sweep.plan import RunInputs
from kv_runtime.clock import SystemClock

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
    roles = roles_of(aggregated=aggregated, prefill=prefill, decode=decode)
    return FleetShape(
        workers=0,
        ids=tuple(roles),
        more_settings=settings_of(roles),
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
