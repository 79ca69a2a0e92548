"""The simulated engine in virtual time: requests in, iterations out, nothing waits and nothing runs by itself.

    while simulator.has_work:
        step = simulator.step(now_s)        # the state is now that at the end of the iteration
        now_s += step.duration_s
        simulator.flush_events()            # and only now may anybody see it

Ranks go in step, as with attention data parallelism: an iteration lasts as long as its slowest rank's.
"""

from collections import deque
from collections.abc import Iterator

import msgspec

from worker_agent.core.engine import EngineDescription, EngineOutput, EngineRequest, RequestRefused
from worker_agent.core.simulator.blocks import BlockHash, trtllm_hash
from worker_agent.core.simulator.events import EngineEvent
from worker_agent.core.simulator.rank import Rank, computed_tokens_max
from worker_agent.core.simulator.statistics import IterationStats, iteration_stats
from worker_agent.core.simulator.timing import H200_8B, EngineTiming
from worker_agent.core.simulator.tokens import TokenSource

EVENT_BUFFER_MAX_SIZE = 100_000


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration: its length in engine seconds, (request id, output) pairs at its end, one row for each rank."""

    duration_s: float
    outputs: tuple[tuple[str, EngineOutput], ...]
    statistics: tuple[IterationStats, ...]


class Simulator:
    """An engine of one or more ranks. Same calls, same order: same outputs, events and durations.

    The event buffer holds `event_buffer_max_size` events per rank, one buffer for all ranks; the oldest give way, and
    their ids are missed. Source: `event_plane.md` section 1.5.
    """

    def __init__(
        self,
        description: EngineDescription,
        *,
        timing: EngineTiming = H200_8B,
        token_source: TokenSource | None = None,
        block_hash: BlockHash = trtllm_hash,
        event_buffer_max_size: int = EVENT_BUFFER_MAX_SIZE,
    ) -> None:
        self.description = description
        self._timing = timing
        several = len(description.dp_ranks) > 1
        self._ranks = {
            dp_rank: Rank(description, token_source or TokenSource(), dp_rank if several else msgspec.UNSET, block_hash)
            for dp_rank in description.dp_ranks
        }
        self._rank_of: dict[str, int] = {}
        self._iteration = 0
        self._untold = False
        self._visible: deque[EngineEvent] = deque(maxlen=event_buffer_max_size * len(self._ranks))
        self.flush_events()

    @property
    def has_work(self) -> bool:
        """Whether there is anything to step for: a request, or a cancellation whose effects wait to be told."""
        return bool(self._rank_of) or self._untold

    @property
    def has_events(self) -> bool:
        """Whether `drain_events` would return any."""
        return bool(self._visible)

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request that arrives at `now_s`, on its rank or on that with the fewest requests.

        Raises:
            RequestRefused: it can never be served, or its id is in use; nothing has changed.
        """
        self._check(request)
        dp_rank = request.dp_rank
        if dp_rank is None:
            dp_rank = min(self._ranks, key=lambda each: self._ranks[each].request_count)
        self._ranks[dp_rank].submit(request, now_s)
        self._rank_of[request.request_id] = dp_rank

    def cancel(self, request_id: str) -> None:
        """Free a request's blocks at once, what it computed stays cached; without effect where it has ended.

        One more iteration tells what changed, if need be with nothing to compute.
        """
        dp_rank = self._rank_of.pop(request_id, None)
        if dp_rank is not None:
            self._ranks[dp_rank].cancel(request_id)
            self._untold = True

    def step(self, now_s: float) -> Step:
        """Compute the iteration that begins at `now_s`, in engine seconds."""
        self._untold = False
        steps = {dp_rank: rank.step(now_s) for dp_rank, rank in self._ranks.items()}
        duration_s = max(self._timing.iteration_s(step.work) for step in steps.values())
        outputs = tuple(output for step in steps.values() for output in step.outputs)
        for request_id, output in outputs:
            if output.finish_reason:
                del self._rank_of[request_id]
        statistics = tuple(
            iteration_stats(
                step.did,
                self.description,
                now_s=now_s,
                iteration=self._iteration,
                duration_s=duration_s,
                attention_dp_rank=self._ranks[dp_rank].attention_dp_rank,
            )
            for dp_rank, step in steps.items()
        )
        self._iteration += 1
        return Step(duration_s=duration_s, outputs=outputs, statistics=statistics)

    def flush_events(self) -> None:
        """Make visible what happened since the last call; the end of an iteration."""
        for rank in self._ranks.values():
            self._visible.extend(rank.take_events())

    def drain_events(self) -> list[EngineEvent]:
        """Return all visible events since the last call, in order per rank."""
        drained = list(self._visible)
        self._visible.clear()
        return drained

    def held_hashes(self, dp_rank: int) -> frozenset[int]:
        """Return the engine hashes of the full blocks that a rank holds, which are those that it would reuse."""
        return self._ranks[dp_rank].pool.held_hashes()

    def _check(self, request: EngineRequest) -> None:
        for field, found, allowed, is_allowed in self._rules(request):
            if not is_allowed:
                raise RequestRefused(field, found, allowed)

    def _rules(self, request: EngineRequest) -> Iterator[tuple[str, object, str, bool]]:
        engine, isl, osl, dp_rank = self.description, len(request.prompt), request.max_tokens, request.dp_rank
        yield "request_id", request.request_id, "an id that is not in use", request.request_id not in self._rank_of
        yield "dp_rank", dp_rank, f"one of {engine.dp_ranks}", dp_rank is None or dp_rank in engine.dp_ranks
        yield "prompt", f"{isl} tokens", "1 token or more", isl > 0
        yield "max_tokens", osl, "1 or more", osl > 0
        total = f"{isl} prompt tokens + max_tokens {osl}"
        yield "max_tokens", total, f"at most {engine.max_seq_len} together", isl + osl <= engine.max_seq_len
        blocks, pool = -(-computed_tokens_max(request) // engine.block_size), engine.total_kv_blocks
        yield "max_tokens", f"{total} = {blocks} blocks", f"at most the pool's {pool} blocks", blocks <= pool
