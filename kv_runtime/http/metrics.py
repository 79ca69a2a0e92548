"""The handler of `/metrics`, which yields to the event loop between families, and within large ones."""

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import chain, count, islice

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kv_runtime.http.answers import Handler
from kv_runtime.telemetry import Family

SERVER_FAMILIES: web.AppKey[Callable[[], Iterable[Family]]] = web.AppKey("server_families")
"""The key under which an application has the function that returns its server's families."""
_METRICS_TURN_S = 0.001
"""How long a scrape computes before it yields to the event loop."""
SAMPLES_AT_ONCE = 100
"""Samples that are encoded at once, which takes about 0.5 ms; a family of 10,000 ranks may have 30,000."""


class _Some(Collector):
    """A collector of only these families."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def metrics_handler(registry: CollectorRegistry, now: Callable[[], float] = time.perf_counter) -> Handler:
    """Return a handler that serves `registry` in the format that the scraper accepts; `now` is in seconds.

    Families are made one by one, and encoded in parts of `SAMPLES_AT_ONCE`: a large fleet's take more than
    100 ms. The handler yields to the event loop after each millisecond, not after each part: if the loop is loaded,
    every yield takes long, and the scraper would time out.
    """

    async def metrics(request: web.Request) -> web.Response:
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        parts, end, turn_ends_s = [], encoder(_Some()), now() + _METRICS_TURN_S
        of_server = request.app.get(SERVER_FAMILIES)
        for family in chain(of_server() if of_server else (), registry.collect()):
            samples = iter(family.samples)
            for number in count():
                part = Metric(family.name, family.documentation, family.type, family.unit)
                part.samples = list(islice(samples, SAMPLES_AT_ONCE))
                if number and not part.samples:
                    break
                encoded = encoder(_Some(part)).removesuffix(end)
                parts.append(_without_head(encoded) if number else encoded)
                if now() >= turn_ends_s:
                    await asyncio.sleep(0)
                    turn_ends_s = now() + _METRICS_TURN_S
        return web.Response(body=b"".join((*parts, end)), headers={"Content-Type": content_type})

    return metrics


def _without_head(encoded: bytes) -> bytes:
    """Return the lines of samples only: the family's HELP and TYPE lines came with its first part."""
    while encoded.startswith(b"# "):
        encoded = encoded.partition(b"\n")[2]
    return encoded
