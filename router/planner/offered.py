"""The load that routed requests bring to the workers of each model and role, over the last seconds: a fold. Pure.

    work of a prompt   uncached tokens * PREFILL_TOKEN_S + pairs * PREFILL_PAIR_S    seconds of the reference engine
    pairs              uncached * (context - uncached / 2), as in `tests/reference/time_cost.py`
    context            blocks of the request * block size

Every routed attempt counts, of this router and of its replicas: a retry is work, too. A request that waits in the
queue, or was refused, does not count.
"""

import math
from collections import Counter, deque
from typing import ClassVar, NamedTuple

from kv_protocol.fleet import Role, WorkerRegistered
from kv_protocol.journal import LedgerApplied
from kv_protocol.ledger import Routed
from router.decision.verdict import Verdict
from router.fleet.registry import Fleet
from router.journal.records import Recordable
from router.native.engine import PREFILL_PAIR_S, PREFILL_TOKEN_S
from router.planner.queueing import ServiceTimes
from router.prompt.chains import block_count

SLOT_S = 5.0
WINDOW_S_MAX = 600.0
_SLOTS_MAX = int(WINDOW_S_MAX / SLOT_S)
_STEPS_PER_DOUBLING = 4
"""Of the work of prompts, which is counted by steps: it is known to 10 %."""


class Group(NamedTuple):
    """The workers of one model and role: what an autoscaler scales."""

    model: str
    role: Role


class OfferedLoad(NamedTuple):
    """What came in `covered_s` seconds. `context_tokens` is the mean of a request; `prompts` their work."""

    covered_s: float
    requests: int = 0
    uncached_tokens: int = 0
    context_tokens: float = 0.0
    prompts: ServiceTimes = ServiceTimes(())

    @property
    def requests_per_s(self) -> float:
        """Mean rate of routed attempts."""
        return self.requests / self.covered_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Mean rate of prompt tokens that workers have to compute."""
        return self.uncached_tokens / self.covered_s


class _Sums:
    __slots__ = ("context_tokens", "requests", "steps", "uncached_tokens")

    def __init__(self) -> None:
        self.requests = self.uncached_tokens = self.context_tokens = 0
        self.steps: Counter[int] = Counter()

    def add(self, other: "_Sums") -> None:
        self.requests += other.requests
        self.uncached_tokens += other.uncached_tokens
        self.context_tokens += other.context_tokens
        self.steps.update(other.steps)


class OfferedLoads:
    """The sums of the last `WINDOW_S_MAX` seconds, in slots of `SLOT_S`."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._slots: deque[tuple[int, dict[Group, _Sums]]] = deque(maxlen=_SLOTS_MAX)

    def routed(self, routed: Routed, worker: WorkerRegistered, now_s: float) -> None:
        """Count a request that was routed to the worker."""
        number = int(now_s / SLOT_S)
        if not self._slots or self._slots[-1][0] < number:
            self._slots.append((number, {}))
        slot, group = self._slots[-1][1], Group(worker.model, worker.role)
        sums = slot.get(group)
        if sums is None:
            sums = slot[group] = _Sums()
        context = (block_count(routed.blocks) + routed.extra_blocks) * worker.block_size
        sums.requests += 1
        sums.uncached_tokens += routed.uncached_tokens
        sums.context_tokens += context
        sums.steps[_step(routed.uncached_tokens, context)] += 1

    def offered(self, window_s: float, now_s: float) -> dict[Group, OfferedLoad]:
        """Return what came in the window, by group; a shorter time is covered if the fold is younger."""
        first = int(now_s / SLOT_S) - max(1, round(window_s / SLOT_S)) + 1
        found: dict[Group, _Sums] = {}
        for _, slot in (each for each in self._slots if each[0] >= first):
            for group, sums in slot.items():
                found.setdefault(group, _Sums()).add(sums)
        covered_s = self.covered_s(window_s, now_s)
        return {group: _load(sums, covered_s) for group, sums in found.items()}

    def covered_s(self, window_s: float, now_s: float) -> float:
        """Return of how many seconds of the window the load is known: at least one slot."""
        first = int(now_s / SLOT_S) - max(1, round(window_s / SLOT_S)) + 1
        return max(SLOT_S, now_s - max(first * SLOT_S, self._began_s))


class LoadRecorder:
    """Recorder that adds each routed attempt to `loads`."""

    reads: ClassVar[tuple[type, ...]] = (Verdict, LedgerApplied)

    def __init__(self, fleet: Fleet, began_s: float) -> None:
        self.loads = OfferedLoads(began_s)
        self._fleet = fleet

    def record(self, what: Recordable) -> None:
        """`what` was applied."""
        if isinstance(what, Verdict):
            self._count(what.promise, what.now_s)
        elif isinstance(what, LedgerApplied) and isinstance(what.event, Routed):
            self._count(what.event, what.now_s)

    def _count(self, routed: Routed, now_s: float) -> None:
        worker = self._fleet.worker(routed.worker_id)
        if worker is not None:
            self.loads.routed(routed, worker.registration, now_s)


def _load(sums: _Sums, covered_s: float) -> OfferedLoad:
    times = tuple((_work_s(step), count) for step, count in sorted(sums.steps.items()))
    return OfferedLoad(
        covered_s, sums.requests, sums.uncached_tokens, sums.context_tokens / sums.requests, ServiceTimes(times)
    )


def _step(uncached: int, context: int) -> int:
    """Return the step of the work's logarithm; 0: nothing is computed. From 1 us on."""
    pairs = uncached * (max(context, uncached) - uncached / 2)
    work_us = 1e6 * (uncached * PREFILL_TOKEN_S + pairs * PREFILL_PAIR_S)
    return 1 + int(_STEPS_PER_DOUBLING * math.log2(work_us)) if work_us >= 1.0 else 0


def _work_s(step: int) -> float:
    """Return the middle of the step."""
    return 1e-6 * 2 ** ((step - 0.5) / _STEPS_PER_DOUBLING) if step else 0.0
