"""The simulated engine in a process: it steps the pure simulator in real time, `speed` engine seconds per second.

An iteration's outputs, events and statistics become visible at its deadline: the previous deadline plus its duration.
So a late wake-up shortens the next wait. A delay of more than one iteration is not caught up.

A KV transfer takes wall time and an HTTP call, but moves no data: the decode engine waits for as long as it would take,
then tells the prefill engine that all has come, which frees the blocks of the context.

    POST /v1/kv_transfers/ID    the body is the handoff's state; the answer is 200, or 404 if the prefill engine holds
                                no context with this id and state

The state is the only secret of a fetch, and there is no TLS: all engines of a fleet are on one machine, and use its
loopback address (`handovers.ENDPOINT`), so that a forged handoff cannot name another machine.

    role         what it computes
    aggregated   both phases of a request: prefill and decode
    prefill      one token and a handoff; `stop` also waits until the KV of each handoff is fetched, or has expired
    decode       fetches the handoff's KV, then generates; both phases for a request with `is_context_and_generation`.
                 A fetch continues when its request is cancelled: else the prefill engine would keep the blocks
    encode       images only, by `encode` and `embeddings`

Source of the fetch after a cancellation: `docs/SOURCES.md` D4.1 (5).
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from kv_runtime.clock import Clock
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import error_response, openai_errors
from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import TaskSet, until
from worker_agent.engines.simulated.handovers import HOST, OUTCOMES, TransferOutcome
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.media.inputs import digest_words
from worker_agent.media.safetensors import written_tensor
from worker_agent.port.handoff import Handoff
from worker_agent.port.types import (
    EngineDescription,
    EngineError,
    EngineOutput,
    EngineRequest,
    EngineStopped,
    KvFetches,
    Media,
    RequestRefused,
    takes_transfer,
)

STATISTICS_MAX = 10_000
TRANSFERS_PATH = "/v1/kv_transfers/"
_TRANSFER_BYTES_MAX = 4096
_TRANSFERS_DRAIN_S = 0.5
"""How long the stopping server waits for running requests: an engine that stops normally holds no context by then."""
_OUTCOMES: dict[int, TransferOutcome] = {200: "done", 404: "gone"}


class SimulatedEngine:
    """An `Engine` made of a simulator and a clock. It owns the simulator, and steps it on the event loop only.

    The event buffer is the simulator's; the newest `STATISTICS_MAX` rows of statistics are kept. A stream's queue holds
    at most its request's `max_tokens` for each choice.
    """

    def __init__(self, simulator: Simulator, clock: Clock, *, speed: float = 1.0) -> None:
        self._simulator, self._clock = simulator, clock
        self.contexts = simulator.contexts
        self.speed = speed
        """Engine seconds per second of the clock; a test may change it."""
        self._work, self._ended = asyncio.Event(), asyncio.Event()
        self.fetches = KvFetches(*OUTCOMES)
        self._transfers: HttpServer | None = None
        if simulator.role in ("prefill", "decode"):
            app = web.Application(middlewares=[openai_errors, require_token("")], client_max_size=_TRANSFER_BYTES_MAX)
            app.add_routes([web.post(TRANSFERS_PATH + "{name:[0-9]{1,19}}", self._hand_over)])
            self._transfers = HttpServer(app, HOST, 0, drain_s=_TRANSFERS_DRAIN_S, handler_cancellation=True)
        self._streams: dict[str, asyncio.Queue[EngineOutput | None]] = {}
        self._fetching = set[asyncio.Task[bool | None]]()
        self._fetch_slots = asyncio.Semaphore(len(simulator.description.dp_ranks) * simulator.description.max_num_seqs)
        self._accepting = False
        self._running = False
        self._stop_at_s: float | None = None
        self._deadline_s = 0.0
        self._changed = threading.Condition()  # guards the simulator's visible events and `_statistics`
        self._statistics = deque[dict[str, Any]](maxlen=STATISTICS_MAX)

    def describe(self) -> EngineDescription:
        """Return the simulator's description."""
        return self._simulator.description

    async def start(self) -> None:
        """Accept requests; `run` computes them, and answers other engines' KV fetches."""
        if self._transfers is not None:
            await self._transfers.start()
            self.contexts.endpoint = f"http://{HOST}:{self._transfers.port}"
        self._accepting = True

    async def run(self) -> None:
        """Step the simulator until `stop`, waiting without polling while there is nothing to do."""
        self._running = True
        try:
            async with TaskSet(1) as tasks:
                if self._transfers is not None:
                    tasks.spawn(self._transfers.run(self._ended), name="kv transfers")
                try:
                    while not self._is_over():
                        await self._step_or_wait()
                finally:
                    self._end()
        finally:
            self._running = False
            await self._end_all()

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests; return when none runs. After `grace_s`, end the running ones at the iteration's end."""
        self._accepting = False
        self._stop_at_s = self._clock.now() + grace_s
        self._work.set()
        if self._running:
            await self._ended.wait()
        else:
            await self._end_all()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Yield one token of a choice at a time; see `Engine`."""
        names = [request.request_id, *(f"{request.request_id}#{n}" for n in range(1, request.sampling.choices))]
        self._check(request, names)
        outputs: asyncio.Queue[EngineOutput | None] = asyncio.Queue()
        self._streams |= dict.fromkeys(names, outputs)
        stopped = EngineStopped(f"{request.request_id}: the engine stopped before the answer's end")
        try:
            if takes_transfer(request, self._simulator.role):
                fetch = asyncio.create_task(self._fetch(request), name="kv fetch")
                self._fetching.add(fetch)
                fetch.add_done_callback(self._on_fetched)
                if not (has_come := await asyncio.shield(fetch)):
                    failed = EngineError(f"{request.request_id}: its KV was not fetched from the prefill worker")
                    raise stopped if has_come is None else failed
            for choice, name in enumerate(names):
                named = msgspec.structs.replace(request, request_id=name)
                self._simulator.submit(named, self._clock.now() * self.speed, choice)
            self._work.set()
            running = len(names)
            while running:
                output = await outputs.get()
                if output is None:
                    raise stopped
                running -= output.finish_reason is not None
                yield output
        finally:
            for name in names:
                del self._streams[name]
                self._simulator.cancel(name)
            self._work.set()

    async def encode(self, text: str, media: Sequence[Media]) -> Handoff:
        """Return handles and hashes of a prompt's images, in order; the handles cannot be opened.

        Raises:
            RequestRefused: the engine is not an encoder.
            EngineStopped: the engine takes no requests.
        """
        del text
        if self._simulator.role != "encode":
            raise RequestRefused("role", self._simulator.role, "encode")
        if not self._accepting:
            raise EngineStopped("encode: the engine takes no requests")
        await self._clock.sleep(len(media) * IMAGE_S / self.speed)
        return Handoff(
            multimodal_embedding_handles=tuple(_handle(each.digest) for each in media),
            multimodal_hashes=tuple(digest_words(each.digest) for each in media),
        )

    async def embeddings(self, text: str, media: Sequence[Media]) -> tuple[bytes, ...]:
        """Return a `.safetensors` file for each image, made from its digest; otherwise as `encode`."""
        await self.encode(text, media)
        digests = [bytes.fromhex(each.digest) for each in media]
        return tuple(written_tensor("F16", (2, len(digest) // 2), digest * 2) for digest in digests)

    @property
    def fetching(self) -> int:
        """How many KV fetches are under way, those of cancelled requests included."""
        return len(self._fetching)

    def kv_events(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return all visible events since the last call; see `Engine`."""
        with self._changed:
            self._changed.wait_for(lambda: self._simulator.has_events, timeout_s)
            return self._simulator.drain_events()

    def iteration_stats(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the rows of all iterations since the last call; see `Engine`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._statistics), timeout_s)
            statistics = list(self._statistics)
            self._statistics.clear()
        return statistics

    def _check(self, request: EngineRequest, names: Sequence[str]) -> None:
        if not self._accepting:
            raise EngineStopped(f"{request.request_id}: the engine takes no requests")
        if any(name in self._streams for name in names):
            raise RequestRefused("request_id", request.request_id, "an id that is not in use")
        if takes_transfer(request, self._simulator.role):
            self._simulator.check(request)  # before its KV is fetched

    @property
    def _is_overdue(self) -> bool:
        return self._stop_at_s is not None and self._clock.now() >= self._stop_at_s

    def _is_over(self) -> bool:
        if self._stop_at_s is None:
            return False
        if self._is_overdue:
            self._end_streams()
        elif self._fetching or self._simulator.has_requests or self._simulator.has_work:
            return False
        return self._simulator.contexts.next_expiry_s is None

    async def _step_or_wait(self) -> None:
        """Compute one iteration, or wait until there is something to do."""
        self._simulator.expire(self._clock.now() * self.speed)
        if self._simulator.has_work and not self._is_overdue:
            await self._iterate()
            return
        self._work.clear()
        if (wake_s := self._next_wake_s()) is not None:
            await until(self._work, self._clock.sleep(wake_s - self._clock.now()))
        elif not self._is_overdue:
            await self._work.wait()
        self._deadline_s = self._clock.now()

    def _next_wake_s(self) -> float | None:
        expiry_s = self._simulator.contexts.next_expiry_s
        times_s = [] if expiry_s is None else [expiry_s / self.speed]
        if self._stop_at_s is not None and not self._is_overdue:
            times_s.append(self._stop_at_s)
        return min(times_s, default=None)

    async def _fetch(self, request: EngineRequest) -> bool | None:
        """Return whether a request's KV has come, even if it was cancelled; None: the engine ended before."""
        assert request.handoff is not None
        async with self._fetch_slots:
            tokens = self._simulator.uncached_tokens(request)
            return await until(self._ended, self._transferred(request.handoff, tokens))

    async def _transferred(self, handoff: Handoff, tokens: int) -> bool:
        """Wait for the transfer time of `tokens` tokens, then tell the prefill engine; return whether all went well."""
        rules, began_s = self._simulator.transfers, self._clock.now()
        outcome: TransferOutcome = "timeout"
        try:
            async with asyncio.timeout(rules.timeout_s / self.speed):
                await self._clock.sleep(rules.duration_s(tokens) / self.speed)
                outcome = await _told(handoff)
        except TimeoutError:
            pass
        self.fetches.by_outcome[outcome] += 1
        if outcome == "done":
            self.fetches.fetched_bytes += tokens * rules.token_bytes
            self.fetches.seconds += (self._clock.now() - began_s) * self.speed
        return outcome == "done"

    async def _hand_over(self, http: web.Request) -> web.StreamResponse:
        name = http.match_info["name"]
        if not self._simulator.hand_over(int(name), await http.read()):
            return error_response(404, f"transfer {name}: not held here", code=_OUTCOMES[404])
        self._work.set()
        return web.Response()

    def _on_fetched(self, fetch: asyncio.Task[bool | None]) -> None:
        self._fetching.discard(fetch)
        self._simulator.report()
        self._work.set()

    async def _iterate(self) -> None:
        now_s = self._clock.now()
        step = self._simulator.step(now_s * self.speed)
        streams = [self._streams[request_id] for request_id, _ in step.outputs]  # ids may be reused later
        duration_s = step.duration_s / self.speed
        began_s = self._deadline_s if now_s - self._deadline_s <= duration_s else now_s
        self._deadline_s = began_s + duration_s
        await self._clock.sleep(max(0.0, self._deadline_s - self._clock.now()))
        with self._changed:
            self._simulator.flush_events()
            self._statistics.extend(step.statistics)
            self._changed.notify_all()
        for stream, (_, output) in zip(streams, step.outputs, strict=True):
            stream.put_nowait(output)

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.put_nowait(None)

    async def _end_all(self) -> None:
        """End all requests and transfers, also if the transfers' task never ran."""
        self._end()
        if self._fetching:
            await asyncio.wait(self._fetching)
        if self._transfers is not None:
            await self._transfers.run(self._ended)

    def _end(self) -> None:
        self._accepting = False
        self._end_streams()
        self._ended.set()


async def _told(handoff: Handoff) -> TransferOutcome:
    """Tell the prefill engine that its context has been fetched; return the outcome that its answer means."""
    try:
        url = URL(handoff.ctx_info_endpoint or "").with_path(f"{TRANSFERS_PATH}{handoff.ctx_request_id}")
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(url, data=handoff.opaque_state, allow_redirects=False) as response,
        ):
            return _OUTCOMES.get(response.status, "lost")
    except (aiohttp.ClientError, OSError, ValueError):  # a forged handoff may have an invalid port
        return "lost"


IMAGE_S = 0.02
"""Engine seconds for one image; assumed."""
_TOKENS, _WIDTH, _ELEMENT_BYTES = 256, 4096, 2


def _handle(digest: str) -> dict[str, Any]:
    """Return a shared tensor's handle, except that its `storage_handle` is the image's digest.

    Source of the shape: NVIDIA/TensorRT-LLM, `tensorrt_llm/disaggregated_params.py`.
    """
    return {
        "method_key": 1,
        "tensor_size": [_TOKENS, _WIDTH],
        "tensor_stride": [_WIDTH, 1],
        "tensor_offset": 0,
        "storage_handle": digest,
        "storage_size_bytes": _TOKENS * _WIDTH * _ELEMENT_BYTES,
        "dtype": "torch.float16",
    }
