"""A worker's engine in virtual time: what it holds is the truth; what it tells are engine events, host tier included.

The simulated engine knows the GPU alone, so blocks that leave it are moved on by a model of a host tier.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from random import Random
from typing import Any, NamedTuple

import msgspec

from kv_protocol.events import Tier
from tests.simulation.oracle import BLOCK_SIZE, Held, Names
from tests.simulation.setup import MODEL, AgentSetup
from tests.simulation.timeline import Timeline
from tests.support.held_hashes import held_hashes
from worker_agent.engines.simulated.scheduler import Simulator, Step
from worker_agent.engines.simulated.scheduling import namespace_of
from worker_agent.engines.simulated.timing import EngineTiming
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineEvent, EngineRemoved, EngineStored
from worker_agent.port.types import EngineDescription, EngineOutput, EngineRequest

HOST_RATIO = 0.5
SEQUENCE_MAX = 80
SLOW_ENGINE = EngineTiming(
    request_base_s=0.0,
    prompt_token_s=0.0,
    base_s=0.05,
    context_floor_s=0.1,
    token_s=0.0,
    attention_pair_s=0.0,
    kv_token_s=0.0,
    sequence_s=0.0,
    sequences_knee=0.0,
)

OnOutput = Callable[[EngineOutput], None]
Reported = Callable[[Sequence[dict[str, Any]]], None]


class HostTier:
    """Some blocks that leave the GPU stay on the host for a while: stored there, then removed from the GPU."""

    def __init__(self, random: Random, blocks_max: int) -> None:
        self._random, self._blocks_max = random, blocks_max
        self._seen: dict[int, EngineStored] = {}
        self.held: dict[int, None] = {}

    def moves(self, event: EngineEvent) -> Iterator[EngineEvent]:
        """Yield what to publish for an event of the GPU."""
        if isinstance(event, EngineStored):
            self._see(event)
        elif isinstance(event, EngineRemoved):
            for block_hash in event.block_hashes:
                is_new = block_hash in self._seen and block_hash not in self.held
                if is_new and self._random.random() < HOST_RATIO:
                    self.held[block_hash] = None
                    yield msgspec.structs.replace(self._seen[block_hash], tier=Tier.HOST)
        yield event
        while len(self.held) > self._blocks_max:
            oldest = next(iter(self.held))
            del self.held[oldest]
            yield EngineRemoved(block_hashes=(oldest,), tier=Tier.HOST)

    def _see(self, event: EngineStored) -> None:
        parent = event.parent_block_hash
        for at, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
            self._seen[block_hash] = msgspec.structs.replace(
                event, block_hashes=(block_hash,), parent_block_hash=parent, token_ids=tokens
            )
            parent = block_hash


class _Generation(NamedTuple):
    """A request that the engine computes: its tokens so far, and the callback for more."""

    request: EngineRequest
    tokens: list[int]
    on_output: OnOutput


class TrueEngine:
    """The engine and its publisher's rules, until `stop`.

    `polled` is called at times when all that was flushed can be told, `reported` with the statistics of each iteration.
    """

    def __init__(
        self,
        setup: AgentSetup,
        timeline: Timeline,
        random: Random,
        names: Names,
        polled: Callable[[], None],
        reported: Reported,
    ) -> None:
        self._setup, self._timeline, self._random, self._names = setup, timeline, random, names
        self._polled, self._reported = polled, reported
        description = EngineDescription(
            model=MODEL,
            version="1",
            event_source="simulated",
            block_size=BLOCK_SIZE,
            total_kv_blocks=setup.total_kv_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_seq_len=SEQUENCE_MAX,
            dp_ranks=setup.dp_ranks,
        )
        self._simulator = Simulator(description, timing=SLOW_ENGINE, event_buffer_max_size=setup.event_buffer_max_size)
        self._is_stepping = self._is_stopped = False
        self._running: dict[str, _Generation] = {}
        self._gpu: dict[int, Held] = dict.fromkeys(setup.dp_ranks, frozenset())
        self._hosts = {dp_rank: HostTier(random, setup.host_blocks) for dp_rank in setup.dp_ranks}
        self.rules = TrtllmRules(BLOCK_SIZE)

    def submit(self, request: EngineRequest, on_output: OnOutput) -> None:
        """Let the engine compute, and `on_output` hear of it; raises `RequestRefused`."""
        self._simulator.submit(request, self._timeline.now_s)
        self._running[request.request_id] = _Generation(request, list(request.prompt), on_output)
        self._names.learn(request, request.prompt)
        self._step()

    def cancel(self, request_id: str) -> None:
        """The caller of the generation has gone; without effect where the generation has ended."""
        generation = self._running.pop(request_id, None)
        if generation is not None:
            self._names.learn(generation.request, generation.tokens)
            self._simulator.cancel(request_id)
            self._step()

    def stop(self) -> None:
        """Nothing is computed any more."""
        self._is_stopped = True

    def _step(self) -> None:
        if self._simulator.has_work and not self._is_stepping and not self._is_stopped:
            self._is_stepping = True
            step = self._simulator.step(self._timeline.now_s)
            for request_id, output in step.outputs:
                self._running[request_id].tokens.extend(output.token_ids)
            self._timeline.after(step.duration_s, partial(self._stepped, step))

    def _stepped(self, step: Step) -> None:
        self._is_stepping = False
        if self._is_stopped:
            return
        self._simulator.flush_events()
        for request_id, output in step.outputs:
            generation = self._running.get(request_id)
            if generation is not None:
                if output.finish_reason:
                    del self._running[request_id]
                    self._names.learn(generation.request, generation.tokens)
                generation.on_output(output)
        for dp_rank in self._setup.dp_ranks:
            self._gpu[dp_rank] = self._names.held(held_hashes(self._simulator.pool(dp_rank)), Tier.GPU)
        self._reported(step.statistics)
        if self._random.random() >= self._setup.stall_ratio:
            self._polled()
        self._step()

    def drain(self) -> list[dict[str, Any]]:
        """Return what the engine says since the last call."""
        return self._simulator.drain_events()

    def translate(self, said: list[dict[str, Any]]) -> Iterator[tuple[int, list[EngineEvent]]]:
        """Yield each rank's events, ready for hop A."""
        events = self.rules.translate(said)
        events.sort(key=lambda event: event.dp_rank)
        for dp_rank, of_rank in groupby(events, key=lambda event: event.dp_rank):
            yield dp_rank, [move for event in of_rank for move in self._hosts[dp_rank].moves(event.event)]

    def held(self, dp_rank: int) -> Held:
        """Return what the rank holds, as of what was told."""
        return self._gpu[dp_rank] | self._names.held(self._hosts[dp_rank].held, Tier.HOST)

    def reused_blocks(self, dp_rank: int, request: EngineRequest) -> int:
        """Return how many blocks of the GPU the rank would reuse for a prompt that begins with the request's."""
        return len(self._simulator.pool(dp_rank).match((*request.prompt, 0), namespace_of(request)))
