"""The real data plane on a port that the system chose, with a state that the test fills and an index that it fakes."""

import asyncio
import io
import itertools
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, cast

import aiohttp

from kv_protocol.fleet import WorkerLeft
from kv_protocol.journal import FleetApplied, OutcomeKnown, WorkerHeard
from kv_runtime.telemetry import new_registry
from kv_runtime.text.byte_model import ByteText
from router.config import DataSection, FailuresSection, RouterSettings, RouterTelemetrySection
from router.decision.policies import MODES, Mode
from router.decision.policy import Policy
from router.decision.policy_config import DisaggregationSection
from router.decision.routing import Routing
from router.decision.state import RouterState, StateSettings
from router.fleet.registry import SILENT_S, TextDigests
from router.http.limits import HttpLimits
from router.http.plane import HttpPlane
from router.metrics import RequestMetrics
from router.prompt.prompts import ModelPrompts
from router.queue.config import QueueSection
from router.queue.gate import Admission
from router.queue.tenants import TenantNames
from router.request.endpoints import endpoints
from router.request.serving import Serving
from router.request.tracing import Tracer
from tests.support.manual_clock import ManualClock
from tests.unit.router.samples import MODEL, FakeIndex, registered

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = list(range(64))
"""Four blocks, of which three can be reused."""
TEXT = ByteText()
NOW_S = 1000.0


class Checked:
    """Counts the checks of its timeouts, of which it has none."""

    due_s = 0.0

    def __init__(self) -> None:
        self.checks = asyncio.Semaphore(0)

    def check_timeouts(self, now_s: float) -> None:
        """Count the check."""
        assert now_s > 0
        self.checks.release()


class Answered(NamedTuple):
    """An answer as the client got it."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error in the body."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return cast("dict[str, Any]", error)


class Plane:
    """The router as its clients see it, and what a test looks at behind it."""

    def __init__(
        self,
        settings: RouterSettings,
        policy: Policy,
        limits: HttpLimits,
        tracer: Tracer | None = None,
        decisions_max: int = 1000,
        modes: Mapping[str, Mode] = MODES,
    ) -> None:
        self.clock = ManualClock(now_s=NOW_S)
        text = TextDigests(TEXT.tokenizer_digest, TEXT.template_digest)
        folds = StateSettings(text=text, breakers=settings.failures.breakers())
        self.state = RouterState(folds, modes)
        self.index = FakeIndex()
        self.routing = Routing(
            self.state, self.index, self.clock, policy, seed=1, lease_s=300.0, decisions_max=decisions_max
        )
        self.registry = new_registry()
        number = itertools.count(1)
        self.admission = Admission(self.routing, settings.queue)
        self.prompts = ModelPrompts(TEXT)
        self.sampled: list[tuple[str, str]] = []
        self.serving = Serving(
            self.routing,
            self.prompts,
            self.admission,
            RequestMetrics(self.registry, self.routing),
            TenantNames(settings.queue.fair_share_by, bytes(32)),
            settings,
            lambda: f"id-{next(number)}",
            sample=lambda inbound, worker_id: self.sampled.append((inbound.model, worker_id)),
            tracer=tracer,
        )
        service = endpoints(self.serving, passed_paths=settings.data.passed_paths)
        self.server = HttpPlane(service, limits, posts=service.posts, credentials=settings.data.credentials(self.clock))
        self._writers: list[asyncio.StreamWriter] = []
        self.session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server.port}"

    def join(self, worker_id: str, base_url: str, *, holds: int = 0, **changed: Any) -> None:
        """Let a worker join that holds so many blocks of every prompt on all its ranks."""
        fields: dict[str, Any] = {
            "tokenizer_digest": TEXT.tokenizer_digest,
            "template_digest": TEXT.template_digest,
            "accepts_token_ids": True,
            "base_url": base_url,
        }
        registration = registered(worker_id, **fields | changed)
        self.state.apply(FleetApplied(now_s=self.clock.now(), event=registration))
        self.hear(worker_id)
        for each in registration.ranks:
            self.index.held[each] = holds

    def hear(self, worker_id: str) -> None:
        """Let a worker's heartbeat come."""
        worker = self.state.fleet.worker(worker_id)
        assert worker is not None
        instance = worker.registration.instance
        self.state.apply(WorkerHeard(now_s=self.clock.now(), worker_id=worker_id, instance=instance))

    async def fall_silent(self, *worker_ids: str) -> None:
        """Let these workers be silent for too long, and all others be heard."""
        await self.clock.advance(SILENT_S)
        for worker in list(self.state.fleet.workers()):
            if worker.registration.worker_id not in worker_ids:
                self.hear(worker.registration.worker_id)

    def leave(self, worker_id: str) -> None:
        """Let a worker leave."""
        left = WorkerLeft(worker_id=worker_id, instance=f"{worker_id}-1")
        self.state.apply(FleetApplied(now_s=self.clock.now(), event=left))

    async def post(self, body: Any = None, path: str = COMPLETIONS, **headers: str) -> Answered:
        """Post a body (None: the usual prompt; a dict: changes to it; bytes: as they are)."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = io.BytesIO(encoded(body))
        async with self.session.post(self.url + path, data=data, headers=named) as response:
            return Answered(response.status, response.headers.copy(), await response.read())

    async def get(self, path: str) -> Answered:
        """Get a path."""
        async with self.session.get(self.url + path) as response:
            return Answered(response.status, response.headers.copy(), await response.read())

    async def dial(
        self, body: Any = None, path: str = COMPLETIONS, headers: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request over a connection of its own, which the test may leave at any time."""
        data = encoded(body)
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n".encode()
        return await self.dial_bytes(head + headers + b"\r\n" + data)

    async def dial_bytes(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send these bytes over a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        self._writers.append(writer)
        writer.write(data)
        return reader, writer

    async def checked(self) -> None:
        """Return once the timeouts of every connection were checked."""
        last, checked = Checked(), cast("set[Checked]", self.server.upstreams.connections)
        checked.add(last)
        for _ in range(2):  # all others come between two checks of this one
            await last.checks.acquire()
        checked.discard(last)

    async def hang_up(self) -> None:
        """Close all of the test's connections."""
        await self.session.close()
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def unfit(self, worker_id: str) -> str:
        """Return why a worker takes no new work."""
        now_s = self.clock.now()
        hashing = self.state.fleet.hashing(MODEL, now_s)
        assert hashing is not None
        standing = self.state.model_view(MODEL, *hashing, now_s)
        return next(
            why for each, why in zip(standing.ranks, standing.unfit, strict=True) if each.worker_id == worker_id
        )

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample's value; 0 where there is none."""
        return self.registry.get_sample_value(f"kvrouter_{name}", labels) or 0.0

    def exemplars(self, histogram: str) -> dict[str, float]:
        """Return the values of a histogram's exemplars by their traces."""
        samples = [sample for family in self.registry.collect() for sample in family.samples]
        found = [each.exemplar for each in samples if each.name == f"kvrouter_{histogram}_bucket" and each.exemplar]
        return {each.labels["trace_id"]: each.value for each in found}

    def outcomes(self) -> dict[str, int]:
        """Return how many requests ended how, by the metrics."""
        found = {
            outcome: int(self.metric("requests_total", model=model, mode=self.routing.policy.mode, outcome=outcome))
            for outcome in ("ok", "refused", "failed", "cancelled")
            for model in (MODEL,)
        }
        return {outcome: count for outcome, count in found.items() if count}

    def outcome(self, any_id: str) -> OutcomeKnown:
        """Return how a decision, or a request's last one, turned out."""
        record = self.routing.decisions.find(any_id)
        assert record is not None
        assert record.outcome is not None
        return record.outcome

    def assert_nothing_is_promised(self) -> None:
        """Every sum is 0, as no request is in flight."""
        for each, load in self.state.loads().items():
            assert (load.active_requests, load.active_blocks, load.prefill_tokens_queued) == (0, 0, 0), each
        assert self.state.core.open_leases == 0
        assert self.metric("inflight_requests") == 0
        assert self.serving.metrics.inflight == self.server.inflight == 0
        assert all(record.outcome for record in self.routing.decisions.newest(1000)), "every decision has an outcome"


def encoded(body: Any) -> bytes:
    """Return the bytes to send."""
    if isinstance(body, bytes):
        return body
    return json.dumps({"model": MODEL, "prompt": PROMPT} | (body or {})).encode()


def reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection: the other side learns at once that the client left."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def until(holds: Callable[[], bool]) -> None:
    """Let all other tasks run until something holds."""
    while not holds():  # noqa: ASYNC110 - sums have no event
        await asyncio.sleep(0)


@asynccontextmanager
async def running_plane(
    *,
    policy: Policy | None = None,
    limits: HttpLimits | None = None,
    queue: Mapping[str, Any] | None = None,
    disaggregation: Mapping[str, Any] | None = None,
    request_log_ratio: float = 0.0,
    data: Mapping[str, Any] | None = None,
    tracer: Tracer | None = None,
    decisions_max: int = 1000,
    modes: Mapping[str, Mode] = MODES,
    **failures: float,
) -> AsyncIterator[Plane]:
    """Run a plane; when it is over nothing may be promised any more."""
    settings = RouterSettings(
        queue=QueueSection(**{"inflight_requests_max": 1000} | dict(queue or {})),
        failures=FailuresSection(**failures),
        disaggregation=DisaggregationSection(**(disaggregation or {})),
        telemetry=RouterTelemetrySection(request_log_ratio=request_log_ratio),
        data=DataSection(**(data or {})),
    )
    bounds = limits or HttpLimits(body_bytes_max=1 << 20, drain_s=0.0)
    plane = Plane(settings, policy or Policy(), bounds, tracer, decisions_max, modes)
    stop = asyncio.Event()
    await plane.server.start("127.0.0.1", 0)
    serving = asyncio.ensure_future(plane.server.run(stop))
    try:
        yield plane
        await until(lambda: plane.serving.metrics.inflight == 0)
        plane.assert_nothing_is_promised()
    finally:
        await plane.hang_up()
        stop.set()
        await serving
