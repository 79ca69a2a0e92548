"""TensorRT-LLM as an `Engine`: loaded in this process, called on the event loop, polled from threads, watched.

    loading            by `call`: on the main thread of `worker-agent serve`, because MPI is finalized there and belongs
                       to the thread that initialized it; else on a thread. `load_s` is its duration. If the load is
                       cancelled, the engine is shut down
    a request's error  before its first output: `RequestRefused`; after it: a last output with `error`
    the engine's death found by a request, or by the health checks of `run`: streams end with `EngineStopped`, then
                       `run` raises it
    closing a stream   aborts the engine's request. A decode worker's request that fetches KV is aborted after its first
                       token: if it were aborted earlier, the prefill worker would keep its blocks
    media              decoded and placed in the prompt on a thread, while other streams continue; one request at a
                       time, because threads may not share tokenizers
    stop               running requests get the grace time, then they are cut. A prefill worker waits for its transfers.
                       Then the engine is shut down. Each of these waits is bounded

A prefill worker's transfers are over once the engine's statistics count no request; without statistics, `transfer_s`
after the last one began. The engine has no other signal.

Source: `docs/SOURCES.md` D6.6.
"""

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import msgspec
import structlog

from kv_runtime.clock import Clock
from kv_runtime.main_thread import ThreadCall
from kv_runtime.supervise import TaskSet, TaskSetFull
from worker_agent.engine_args.arguments import EngineArgs
from worker_agent.engines.trtllm.bindings import Bindings
from worker_agent.engines.trtllm.calls import OwnMetrics, Stream, polled
from worker_agent.engines.trtllm.loading import load_engine
from worker_agent.engines.trtllm.logits import LogitsAdapter, factory_at
from worker_agent.engines.trtllm.outputs import Outputs
from worker_agent.engines.trtllm.requests import check_request
from worker_agent.engines.trtllm.settings import TrtllmSettings
from worker_agent.media.inputs import has_media
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

_ABORTS_MAX = 10_000
_CUT_S = 1.0
"""How long streams that were cut may take to end before the engine is shut down."""
_HEALTH_S = 30.0
"""An engine is dead if its health check takes longer, because no iteration takes so long."""
_EVENTS_PAUSE_S, _STATISTICS_PAUSE_S = 0.02, 0.1
_OURS, _RANDOM_BITS = 1 << 62, 62
"""Ids of transfers have the highest of 63 bits set, unlike the ids that an engine counts itself. The other bits are
random, so that ids differ in the fleet. Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/disagg_utils.py`,
`get_global_disagg_request_id` (`MIN_GLOBAL_ID`, 2**42, and above)."""
_REST_S = 0.2
"""An engine that reports no statistics for this long is idle."""
_log = structlog.get_logger("trtllm")


class TensorRTLLMEngine:
    """An `Engine`. `model` is its name in requests. It belongs to one event loop from `start` on."""

    def __init__(
        self,
        args: EngineArgs,
        clock: Clock,
        *,
        model: str,
        settings: TrtllmSettings | None = None,
        call: ThreadCall = asyncio.to_thread,
    ) -> None:
        self._args, self._clock, self._model, self._on_its_thread = args, clock, model, call
        self._settings = settings or TrtllmSettings()
        processors = self._settings.logits_processors
        for name, specification in processors.items():
            factory_at(name, specification)
        self.logits_errors_total: Counter[str] = Counter(dict.fromkeys(processors, 0))
        """How often each configured logits processor failed, in this process."""
        self.own_metrics: OwnMetrics | None = None
        self._bindings: Bindings | None = None
        self._description: EngineDescription | None = None
        self._streams = set[Stream]()
        """The streams that a client reads, and those that are aborted after their transfer."""
        self._aborts: TaskSet | None = None
        self._working = set[object]()
        """What a stop waits for: ids of requests, streams that are aborted after their transfer, and encodings."""
        self._idle, self._ended = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._closing = asyncio.Lock()
        self._over_because = ""
        """Why all streams were ended; empty: streams may run."""
        self._is_accepting = False
        self._fault: BaseException | None = None
        self._has_submitted = False
        self._busy: dict[int, int] = {}  # by rank, requests in the engine's newest statistics; threads write it
        self._last_handoff_s: float | None = None
        self.load_s: float | None = None
        self.failed_requests_total = 0
        self.fetches = KvFetches("done", "failed")

    @property
    def fault(self) -> str | None:
        """Why the engine is dead; None: no fault is known."""
        return None if self._fault is None else f"{type(self._fault).__name__}: {self._fault}"

    def describe(self) -> EngineDescription:
        """Return the loaded engine's description; raise `EngineError` before `start`."""
        if self._description is None:
            raise EngineError("the engine has not been started: the size of its KV cache is not known")
        return self._description

    async def start(self) -> None:
        """Load the engine and accept requests; see `Engine`.

        Raises:
            EngineError: the library is missing, refuses the arguments, or cannot load the model.
        """
        began_s, abandoned = self._clock.now(), threading.Event()
        load = partial(load_engine, self._args, self._settings, self._model, abandoned)
        try:
            bindings, self._description = await self._on_its_thread(load)
        except asyncio.CancelledError:
            abandoned.set()
            raise
        self._bindings = bindings
        self.load_s = self._clock.now() - began_s
        if self._args.value("return_perf_metrics") and self._args.role != "encode":
            collector = bindings.metrics_collector(self._model)
            self.own_metrics = None if collector is None else OwnMetrics(collector)
        self._is_accepting = True
        _log.info("engine_loaded", model=self._model, role=self._args.role, load_s=round(self.load_s, 3))

    async def run(self) -> None:
        """Check the engine's health until `stop`.

        Raises:
            EngineStopped: it is dead; its streams have ended.
        """
        try:
            async with TaskSet(_ABORTS_MAX) as self._aborts:
                while not self._ended.is_set():
                    await self._clock.wait(self._ended, self._settings.watch_s)
                    await self._check_health()
                await self._clock.wait(self._idle, _CUT_S)
                self._cut(self._over_because)
        finally:
            self._aborts = None
            self._is_accepting = False
            self._cut("the engine stopped before the answer's end")
            await self._shut_down()
        if self._fault is not None:
            raise EngineStopped(f"the engine is dead: {self.fault}") from self._fault

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests; return when the engine is shut down, or did not end within `shutdown_s`."""
        self._is_accepting = False
        await self._clock.wait(self._idle, grace_s)
        self._cut("the engine stopped before the answer's end")
        if self._last_handoff_s is not None and self._fault is None:
            await self._await_transfers(self._last_handoff_s)
        self._ended.set()
        await self._shut_down()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Yield each choice's new tokens as they come; see `Engine`."""
        bindings, is_in_use = self._loaded(request.request_id), request.request_id in self._working
        check_request(request, self.describe(), self._args, self._settings, id_in_use=is_in_use)
        with self._work(request.request_id):
            stream = await self._submitted(bindings, request)
            self._streams.add(stream)
            try:
                while not stream.outputs.is_over:
                    for output in await self._next(stream):
                        yield output
            finally:
                if self.own_metrics is not None and stream.result.finished:
                    self.own_metrics.finished(stream.result)
                self._let_go(stream)

    async def encode(self, text: str, media: Sequence[Media]) -> Handoff:
        """Return a handle for each image, which has one placeholder in `text`, and the images' digests as hashes.

        Raises:
            RequestRefused: the engine is no encoder, or refuses this prompt or its images.
            EngineStopped: the engine has stopped.
        """
        async with self._encoder() as bindings:
            return await bindings.encode(text, media)

    async def embeddings(self, text: str, media: Sequence[Media]) -> tuple[bytes, ...]:
        """Return the images' embeddings, each a `.safetensors` file of one tensor; otherwise as `encode`."""
        async with self._encoder() as bindings:
            return await bindings.embeddings(text, media)

    @asynccontextmanager
    async def _encoder(self) -> AsyncIterator[Bindings]:
        """Count the encoder as busy in the `with` block, and translate the library's errors."""
        if self._args.role != "encode":
            raise RequestRefused("role", self._args.role, "encode")
        bindings = self._loaded("encode")
        with self._work(object()):
            try:
                yield bindings
            except EngineError:
                raise
            except Exception as error:
                raise self._meaning(error, "encode") from error

    @contextmanager
    def _work(self, name: object) -> Iterator[None]:
        """Let a stop wait for the end of the `with` block."""
        self._working.add(name)
        self._idle.clear()
        try:
            yield
        finally:
            self._working.discard(name)
            if not self._working:
                self._idle.set()

    def kv_events(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return all KV events since the last call; see `Engine`."""
        return polled(self._fetch_events, timeout_s, _EVENTS_PAUSE_S)

    def iteration_stats(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the rows of all iterations since the last call; see `Engine`."""
        rows = polled(lambda: self._fetched("get_stats"), timeout_s, _STATISTICS_PAUSE_S)
        for row in rows:
            statistics = cast("object", row)  # of any shape: the reader of the rows validates it
            if isinstance(statistics, dict) and isinstance(rank := statistics.get("attentionDpRank") or 0, int):
                counts = (statistics.get("numActiveRequests"), statistics.get("numQueuedRequests"))
                self._busy[rank] = sum(each for each in counts if isinstance(each, int))
                if self.own_metrics is not None:
                    self.own_metrics.iterated(statistics)
        return rows

    # --------------------------------------------------------------------------------------------- requests
    async def _submitted(self, bindings: Bindings, request: EngineRequest) -> Stream:
        try:
            result = (await self._call(bindings, request))()
            self._has_submitted = True
        except EngineError:
            raise
        except Exception as error:
            raise self._meaning(error, request.request_id) from error
        fetches = takes_transfer(request, self._args.role)
        outputs = Outputs(
            request,
            expanded=tuple(result.prompt_token_ids) if has_media(request) else (),
            hands_over=self._args.role == "prefill",
            transfers=self.fetches if fetches else None,
        )
        _log.debug("request_begun", request_id=request.request_id, engine_id=getattr(result, "request_id", None))
        return Stream(request.request_id, result, outputs, takes_transfer=fetches)

    async def _call(self, bindings: Bindings, request: EngineRequest) -> Callable[[], Any]:
        """Return the call that submits the request, once a thread has decoded and placed its media, if it has any."""
        if self._args.role == "prefill" and request.transfer_id is None:
            request = msgspec.structs.replace(request, transfer_id=_OURS | secrets.randbits(_RANDOM_BITS))
        specifications, errors = self._settings.logits_processors, self.logits_errors_total
        adapters = [LogitsAdapter(name, specifications[name], errors) for name in request.logits_processors]
        if not has_media(request):
            return bindings.call(request, adapters)
        async with bindings.placing:
            call = await asyncio.to_thread(bindings.call, request, adapters)
        self._loaded(request.request_id)  # the engine may have stopped meanwhile
        return call

    async def _next(self, stream: Stream) -> list[EngineOutput]:
        if self._over_because:
            raise EngineStopped(f"{stream.request_id}: {self._over_because}")
        waits_for_transfer = stream.takes_transfer and not stream.outputs.has_begun
        try:
            new = await stream.step()
        except StopAsyncIteration:
            new = stream.outputs.failed()
        except Exception as error:
            meaning = self._meaning(error, stream.request_id, is_new=False)
            if isinstance(meaning, EngineStopped) or not stream.outputs.has_begun:
                self.fetches.by_outcome["failed"] += waits_for_transfer and not isinstance(meaning, EngineStopped)
                raise meaning from error
            _log.warning("request_failed", request_id=stream.request_id, reason=str(error))
            new = stream.outputs.failed()
        if stream.outputs.is_cancelled:
            raise EngineStopped(f"{stream.request_id}: the engine cancelled it")
        self.fetches.by_outcome["failed"] += waits_for_transfer and any(each.finish_reason == "error" for each in new)
        if any(output.handoff is not None for output in new):
            self._last_handoff_s = self._clock.now()
        return new

    def _meaning(self, error: Exception, request_id: str, *, is_new: bool = True) -> EngineError:
        """Return what an error of the library means for a request; if the engine is dead, end all streams."""
        if self._over_because or self._bindings is None:
            return EngineStopped(f"{request_id}: {self._over_because}")
        fault = self._fault or self._bindings.fault()
        meaning = self._bindings.meaning(error, is_new=is_new) if fault is None else None
        if meaning is not None:
            self.failed_requests_total += 1
            return meaning
        self._die(fault or error)
        return EngineStopped(f"{request_id}: {self._over_because}")

    def _let_go(self, stream: Stream) -> None:
        """Abort a request that its client left before the end: at once, or after its KV has come."""
        is_over = stream.result.finished or stream.outputs.is_over
        if not is_over and stream.takes_transfer and not stream.outputs.has_begun and self._aborts is not None:
            work = self._abort_after_first(stream)
            try:
                self._aborts.spawn(work, name="abort after transfer")
            except (TaskSetFull, RuntimeError) as error:  # too many, or `run` is ending
                work.close()
                _log.warning("aborted_before_transfer", request_id=stream.request_id, reason=str(error))
            else:
                self._working.add(stream)
                return
        self._streams.discard(stream)
        if not is_over:
            stream.abort()

    async def _abort_after_first(self, stream: Stream) -> None:
        with self._work(stream):
            try:
                while not stream.outputs.has_begun and not stream.result.finished and not self._over_because:
                    await stream.step()
            except Exception as error:  # noqa: BLE001  no caller waits for this request any more
                _log.debug("aborted_request_failed", request_id=stream.request_id, reason=str(error))
            finally:
                self._streams.discard(stream)
                stream.abort()

    def _loaded(self, request_id: str) -> Bindings:
        if self._bindings is None or not self._is_accepting:
            raise EngineStopped(f"{request_id}: {self._over_because or 'the engine takes no requests'}")
        return self._bindings

    # -------------------------------------------------------------------------------------------------- life
    async def _check_health(self) -> None:
        if self._ended.is_set() or self._bindings is None:
            return
        try:
            async with asyncio.timeout(_HEALTH_S):
                fault = await asyncio.to_thread(self._bindings.fault)
        except TimeoutError as error:
            error.add_note("the engine's health check did not return")
            fault = error
        if fault is not None and self._bindings is not None:  # not while it is being shut down
            self._die(fault)

    def _die(self, fault: BaseException) -> None:
        if self._fault is None:
            self._fault = fault
            _log.error("engine_died", reason=self.fault)
        self._is_accepting = False
        self._cut(f"the engine is dead: {self.fault}")
        self._ended.set()

    def _cut(self, because: str) -> None:
        """End every stream; the first reason counts."""
        self._over_because = self._over_because or because
        for stream in self._streams:
            stream.cut()

    async def _await_transfers(self, last_handoff_s: float) -> None:
        """Return when the engine reports no more iterations and no request, or after `transfer_s`."""
        if not self._args.value("enable_iter_perf_stats"):
            await self._clock.sleep(last_handoff_s + self._settings.transfer_s - self._clock.now())
            return
        deadline_s = self._clock.now() + self._settings.transfer_s
        try:
            while await asyncio.to_thread(self.iteration_stats, _REST_S) or any(self._busy.values()):
                if self._clock.now() >= deadline_s:
                    _log.warning("transfers_not_over", requests=dict(self._busy), waited_s=self._settings.transfer_s)
                    return
        except EngineError as error:
            _log.warning("transfers_not_awaited", reason=str(error))

    async def _shut_down(self) -> None:
        async with self._closing:
            bindings, self._bindings = self._bindings, None
            if bindings is None:
                return
            try:
                async with asyncio.timeout(self._settings.shutdown_s):
                    await self._on_its_thread(bindings.llm.shutdown)
            except TimeoutError:
                _log.warning("engine_not_ended", waited_s=self._settings.shutdown_s)
            except Exception as error:  # noqa: BLE001  it is given up, however it ends
                _log.warning("engine_shutdown_failed", reason=f"{type(error).__name__}: {error}")

    def _fetch_events(self) -> list[dict[str, Any]]:
        try:
            return self._fetched("get_kv_cache_events")
        except EngineError as error:
            if self._has_submitted or not isinstance(error.__cause__, AssertionError):
                raise
            return []  # over IPC the library has no queue of events before the first request

    def _fetched(self, poll: str) -> list[dict[str, Any]]:
        if (bindings := self._bindings) is None:
            raise EngineError("the engine does not run")
        try:
            return list(getattr(bindings.llm, poll)(timeout=0))
        except Exception as error:
            raise EngineError(f"{poll}: {type(error).__name__}: {error}") from error
