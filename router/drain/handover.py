"""Draining with hand-over: prefixes that only the leaving worker holds are computed elsewhere first.

    looking    makes a decision on each recent prompt (`chains.py`), the newest first, for half of the remaining time at
               most, to see how much of it the worker holds, and how much the best other eligible rank holds or will
               soon hold. Lists prefixes by heat, within the budget (`warming.py`)
    warming    computes the listed prefixes, `WARMERS` at a time, each at the rank that the policy chooses
    waiting    waits for requests that still run at the worker; then looks and warms a second time, for their prompts
    over       all listed prefixes were tried, or the time is over: the remaining prefixes are skipped

| a prefix is | if |
|---|---|
| warmed | a worker has computed it |
| failed | the chosen worker did not compute it; it is not retried, unless the second pass finds it again |
| skipped | no rank is eligible, the chosen rank holds it already, or tokens or time are spent |

Spent tokens are those that the chosen workers are expected to compute, in whole blocks; they stay within the budget.
A router knows only its own clients' prompts. So each router may be asked to drain a worker, and hands over its own.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from typing import Literal

import msgspec
import structlog

from kv_protocol.decided import RequestPhase, RouteRequest
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import Hashing
from kv_runtime.supervise import TaskSet, TaskSetFull
from kv_runtime.telemetry import Family, by_name, counter, gauge
from router.decision.state import RouterState
from router.drain.warming import HotPrefix, PromptHolding, WarmingOutcome, compute, decided, hot_prefixes
from router.http.upstreams import Upstreams
from router.prompt.chains import EncodedPrompt, RecentPrompt, RecentPrompts
from router.request.serving import Serving

SHOWN_MAX = 32
"""How many prefixes a hand-over's status shows at most."""

State = Literal["looking", "warming", "waiting", "over"]
OUTCOMES: tuple[WarmingOutcome, ...] = ("warmed", "failed", "skipped")
HANDOVERS_MAX = 16
"""Hand-overs at the same time, each of one worker."""
WITHIN_S = 60.0
"""How long a hand-over may take, if the request to drain does not say."""
WARMERS = 4
"""Prompts that are computed at the same time for one hand-over: few, as clients' requests wait behind them."""
_RUNS_MAX = 256
_LOOKED_AT = 32
"""Prompts that are looked up in one turn of the loop: a few ms."""
_LOOK_S = 0.05
_PHASES: dict[str, RequestPhase] = {"aggregated": "whole", "prefill": "prefill"}
"""The phase for which prompts are computed, by the worker's role."""

_log = structlog.get_logger("router")


class HandoverStatus(msgspec.Struct, kw_only=True):
    """The status of a hand-over. `prompts`: prompts in the last pass; `reason`: why nothing is handed over."""

    state: State = "looking"
    reason: str = ""
    prompts: int = 0
    listed: int = 0
    warmed: int = 0
    failed: int = 0
    skipped: int = 0
    budget_tokens: int
    spent_tokens: int = 0
    within_s: float
    seconds: float = 0.0
    prefixes: list[HotPrefix] = []
    """The first `SHOWN_MAX` prefixes that were listed."""


class HandoverRun:
    """One worker's hand-over; `Handover` changes its fields."""

    task: asyncio.Task[None]

    def __init__(self, registration: WorkerRegistered, budget_tokens: int, within_s: float, now_s: float) -> None:
        self.registration, self.began_s = registration, now_s
        self.status = HandoverStatus(budget_tokens=budget_tokens, within_s=within_s)
        self.warmed: set[int] = set()
        """The hashes of the last blocks of prefixes that were warmed."""

    def left_s(self, now_s: float) -> float:
        """Return the remaining time."""
        return self.began_s + self.status.within_s - now_s

    def warmed_blocks(self, chain: bytes) -> int:
        """Return how many leading blocks of a chain were warmed: their events may not have come yet."""
        blocks = enumerate(memoryview(chain).cast("Q"), 1) if self.warmed else ()
        return max((count for count, block in blocks if block in self.warmed), default=0)


class Handover:
    """The hand-overs of one router; a part of its process."""

    def __init__(self, serving: Serving, recent: RecentPrompts, upstreams: Upstreams, tokens: int) -> None:
        """`tokens` are computed for a draining worker, if the request to drain does not say how many."""
        self._serving, self._recent, self._upstreams = serving, recent, upstreams
        self.defaults = (tokens, WITHIN_S)
        """Tokens and seconds of a hand-over, if the request to drain does not say."""
        self._clock = serving.routing.clock
        self._tasks: TaskSet | None = None
        self._runs: dict[str, HandoverRun] = {}
        """The last hand-over of each worker."""
        self._outcomes: Counter[WarmingOutcome] = Counter()
        self._spent_tokens, self._seconds = 0, 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Run hand-overs until `stop` is set; then give up the running ones."""
        async with TaskSet(HANDOVERS_MAX) as tasks:
            self._tasks = tasks
            await stop.wait()
            self._tasks = None
            for run in self._runs.values():
                run.task.cancel()

    def begin(self, registration: WorkerRegistered, budget_tokens: int, within_s: float) -> None:
        """Start handing over what only this draining worker holds; do nothing if that runs already.

        Raises:
            TaskSetFull: too many hand-overs are running.
        """
        known = self._runs.get(registration.worker_id)
        if known is not None and not known.task.done():
            if known.registration.instance == registration.instance:
                return
            known.task.cancel()
        if self._tasks is None:
            raise TaskSetFull("0 tasks run already")
        run = HandoverRun(registration, budget_tokens, within_s, self._clock.now())
        run.task = self._tasks.spawn(self._hand_over(run), name=f"handover of {registration.worker_id}")
        self._runs.pop(registration.worker_id, None)
        self._runs[registration.worker_id] = run
        if len(self._runs) > _RUNS_MAX:
            del self._runs[next(iter(self._runs))]

    def cancel(self, worker_id: str, reason: str) -> None:
        """End the hand-over of a worker now, if one is running; `reason` is shown."""
        run = self._runs.get(worker_id)
        if run is not None and not run.task.done():
            run.status.state, run.status.reason = "over", reason  # `_hand_over` says neither if it has not begun
            run.task.cancel()

    def status(self, worker_id: str, instance: str | None = None) -> HandoverStatus | None:
        """Return the status of a worker's hand-over, of this instance if given; None if there is none."""
        run = self._runs.get(worker_id)
        if run is None or instance not in (None, run.registration.instance):
            return None
        if run.status.state != "over":
            run.status.seconds = self._clock.now() - run.began_s
        return msgspec.structs.replace(run.status, prefixes=[*run.status.prefixes])

    # ------------------------------------------------------------------------------------------- on its way

    async def _hand_over(self, run: HandoverRun) -> None:
        def running() -> int:
            return promised_requests(self._serving.routing.state, run.registration)

        try:
            run.status.reason = self._why_not(run)
            if not run.status.reason:
                is_at_work = running() > 0
                await self._warm(run)
                if is_at_work:
                    run.status.state = "waiting"
                    while running() and run.left_s(self._clock.now()) > 0:
                        await self._clock.sleep(_LOOK_S)
                    if not running():
                        await self._warm(run)
        except Exception as error:  # noqa: BLE001 - the edge: whatever it was, requests are served on
            _log.exception("handover_failed", worker=run.registration.worker_id)
            run.status.reason = f"our fault: {type(error).__name__}; see the log"
        finally:
            status = run.status
            status.state, status.seconds = "over", self._clock.now() - run.began_s
            self._seconds += status.seconds
            figures = {
                name: getattr(status, name) for name in ("listed", *OUTCOMES, "spent_tokens", "seconds", "reason")
            }
            _log.info("handover_over", worker=run.registration.worker_id, **figures)

    def _why_not(self, run: HandoverRun) -> str:
        state, role = self._serving.routing.state, run.registration.role
        if role not in _PHASES:
            return f"role {role}: prompts are computed elsewhere"
        mode = state.policy.of(_PHASES[role]).mode
        return "" if state.modes[mode].reads_overlap else f"policy.mode {mode} reads no overlap"

    async def _warm(self, run: HandoverRun) -> None:
        run.status.state = "looking"
        waiting = await self._listed(run)
        run.status.state = "warming"
        async with TaskSet(WARMERS) as warmers:
            for _ in range(WARMERS):
                warmers.spawn(self._warm_in_turn(run, waiting))

    async def _listed(self, run: HandoverRun) -> deque[tuple[RecentPrompt, HotPrefix]]:
        holdings, registration, status = list[PromptHolding](), run.registration, run.status
        names = {*registration.served_names, *registration.loras}
        hashing = Hashing(registration.block_size, registration.hash_scheme)
        now_s = self._clock.now()
        looked_until_s = now_s + run.left_s(now_s) / 2
        for recent in self._recent.newest_first():
            if recent.model not in names or recent.prompt.hashing != hashing:
                continue
            if not len(holdings) % _LOOKED_AT:
                await self._clock.sleep(0)
                if self._clock.now() > looked_until_s:
                    break
            verdict = decided(self._serving, self._route(run, recent, recent.prompt))
            if verdict is None:
                continue
            depths = zip(verdict.ranks, verdict.overlap[0].tolist(), strict=True)
            held = max((depth for rank, depth in depths if rank in registration.ranks), default=0)
            expected = verdict.expected[verdict.rank_indices].tolist()
            elsewhere = max((run.warmed_blocks(recent.prompt.sequence_hashes), *expected))
            holdings.append(PromptHolding(recent, held, elsewhere))
        found = await asyncio.to_thread(
            hot_prefixes,
            holdings,
            self._clock.now(),
            block_size=registration.block_size,
            budget_tokens=status.budget_tokens - status.spent_tokens,
        )
        status.prompts = len(holdings)
        status.listed += len(found)
        status.prefixes += [prefix for _, prefix in found[: SHOWN_MAX - len(status.prefixes)]]
        return deque(found)

    def _route(self, run: HandoverRun, recent: RecentPrompt, prompt: EncodedPrompt) -> RouteRequest:
        """Return the request to compute `prompt`, the recent one or its beginning, at another worker."""
        return RouteRequest(
            decision_id=self._serving.new_id(),
            request_id=f"handover-{run.registration.worker_id}",
            model=recent.model,
            isl_tokens=prompt.token_count,
            block_size=prompt.hashing.block_size,
            hash_scheme=prompt.hashing.scheme,
            sequence_hashes=prompt.sequence_hashes,
            max_tokens=1,
            lora=recent.lora,
            tried=run.registration.ranks,
            phase=_PHASES[run.registration.role],
        )

    async def _warm_in_turn(self, run: HandoverRun, waiting: deque[tuple[RecentPrompt, HotPrefix]]) -> None:
        while waiting:
            recent, prefix = waiting.popleft()
            outcome, prefix.worker, prefix.reason = await self._warmed(run, recent, prefix.blocks)
            prefix.outcome = outcome
            setattr(run.status, outcome, getattr(run.status, outcome) + 1)
            self._outcomes[outcome] += 1
            await self._clock.sleep(0)

    async def _warmed(self, run: HandoverRun, recent: RecentPrompt, blocks: int) -> tuple[WarmingOutcome, str, str]:
        """Warm a prompt's first blocks; return the outcome, the chosen worker, and why they were not warmed."""
        left_s, status = run.left_s(self._clock.now()), run.status
        if left_s <= 0:
            return "skipped", "", "the time is over"
        prompt = recent.prompt.beginning(blocks)
        verdict = decided(self._serving, self._route(run, recent, prompt))
        if verdict is None:
            return "skipped", "", "no rank is eligible"
        worker, left_tokens = str(verdict.winner), status.budget_tokens - status.spent_tokens
        tokens = max(0, blocks - verdict.expected_blocks) * run.registration.block_size
        if not tokens:
            return "skipped", worker, "it is held there"
        if tokens > left_tokens:
            return "skipped", worker, f"{tokens} tokens, of which {left_tokens} are left"
        status.spent_tokens += tokens
        self._spent_tokens += tokens
        if fault := await compute(self._serving, self._upstreams, recent, prompt, verdict, left_s):
            return "failed", worker, fault
        run.warmed.update(memoryview(prompt.sequence_hashes).cast("Q")[-1:])
        return "warmed", worker, ""

    # ------------------------------------------------------------------------------------------- figures

    def families(self) -> Iterator[Family]:
        """Yield the metrics of hand-overs, and of the prompts kept for them."""
        meaning = "Prefixes that only a draining worker held, by outcome"
        outcomes = {outcome: self._outcomes[outcome] for outcome in OUTCOMES}
        yield counter("handover_prefixes", meaning, ("outcome",), by_name((), outcomes))
        meaning = "Tokens that other workers computed for hand-overs"
        yield counter("handover_tokens", meaning, rows=[((), self._spent_tokens)])
        yield counter("handover_seconds", "Duration of hand-overs, summed", rows=[((), self._seconds)])
        meaning = "Memory of recent prompts that hand-overs choose from"
        yield gauge("recent_prompts_bytes", meaning, rows=[((), self._recent.size_bytes)])


def promised_requests(state: RouterState, registration: WorkerRegistered) -> int:
    """Return how many requests were sent to a worker, by all routers, and are not over."""
    return sum(state.load_of(rank).active_requests for rank in registration.ranks)
