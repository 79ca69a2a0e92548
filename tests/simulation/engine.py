"""A worker's engine in virtual time: what it holds is the truth; what it tells are engine events, host tier included.

The simulated engine knows the GPU alone, so blocks that leave it are moved on by a model of a host tier.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from random import Random

import msgspec

from kv_protocol.events import Tier
from tests.simulation.link import Timeline
from tests.simulation.oracle import BLOCK_SIZE, Held, Names
from tests.simulation.setup import AgentSetup
from worker_agent.core.dialects.trtllm import TrtllmRules
from worker_agent.core.engine import EngineDescription, EngineRequest, RequestRefused
from worker_agent.core.engine_events import EngineEvent, EngineRemoved, EngineStored
from worker_agent.core.simulator.events import render
from worker_agent.core.simulator.identity import Namespace
from worker_agent.core.simulator.scheduler import Simulator, Step
from worker_agent.core.simulator.timing import EngineTiming

HOST_RATIO = 0.5
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

Finished = Callable[[EngineRequest, list[int]], None]


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


class TrueEngine:
    """The engine and its publisher's rules. `polled` is called at times when all that was flushed can be told."""

    def __init__(
        self,
        setup: AgentSetup,
        timeline: Timeline,
        random: Random,
        names: Names,
        polled: Callable[[], None],
        finished: Finished,
    ) -> None:
        self._setup, self._timeline, self._random, self._names = setup, timeline, random, names
        self._polled, self._finished = polled, finished
        description = EngineDescription(
            model="m",
            version="1",
            event_source="simulated",
            block_size=BLOCK_SIZE,
            total_kv_blocks=setup.total_kv_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_seq_len=80,
            dp_ranks=setup.dp_ranks,
        )
        self._simulator = Simulator(description, timing=SLOW_ENGINE, event_buffer_max_size=setup.event_buffer_max_size)
        self._is_stepping = False
        self._tokens: dict[str, tuple[EngineRequest, list[int]]] = {}
        self._gpu: dict[int, Held] = dict.fromkeys(setup.dp_ranks, frozenset())
        self._hosts = {dp_rank: HostTier(random, setup.host_blocks) for dp_rank in setup.dp_ranks}
        self.rules = TrtllmRules(BLOCK_SIZE)

    def submit(self, request: EngineRequest) -> None:
        """Let the engine compute; without effect where it refuses."""
        try:
            self._simulator.submit(request, self._timeline.now_s)
        except RequestRefused:
            return
        self._tokens[request.request_id] = (request, list(request.prompt))
        self._names.learn(request, request.prompt)
        self._step()

    def cancel_one(self) -> None:
        """Whoever asked for one of the generations has gone."""
        if self._tokens:
            request_id = self._random.choice(list(self._tokens))
            self._names.learn(*self._tokens.pop(request_id))
            self._simulator.cancel(request_id)
            self._step()

    def _step(self) -> None:
        if self._simulator.has_work and not self._is_stepping:
            self._is_stepping = True
            step = self._simulator.step(self._timeline.now_s)
            for request_id, output in step.outputs:
                self._tokens[request_id][1].extend(output.token_ids)
            self._timeline.after(step.duration_s, partial(self._stepped, step))

    def _stepped(self, step: Step) -> None:
        self._is_stepping = False
        for request_id, output in step.outputs:
            if output.finish_reason and request_id in self._tokens:
                request, tokens = self._tokens.pop(request_id)
                self._names.learn(request, tokens)
                self._finished(request, tokens)
        self._simulator.flush_events()
        for dp_rank in self._setup.dp_ranks:
            self._gpu[dp_rank] = self._names.held(self._simulator.held_hashes(dp_rank), Tier.GPU)
        if self._random.random() >= self._setup.stall_ratio:
            self._polled()
        self._step()

    def tell(self) -> Iterator[tuple[int, list[EngineEvent]]]:
        """Yield each rank's events since the last call, ready for hop A."""
        events = self.rules.translate(render(event) for event in self._simulator.drain_events())
        events.sort(key=lambda event: event.dp_rank)
        for dp_rank, of_rank in groupby(events, key=lambda event: event.dp_rank):
            yield dp_rank, [move for event in of_rank for move in self._hosts[dp_rank].moves(event.event)]

    def held(self, dp_rank: int) -> Held:
        """Return what the rank holds, as of what was told."""
        return self._gpu[dp_rank] | self._names.held(self._hosts[dp_rank].held, Tier.HOST)

    def reused_blocks(self, dp_rank: int, request: EngineRequest) -> int:
        """Return how many blocks of the GPU the rank would reuse for a prompt that begins with the request's."""
        pool = self._simulator._ranks[dp_rank].pool
        return len(pool.match((*request.prompt, 0), Namespace.of(request.lora_name, request.cache_salt)))
