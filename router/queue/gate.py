"""Runs the queue (`waiting.py`) with the router's clock, the headroom of its fleet, and callbacks.

    admits  whether a request goes on at once: there is headroom, and no request of its kind waits
    wait    queues a request that does not go on. Its callback is called once, from `wait`, `poke` or `run`: with None
            to admit it, or with a refusal (at once if the queue is full). After `cancel` it is not called
    poke    call it when load fell or a worker came back: it admits the requests that fit now
    run     checks periodically while requests wait: refuses those that waited too long, and finds headroom that no
            `poke` announced

A request that is admitted, at once or later, is decided, and its work booked (`Routing.take`), before the next one is
looked at: the headroom of that one depends on the booked work. So a queued request is placed by the index and the load
at the time of its admission.

There is headroom if some rank is not over the threshold (`eligibility.is_below`) and, if the policy's `unmet` is
`queue`, some rank is predicted to meet the request's targets; also if no rank is eligible.
"""

import asyncio

import structlog

from kv_protocol.decided import RouteRequest
from kv_runtime.supervise import until
from router.decision.eligibility import NoEligibleWorker, WorkerNotNamed, is_below
from router.decision.policy import Policy
from router.decision.routing import Routing
from router.decision.verdict import Verdict
from router.http.refusals import Refusal
from router.queue.config import QueueSection
from router.queue.waiting import Place, RequestQueue, Resume

_log = structlog.get_logger("router")

LOOK_S = 0.05
"""Largest delay of a timeout, and longest time for which free capacity stays unnoticed."""


class Admission:
    """Admits, queues and refuses requests."""

    def __init__(self, routing: Routing, limits: QueueSection) -> None:
        """Without `limits.threshold` headroom is unlimited, unless the policy's `unmet` is `queue`."""
        self._routing, self._clock, self._threshold = routing, routing.clock, limits.threshold
        self.queue = RequestQueue(limits)
        self.waiting = self.queue.waiting
        """The requests that wait; while there are none, `poke` does nothing."""
        self._has_waiting = asyncio.Event()
        self._is_poked = self._is_admitting = self._is_stopped = False

    def admits(self, request: RouteRequest) -> bool:
        """Return whether the request goes on at once; if not, call `wait` for it."""
        return not self.queue.is_waited_for(request) and self.has_headroom(request)

    def wait(self, request: RouteRequest, resume: Resume) -> Place | None:
        """Queue the request; return its place, or None if `resume` was called already."""
        is_first = not self.queue.is_waited_for(request)
        placed = self.queue.offer(request, self.uncached_tokens(request), self._clock.now(), resume)
        if isinstance(placed, Refusal):
            resume(placed)
            return None
        self._has_waiting.set()
        if self._is_stopped:
            self.queue.stop(self._clock.now())
        elif not is_first:
            self.poke()
        return placed if placed.arrival in self.waiting else None

    def cancel(self, place: Place) -> None:
        """Remove a request whose client left: its callback is not called any more. No effect once it was called."""
        self.queue.cancel(place)

    def poke(self) -> None:
        """Admit all waiting requests that fit now; if called from within a callback, after that has returned."""
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
                    while place := self.queue.take(model, self.has_headroom, self._clock.now()):
                        place.resume(None)
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
        self.queue.stop(self._clock.now())

    def look(self) -> None:
        """Refuse requests that waited too long, and admit those that fit."""
        if self.waiting:
            self.queue.tick(self._clock.now())
            self.poke()

    # ---------------------------------------------------------------- the fleet's room

    def is_bounded(self, policy: Policy) -> bool:
        """Return whether a threshold is set, or requests wait for a rank that meets their targets."""
        return self._threshold is not None or policy.unmet == "queue"

    def has_headroom(self, request: RouteRequest) -> bool:
        """Return whether the request may be admitted; true also if no rank is eligible."""
        state = self._routing.state
        if self._threshold is not None:
            view = state.model_view(request.model, request.block_size, request.hash_scheme, self._clock.now())
            if not is_below(self._threshold, view, state.core.queued_tokens(view.standing), request):
                return False
        if state.policy.unmet != "queue":
            return True
        verdict = self._verdict(request)
        return verdict is None or verdict.action != "queue"

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
