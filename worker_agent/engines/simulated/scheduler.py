"""The simulated engine in virtual time: requests in, iterations out.

    while simulator.has_work:
        step = simulator.step(now_s)        # the state is already that of the iteration's end
        now_s += step.duration_s
        simulator.flush_events()            # the events become visible only now

Ranks run in step, as with attention data parallelism: an iteration lasts as long as its slowest rank's.

A decode engine's request is submitted once its KV has come. A prefill engine holds contexts for others until
`hand_over`, or `expire` after the transfers' timeout.
"""

from collections import deque
from typing import Any, NamedTuple

import msgspec

from kv_protocol.fleet import Role
from worker_agent.engines.simulated.blocks import BlockPool, EngineEvent
from worker_agent.engines.simulated.handovers import NETWORK, HeldContext, HeldContexts, TransferRules, handoff_rules
from worker_agent.engines.simulated.rank import Rank
from worker_agent.engines.simulated.scheduling import TRTLLM, Scheduling, namespace_of
from worker_agent.engines.simulated.timing import H200_8B, EngineTiming
from worker_agent.engines.simulated.tokens import TokenSource
from worker_agent.port.types import (
    EngineDescription,
    EngineOutput,
    EngineRequest,
    limits,
    plain_rules,
    refuse_unmet,
    role_rules,
    takes_transfer,
)

EVENT_BUFFER_MAX_SIZE = 100_000


class Step(NamedTuple):
    """One iteration: its engine seconds, (request id, output) pairs at its end, a row of statistics for each rank."""

    duration_s: float
    outputs: tuple[tuple[str, EngineOutput], ...]
    statistics: tuple[dict[str, Any], ...]


class Simulator:
    """An engine of one or more ranks. The same calls in the same order give the same outputs, events and durations.

    A rank has `host_blocks` in host memory beside those of its GPU. The one event buffer of all ranks holds
    `event_buffer_max_size` events per rank; beyond that it drops the oldest, which leaves a hole in the ids. Source:
    `docs/SOURCES.md` E1.5.
    """

    def __init__(
        self,
        description: EngineDescription,
        *,
        timing: EngineTiming = H200_8B,
        scheduling: Scheduling = TRTLLM,
        token_source: TokenSource | None = None,
        host_blocks: int = 0,
        event_buffer_max_size: int = EVENT_BUFFER_MAX_SIZE,
        role: Role = "aggregated",
        transfers: TransferRules = NETWORK,
    ) -> None:
        self.description, self.role, self.transfers = description, role, transfers
        self.contexts = HeldContexts(transfers.timeout_s)
        """The contexts that are held for other engines."""
        self._timing = timing
        source = token_source or TokenSource()
        self._ranks = {
            dp_rank: Rank(
                description,
                source,
                dp_rank if len(description.dp_ranks) > 1 else None,
                scheduling,
                host_blocks=host_blocks,
                role=role,
                contexts=self.contexts,
            )
            for dp_rank in description.dp_ranks
        }
        self._rank_of: dict[str, int] = {}
        self._iteration = 0
        self._has_unreported = False
        self._visible: deque[EngineEvent] = deque(maxlen=event_buffer_max_size * len(self._ranks))
        self.flush_events()

    @property
    def has_work(self) -> bool:
        """Whether a step is needed: a request can continue, or changes are not reported yet."""
        return self._has_unreported or not all(rank.is_idle for rank in self._ranks.values())

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._rank_of)

    @property
    def has_events(self) -> bool:
        """Whether `drain_events` would return any."""
        return bool(self._visible)

    def submit(self, request: EngineRequest, now_s: float, choice: int = 0) -> None:
        """Queue a request that arrives at `now_s`, on the rank that it names, else the one with the fewest requests.

        `choice` is its number among the choices of a prompt: each choice is a request of its own here.

        Raises:
            RequestRefused: it can never be served, or its id is in use; the state is unchanged.
        """
        self.check(request)
        if self.role == "prefill":
            request = msgspec.structs.replace(request, max_tokens=1)
        dp_rank = self._chosen_rank(request)
        self._ranks[dp_rank].submit(request, now_s, choice)
        self._rank_of[request.request_id] = dp_rank

    def check(self, request: EngineRequest) -> None:
        """Raise `RequestRefused` for a request that `submit` would refuse."""
        is_in_use = request.request_id in self._rank_of
        limited = limits(request, self.description, id_in_use=is_in_use)
        refuse_unmet(plain_rules(request), role_rules(request, self.role), limited)
        if takes_transfer(request, self.role):
            refuse_unmet(handoff_rules(request))

    def uncached_tokens(self, request: EngineRequest) -> int:
        """Return how many of a prompt's tokens its rank would have to compute, or fetch, if the request began now."""
        reused = self.pool(self._chosen_rank(request)).match(request.prompt, namespace_of(request))
        return len(request.prompt) - len(reused) * self.description.block_size

    def _chosen_rank(self, request: EngineRequest) -> int:
        if request.dp_rank is not None:
            return request.dp_rank
        return min(self._ranks, key=lambda each: self._ranks[each].request_count)

    def cancel(self, request_id: str) -> None:
        """Free a request's blocks at once, its computed tokens stay cached; without effect if it has ended.

        One more iteration reports the change, even without work.
        """
        dp_rank = self._rank_of.pop(request_id, None)
        if dp_rank is not None:
            self._ranks[dp_rank].cancel(request_id)
            self._has_unreported = True

    def report(self) -> None:
        """Let one more iteration report the state, even without work."""
        self._has_unreported = True

    def hand_over(self, name: int, state: bytes) -> bool:
        """Free the blocks of a fetched context; return whether it was still held, with this state."""
        held = self.contexts.fetched(name, state)
        if held is not None:
            self._give_back(held)
        return held is not None

    def expire(self, now_s: float) -> None:
        """Free the blocks of contexts that were not fetched in time."""
        for held in self.contexts.expired(now_s):
            self._give_back(held)

    def _give_back(self, held: HeldContext) -> None:
        self._ranks[held.dp_rank or 0].give_back(held.table, held.prompt)
        self._has_unreported = True

    def step(self, now_s: float, neighbours: int = 0) -> Step:
        """Compute the iteration that begins at `now_s`, in engine seconds.

        `neighbours`: how many other engines on its GPU have work now.
        """
        self._has_unreported = False
        steps = {dp_rank: rank.step(now_s) for dp_rank, rank in self._ranks.items()}
        duration_s = max(self._timing.iteration_s(step.work, neighbours) for step in steps.values())
        outputs = tuple(output for step in steps.values() for output in step.outputs)
        for request_id, output in outputs:
            if output.finish_reason:
                del self._rank_of[request_id]
        common = {"iter": self._iteration, "iterLatencyMS": duration_s * 1e3}
        statistics = tuple(common | step.did for step in steps.values())
        self._iteration += 1
        return Step(duration_s, outputs, statistics)

    def flush_events(self) -> None:
        """Make the events since the last call visible, as at the end of an iteration."""
        for rank in self._ranks.values():
            self._visible.extend(rank.pool.events.take())

    def drain_events(self) -> list[EngineEvent]:
        """Return all visible events since the last call, in order per rank."""
        drained = list(self._visible)
        self._visible.clear()
        return drained

    def pool(self, dp_rank: int = 0) -> BlockPool:
        """Return a rank's block pool, only to be read."""
        return self._ranks[dp_rank].pool
