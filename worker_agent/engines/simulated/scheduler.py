"""The simulated engine in virtual time: requests in, iterations out.

    while simulator.has_work:
        step = simulator.step(now_s)        # the state is now that at the end of the iteration
        now_s += step.duration_s
        simulator.flush_events()            # the events become visible only now

Ranks run in step, as with attention data parallelism: an iteration lasts as long as its slowest rank's.

A decode engine's step may have fetches, which begin with the step; the caller ends each with `fetch_ended`. A prefill
engine holds contexts for others until `hand_over`, or `expire` after the transfers' timeout.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kv_protocol.events import Tier
from kv_protocol.fleet import Role
from worker_agent.engines.simulated.blocks import NewPool, PoolStatistics, rank_pool
from worker_agent.engines.simulated.events import EngineEvent
from worker_agent.engines.simulated.handovers import HeldContexts
from worker_agent.engines.simulated.identity import BlockHash, EngineNamespace, trtllm_hash
from worker_agent.engines.simulated.rank import Rank
from worker_agent.engines.simulated.scheduling import TRTLLM, Scheduling
from worker_agent.engines.simulated.timing import H200_8B, EngineTiming
from worker_agent.engines.simulated.tokens import TokenSource
from worker_agent.engines.simulated.transfer import (
    NETWORK,
    Fetch,
    TransferOutcome,
    TransferRules,
    TransferStatistics,
    state_of,
)
from worker_agent.port.types import (
    EngineDescription,
    EngineOutput,
    EngineRequest,
    RequestRefused,
    Rule,
    limits,
    role_rules,
    takes_transfer,
)

EVENT_BUFFER_MAX_SIZE = 100_000


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration: its length in engine seconds, (request id, output) pairs at its end, one row for each rank.

    `fetches` begin when it begins.
    """

    duration_s: float
    outputs: tuple[tuple[str, EngineOutput], ...]
    fetches: tuple[Fetch, ...]
    statistics: tuple[dict[str, Any], ...]


class Simulator:
    """An engine of one or more ranks. Same calls, same order: same outputs, events and durations.

    The event buffer holds `event_buffer_max_size` events per rank, one buffer for all ranks; the oldest are dropped,
    which leaves a hole in the ids. Source: `docs/SOURCES.md` E1.5.
    """

    def __init__(
        self,
        description: EngineDescription,
        *,
        timing: EngineTiming = H200_8B,
        scheduling: Scheduling = TRTLLM,
        token_source: TokenSource | None = None,
        block_hash: BlockHash = trtllm_hash,
        new_pool: NewPool = rank_pool,
        event_buffer_max_size: int = EVENT_BUFFER_MAX_SIZE,
        role: Role = "aggregated",
        transfers: TransferRules = NETWORK,
    ) -> None:
        self.description, self.role, self.transfers = description, role, transfers
        self.contexts = HeldContexts(transfers.timeout_s)
        """The contexts that are held for other engines."""
        self._timing = timing
        several = len(description.dp_ranks) > 1
        source = token_source or TokenSource()
        self._ranks = {
            dp_rank: Rank(
                description,
                source,
                dp_rank if several else msgspec.UNSET,
                block_hash,
                scheduling,
                new_pool,
                role=role,
                contexts=self.contexts,
            )
            for dp_rank in description.dp_ranks
        }
        self._rank_of: dict[str, int] = {}
        self._iteration = 0
        self._has_unreported = False
        self._counts = TransferStatistics()
        self._visible: deque[EngineEvent] = deque(maxlen=event_buffer_max_size * len(self._ranks))
        self.flush_events()

    @property
    def has_work(self) -> bool:
        """Whether a step is needed: a request can continue, or changes are not reported yet."""
        return self._has_unreported or not all(rank.is_idle for rank in self._ranks.values())

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended; requests that wait for KV need no step."""
        return bool(self._rank_of)

    @property
    def has_events(self) -> bool:
        """Whether `drain_events` would return any."""
        return bool(self._visible)

    def submit(self, request: EngineRequest, now_s: float, choice: int = 0) -> None:
        """Queue a request that arrives at `now_s`, on its rank or on that with the fewest requests.

        `choice` is its number among several generations of a prompt, each of which is a request of its own here.

        Raises:
            RequestRefused: it can never be served, or its id is in use; the state is unchanged.
        """
        id_in_use = request.request_id in self._rank_of
        for field, found, allowed, is_allowed in _rules(request, self.description, self.role, id_in_use=id_in_use):
            if not is_allowed:
                raise RequestRefused(field, found, allowed)
        if self.role == "prefill":
            request = msgspec.structs.replace(request, max_tokens=1)
        dp_rank = request.dp_rank
        if dp_rank is None:
            dp_rank = min(self._ranks, key=lambda each: self._ranks[each].request_count)
        self._ranks[dp_rank].submit(request, now_s, choice)
        self._rank_of[request.request_id] = dp_rank

    def cancel(self, request_id: str) -> None:
        """Free a request's blocks at once, its computed tokens stay cached; without effect if it has ended.

        One more iteration reports the change, even without work. A request with a transfer in progress continues
        without outputs until the transfer is over; its id stays in use until then.
        """
        dp_rank = self._rank_of.get(request_id)
        if dp_rank is not None and self._ranks[dp_rank].cancel(request_id):
            del self._rank_of[request_id]
            self._has_unreported = True

    def fetch_ended(self, fetch: Fetch, outcome: TransferOutcome, after_s: float) -> None:
        """Continue a request whose KV has come (`done`), `after_s` after its fetch began, or let it fail."""
        has_come, request_id = outcome == "done", fetch.request_id
        self._counts.fetches_total[outcome] += 1
        if has_come:
            self._counts.fetched_bytes_total += fetch.tokens * self.transfers.token_bytes
            self._counts.fetch_seconds_total += after_s
        self._has_unreported = True
        if not self._ranks[self._rank_of[request_id]].fetch_ended(request_id, has_come=has_come):
            del self._rank_of[request_id]

    def hand_over(self, transfer_id: int) -> bool:
        """Free the blocks of a fetched context; return whether it was still held."""
        held = self.contexts.give_up(transfer_id)
        if held is None:
            return False
        self._counts.handed_over_total += 1
        self._ranks[held.dp_rank].give_back(held.table, held.prompt)
        self._has_unreported = True
        return True

    def expire(self, now_s: float) -> None:
        """Free the blocks of contexts that were not fetched in time."""
        for held in self.contexts.expired(now_s):
            self._counts.expired_total += 1
            self._ranks[held.dp_rank].give_back(held.table, held.prompt)
            self._has_unreported = True

    def transfer_statistics(self) -> TransferStatistics:
        """Return the statistics of transfers."""
        fetching = sum(rank.fetching_count for rank in self._ranks.values())
        return msgspec.structs.replace(
            self._counts,
            held=len(self.contexts),
            held_tokens=self.contexts.tokens,
            fetching=fetching,
            fetches_total=dict(self._counts.fetches_total),
        )

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
        both = {"iter": self._iteration, "iterLatencyMS": duration_s * 1e3}
        statistics = tuple(both | step.did for step in steps.values())
        self._iteration += 1
        fetches = tuple(fetch for step in steps.values() for fetch in step.fetches)
        return Step(duration_s=duration_s, outputs=outputs, fetches=fetches, statistics=statistics)

    def flush_events(self) -> None:
        """Make visible what happened since the last call; the end of an iteration."""
        for rank in self._ranks.values():
            self._visible.extend(rank.events.take())

    def drain_events(self) -> list[EngineEvent]:
        """Return all visible events since the last call, in order per rank."""
        drained = list(self._visible)
        self._visible.clear()
        return drained

    def pool_statistics(self, dp_rank: int = 0) -> PoolStatistics:
        """Return the figures of the blocks on a rank's GPU, in the widest window's pool."""
        return self._ranks[dp_rank].pool.statistics()

    def reused_blocks(self, dp_rank: int, prompt: Sequence[int], namespace: EngineNamespace) -> int:
        """Return how many blocks of the GPU a request would reuse if it began now."""
        return len(self._ranks[dp_rank].pool.match(prompt, namespace))

    def held_hashes(self, dp_rank: int, tier: Tier = Tier.GPU) -> frozenset[int]:
        """Return the engine hashes of the full blocks that a rank holds on `tier`, in the widest window's pool.

        The rank would reuse them, on GPU and host together.
        """
        return self._ranks[dp_rank].pool.held_hashes(tier)


def _rules(request: EngineRequest, engine: EngineDescription, role: Role, *, id_in_use: bool) -> Iterator[Rule]:
    """Yield the rules for a request that an empty rank can serve."""
    yield from role_rules(request, role)
    yield from limits(request, engine, id_in_use=id_in_use)
    if takes_transfer(request, role):
        yield from _handoff_rules(request)


def _handoff_rules(request: EngineRequest) -> Iterator[Rule]:
    """Yield the rules for a handoff: only a simulated prefill engine can have made it, and only for this prompt."""
    handoff, field = request.handoff, "disaggregated_params"
    assert handoff is not None
    tokens, name, endpoint = handoff.first_gen_tokens or (), handoff.ctx_request_id, handoff.ctx_info_endpoint
    n = request.sampling.choices
    yield "n", n, "1 beside a handoff: a context is fetched once", n == 1
    yield f"{field}.first_gen_tokens", tokens, "one token: prefill engines of this kind make one", len(tokens) == 1
    yield f"{field}.ctx_request_id", name, "the prefill engine's name of the context", name is not None
    yield f"{field}.ctx_info_endpoint", endpoint, "the prefill engine's address for fetching it", endpoint is not None
    is_ours = name is not None and handoff.opaque_state == state_of(request.prompt, name)
    yield f"{field}.encoded_opaque_state", "another", "a simulated prefill engine's state of this prompt", is_ours
