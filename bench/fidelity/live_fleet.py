"""A recorded workload against simulated engines in virtual time: a closed loop of sessions, taken in order.

    start        `concurrency` sessions begin at once; where one ends, the next begins
    answer ends  the session's next turn is sent at that moment, unless the recording's clients had stopped sending

No block of a prompt appears twice but in the system prompts, so two prompts share what their sessions share. A run is a
function of its arguments.
"""

from collections.abc import Iterator
from itertools import count, islice, pairwise
from typing import NamedTuple

from bench.fidelity.live_recording import WORKERS, Recording
from bench.placement.policies import Placement
from bench.routing.trace import TraceRequest
from bench.routing.virtual_fleet import VirtualFleet, VirtualFleetShape
from worker_agent.engines.simulated.scheduling import VLLM, Scheduling
from worker_agent.engines.simulated.timing import EngineTiming
from worker_agent.port.types import EngineDescription


class EngineModel(NamedTuple):
    """Engine settings that a recording does not have; `VirtualFleetShape` says what the last three are."""

    timing: EngineTiming
    name: str = "vllm 0.24.0"
    scheduling: Scheduling = VLLM
    max_num_batched_tokens: int = 8192
    """Source: vLLM's default for an API server on a GPU of 70 GiB or more, A100 excepted."""
    max_num_seqs: int = 128
    engines_per_gpu: int = 1
    router_s: float = 0.0
    jitter: float = 0.0


def shape_of(recording: Recording, model: EngineModel, workers: int = WORKERS) -> VirtualFleetShape:
    """Return the fleet of a recording."""
    description = EngineDescription(
        model="recorded",
        version=model.name,
        event_source="simulated",
        block_size=recording.block_size,
        total_kv_blocks=recording.blocks_per_worker,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_seq_len=recording.sequence_tokens_max,
    )
    return VirtualFleetShape(
        workers,
        recording.blocks_per_worker * recording.block_size,
        recording.block_size,
        foreseen_max=0,
        scheduling=model.scheduling,
        descriptions=(description,) * workers,
        timings=(model.timing,) * workers,
        id_tokens=recording.block_size,
        engines_per_gpu=model.engines_per_gpu,
        router_s=model.router_s,
        jitter=model.jitter,
    )


def turns_of(recording: Recording) -> Iterator[list[TraceRequest]]:
    """Yield the requests of each session; every id of their blocks stands for a block of the recording's size."""
    fresh, size = count(), recording.block_size
    systems = [tuple(islice(fresh, tokens // size)) for tokens in recording.system_tokens]
    for session in recording.sessions:
        known, turns = systems[session.system], list[TraceRequest]()
        tokens_of_turns = session.prompts_tokens(recording.system_tokens)
        for tokens, output_tokens in zip(tokens_of_turns, session.output_tokens, strict=True):
            block_ids = known + tuple(islice(fresh, -(-tokens // size) - len(known)))
            turns.append(TraceRequest(0.0, tokens, output_tokens, block_ids))
            known = block_ids[: tokens // size]
        yield turns


class LiveFleet(VirtualFleet):
    """The fleet of a recording; its clients play the workload once."""

    def __init__(
        self, recording: Recording, model: EngineModel, placement: Placement, *, seed: int, workers: int = WORKERS
    ) -> None:
        sessions = list(turns_of(recording))
        firsts = [turns[0] for turns in sessions]
        self._sending_s = recording.sending_s
        self._next_turn = {turn.block_ids: then for turns in sessions for turn, then in pairwise(turns)}
        self._later = iter(firsts[recording.concurrency :])
        shape, begun = shape_of(recording, model, workers), firsts[: recording.concurrency]
        super().__init__(shape, placement.policy, begun, seed=seed, modes_of=placement.modes_of)

    def _follow(self, request: TraceRequest) -> None:
        now_s = self._clock.now_s
        then = self._next_turn.get(request.block_ids)
        if now_s < self._sending_s and then is None:
            then = next(self._later, None)
        if now_s <= self._sending_s and then is not None:
            self._send(then, now_s)
