"""Runs the queue (`waiting.py`) with the router's clock and callbacks.

    admits  whether the request goes on at once: there is headroom, and no request waits for it
    wait    for a request that does not: its callback is called once, later, from `poke` or `run`, with the refusal or
            None; if the queue is full, at once. After `cancel` it is not called
    poke    load fell, or a worker came back: requests that fit now are admitted
    run     checks periodically while requests wait: refuses those that waited too long, and finds headroom that no
            `poke` announced

A request that is admitted, at once or later, is decided, and its work promised (`Routing.take`), before the
next one is looked at: its headroom depends on it. So a queued request is placed by the index and the load at the time
of its admission.

Headroom is what the threshold leaves (`Headroom`), and, if the policy's `unmet` is `queue`, a rank that is predicted
to meet the request's targets.
"""

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np
import structlog

from kv_protocol.decided import RouteRequest
from kv_runtime.clock import Clock
from kv_runtime.supervise import until
from router.decision.eligibility import Headroom, NoEligibleWorker, WorkerNotNamed, constrains
from router.decision.policy import Policy
from router.decision.routing import Routing
from router.decision.verdict import Verdict
from router.http.refusals import Refusal
from router.queue.waiting import Place, QueueLimits, RequestQueue

_log = structlog.get_logger("router")

Told = Callable[[Refusal | None], None]
"""Called once: None admits the request."""
LOOK_S = 0.05
"""Largest delay of a timeout, and longest time for which free capacity stays unnoticed."""
_SIGHTS_MAX = 64


class _Sight(msgspec.Struct):
    """Cached spare tokens of a model's ranks, for requests without constraints."""

    spare_tokens: float
    until_s: float
    seq_len_min: int
    fleet_changes: int
    breaker_changes: int


class FleetHeadroom:
    """The headroom of the workers behind a `Routing`; unlimited if no threshold is set."""

    def __init__(self, routing: Routing, threshold: float | None) -> None:
        self._routing = routing
        self._headroom = None if threshold is None else Headroom(threshold)
        self._sights: dict[tuple[str, str], _Sight] = {}
        """By model and OpenAI endpoint."""

    def is_bounded(self, policy: Policy) -> bool:
        """Return whether a threshold is set, or requests wait for a rank that meets their targets."""
        return self._headroom is not None or policy.unmet == "queue"

    def has_headroom(self, request: RouteRequest) -> bool:
        """Return whether the request may be admitted; true also if no rank is eligible."""
        if self._headroom is not None and not self._is_below(self._headroom, request):
            return False
        if self._routing.state.policy.unmet != "queue":
            return True
        verdict = self._verdict(request)
        return verdict is None or verdict.action != "queue"

    def _is_below(self, headroom: Headroom, request: RouteRequest) -> bool:
        state, now_s = self._routing.state, self._routing.clock.now()
        sight = self._sights.get((request.model, request.endpoint))
        if (
            sight is not None
            and now_s < sight.until_s
            and request.isl_tokens <= sight.spare_tokens
            and sight.breaker_changes == state.breakers.changes
            and sight.fleet_changes == state.fleet.changes
            and not constrains(request, sight.seq_len_min)
        ):
            sight.spare_tokens -= request.isl_tokens
            return True
        return self._look(headroom, request, now_s)

    def _look(self, headroom: Headroom, request: RouteRequest, now_s: float) -> bool:
        state = self._routing.state
        model_view = state.model_view(request.model, request.block_size, request.hash_scheme, now_s)
        queued_tokens = np.array(state.core.queued_tokens(model_view.standing), np.int64)
        spare_tokens = headroom.spare_tokens(model_view, queued_tokens, request)
        self._sights.pop((request.model, request.endpoint), None)
        if spare_tokens >= request.isl_tokens and not constrains(request, model_view.seq_len_min):
            if len(self._sights) >= _SIGHTS_MAX:
                self._sights.clear()
            self._sights[request.model, request.endpoint] = _Sight(
                spare_tokens - request.isl_tokens,
                min(now_s + LOOK_S, model_view.valid_until_s),
                model_view.seq_len_min,
                state.fleet.changes,
                state.breakers.changes,
            )
        return spare_tokens >= 0

    def uncached_tokens(self, request: RouteRequest) -> int:
        """Return the prompt's tokens without the longest prefix that a candidate holds; all without a candidate."""
        verdict = self._verdict(request)
        if verdict is None:
            return request.isl_tokens
        held_blocks = int(verdict.expected[verdict.rank_indices].max())
        return request.isl_tokens - min(held_blocks, request.reusable_blocks) * request.block_size

    def _verdict(self, request: RouteRequest) -> Verdict | None:
        try:
            return self._routing.decide(request)
        except (NoEligibleWorker, WorkerNotNamed):
            return None
        except Exception:  # noqa: BLE001 - a user's mode may raise anything; the decision reports it
            _log.exception("mode_failed", mode=self._routing.policy.mode)
            return None


class Admission:
    """Admits, queues and refuses requests."""

    def __init__(self, clock: Clock, headroom: FleetHeadroom, limits: QueueLimits | None = None) -> None:
        self._clock, self._headroom = clock, headroom
        self.queue = RequestQueue(limits)
        self.is_bounded = headroom.is_bounded
        self.waiting: dict[int, Told] = {}
        """The callbacks of the requests that wait, by their arrivals; while there are none, `poke` does nothing."""
        self._has_waiting = asyncio.Event()
        self._is_poked = self._is_admitting = self._is_stopped = False

    def admits(self, request: RouteRequest) -> bool:
        """Return whether the request goes on at once; else it is to `wait`."""
        return not self.queue.is_waited_for(request) and self._headroom.has_headroom(request)

    def wait(self, request: RouteRequest, told: Told) -> Place | None:
        """Return the place of a waiting request; None if `told` was called already."""
        is_first = not self.queue.is_waited_for(request)
        placed = self.queue.offer(request, self._headroom.uncached_tokens(request), self._clock.now())
        if isinstance(placed, Refusal):
            told(placed)
            return None
        self.waiting[placed.arrival] = told
        self._has_waiting.set()
        if self._is_stopped:
            self._refuse(self.queue.stop(self._clock.now()))
        elif not is_first:
            self.poke()
        return placed if placed.arrival in self.waiting else None

    def cancel(self, place: Place) -> None:
        """The client left: the callback is not called any more. No effect after it, or a second time."""
        self.queue.cancel(place)
        self.waiting.pop(place.arrival, None)

    def poke(self) -> None:
        """Admit all waiting requests that fit now; within a callback, after it has returned."""
        if not self.waiting:
            return
        self._is_poked = True
        if self._is_admitting:
            return
        self._is_admitting = True
        try:
            while self._is_poked and self.waiting:
                self._is_poked = False
                for model in self.queue.models():
                    while place := self.queue.take(model, self._headroom.has_headroom, self._clock.now()):
                        self.waiting.pop(place.arrival)(None)
        finally:
            self._is_admitting = False

    async def run(self, stop: asyncio.Event) -> None:
        """Check the queue periodically until `stop` is set; then refuse waiting and later requests."""
        while not stop.is_set():
            await until(stop, self._has_waiting.wait())
            self._has_waiting.clear()
            while self.waiting and not stop.is_set():
                await self._clock.wait(stop, LOOK_S)
                self.look()
        self._is_stopped = True
        self._refuse(self.queue.stop(self._clock.now()))

    def look(self) -> None:
        """Refuse requests that waited too long, and admit those that fit."""
        if self.waiting:
            self._refuse(self.queue.tick(self._clock.now()))
            self.poke()

    def _refuse(self, dismissed: list[tuple[Place, Refusal]]) -> None:
        for place, why in dismissed:
            told = self.waiting.pop(place.arrival, None)
            if told is not None:
                told(why)
