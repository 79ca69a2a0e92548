"""A recorded workload against simulated engines in virtual time: a closed loop of sessions, taken in order.

    start        `concurrency` sessions begin at once; where one ends, the next begins
    turn         the router takes one request after the other (`EngineModel.router_s`); the placement chooses a worker,
                 which the request reaches after its own way (`EngineTiming.request_s`)
    iteration    an engine with work computes one after the other; outputs are there at its end; with
                 `EngineModel.jitter` lengths vary by the seed, without it all seeds play the same
    answer ends  the session's next turn is sent at that moment, unless the recording's clients had stopped sending
    events       what an iteration changed in a cache is shown to the placement at the iteration's end

No token of a prompt appears twice but in the system prompts, so two prompts share what their sessions share. Nothing
else takes time: neither the client nor the network. Engines of one GPU slow each other down: an iteration lasts as long
as the number of them that have work when it begins makes it (`EngineTiming.iteration_s`). A run is a function of its
arguments.
"""

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from bench.fidelity.recording import Answered, Recording
from kv_protocol.hashing import chain, local_block_hashes
from worker_agent.engines.simulated.events import EngineEvent
from worker_agent.engines.simulated.identity import EngineNamespace
from worker_agent.engines.simulated.scheduler import Simulator, Step
from worker_agent.engines.simulated.scheduling import VLLM, Scheduling
from worker_agent.engines.simulated.timing import EngineTiming
from worker_agent.port.types import EngineDescription, EngineOutput, EngineRequest


class Sent(NamedTuple):
    """A turn of a session, which is sent at `at_s`; `in_flight` counts the running requests of each worker."""

    session: int
    turn: int
    request: EngineRequest
    at_s: float
    in_flight: Sequence[int]


class Placer(ABC):
    """Chooses a worker for each request, in the order of sending; it may watch what becomes of them."""

    @abstractmethod
    def choose(self, sent: Sent) -> int:
        """Return the worker for a turn."""

    def on_output(  # noqa: B027 - the default
        self, request_id: str, output: EngineOutput, now_s: float, answer_tokens: int
    ) -> None:
        """Learn that a request has tokens, `answer_tokens` in all so far, or its last ones."""

    def on_events(self, worker: int, events: Sequence[EngineEvent], now_s: float) -> None:  # noqa: B027 - the default
        """Learn what an iteration that ended changed in a worker's cache."""


class EngineModel(NamedTuple):
    """Engine settings that a recording does not have."""

    timing: EngineTiming
    name: str = "vllm 0.24.0"
    scheduling: Scheduling = VLLM
    max_num_batched_tokens: int = 8192
    """Source: vLLM's default for an API server on a GPU of 70 GiB or more, A100 excepted."""
    max_num_seqs: int = 128
    engines_per_gpu: int = 1
    router_s: float = 0.0
    """How long the router computes for a request, one after the other."""
    jitter: float = 0.0
    """How far iterations vary: the standard deviation of the logarithm of their length. `timing` gives the mean."""


class Played(NamedTuple):
    """All requests in the order in which they ended, and when the last one did."""

    answered: tuple[Answered, ...]
    makespan_s: float


class _InFlight:
    """A request on its way or running, and what its client has of it."""

    def __init__(self, session: int, turn: int, worker: int, isl_tokens: int, sent_s: float) -> None:
        self.session, self.turn, self.worker = session, turn, worker
        self.isl_tokens, self.sent_s = isl_tokens, sent_s
        self.first_s: float | None = None
        self.answer_tokens = 0

    def answered(self, cached_tokens: int, now_s: float) -> Answered:
        """Return the row of the request, which ends now."""
        assert self.first_s is not None, "a request ended without a token"
        return Answered(
            isl_tokens=self.isl_tokens,
            cached_tokens=cached_tokens,
            ttft_s=self.first_s - self.sent_s,
            e2e_s=now_s - self.sent_s,
            worker=self.worker,
            turn=self.turn,
        )


class ClosedLoop:
    """Simulated workers and one client that plays a workload once."""

    def __init__(
        self, recording: Recording, model: EngineModel, placement: Placer, *, workers: int, seed: int = 0
    ) -> None:
        self._recording = recording
        self._timing = model.timing
        self._engines_per_gpu = model.engines_per_gpu
        self._jitter, self._draw = model.jitter, random.Random(seed)  # noqa: S311 - a workload, not a secret
        self._router_s, self._router_free_s = model.router_s, 0.0
        self._placement = placement
        description = description_of(recording, model)
        self._engines = [
            Simulator(description, timing=model.timing, scheduling=model.scheduling, block_hash=_block_hash)
            for _ in range(workers)
        ]
        self._busy = [False] * workers
        self._in_flight = [0] * workers
        self._requests: dict[str, _InFlight] = {}
        self._tokens = count()
        self._systems = [tuple(islice(self._tokens, tokens)) for tokens in recording.system_tokens]
        self._histories: dict[int, tuple[int, ...]] = {}
        self._sessions: Iterator[int] = iter(range(len(recording.sessions)))
        self._answered: list[Answered] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now_s = 0.0

    def play(self) -> Played:
        """Return how all requests fared.

        Raises:
            RequestRefused: a prompt does not fit an engine's blocks.
        """
        for _ in range(self._recording.concurrency):
            self._begin_session()
        while self._agenda:
            self._now_s, _, act = heapq.heappop(self._agenda)
            act()
        return Played(tuple(self._answered), self._now_s)

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._order), act))

    def _begin_session(self) -> None:
        session = next(self._sessions, None)
        if session is not None and self._now_s < self._recording.sending_s:
            self._histories[session] = self._systems[self._recording.sessions[session].system]
            self._send(session, 0)

    def _send(self, session: int, turn: int) -> None:
        plan = self._recording.sessions[session]
        if turn == len(plan.added_tokens) or self._now_s > self._recording.sending_s:
            del self._histories[session]
            self._begin_session()
            return
        prompt = self._histories[session] + tuple(islice(self._tokens, plan.added_tokens[turn]))
        self._histories[session] = prompt
        request = EngineRequest(request_id=f"s{session}t{turn}", prompt=prompt, max_tokens=plan.output_tokens[turn])
        sent_s = self._now_s
        self._router_free_s = max(sent_s, self._router_free_s) + self._router_s
        self._at(self._router_free_s, lambda: self._place(session, turn, request, sent_s))

    def _place(self, session: int, turn: int, request: EngineRequest, sent_s: float) -> None:
        worker = self._placement.choose(Sent(session, turn, request, self._now_s, self._in_flight))
        isl_tokens = len(request.prompt)
        self._in_flight[worker] += 1
        self._requests[request.request_id] = _InFlight(session, turn, worker, isl_tokens, sent_s)
        self._at(self._now_s + self._timing.request_s(isl_tokens), lambda: self._arrive(worker, request))

    def _arrive(self, worker: int, request: EngineRequest) -> None:
        self._engines[worker].submit(request, self._now_s)
        if not self._busy[worker]:
            self._iterate(worker)

    def _iterate(self, worker: int) -> None:
        engine = self._engines[worker]
        self._busy[worker] = engine.has_work
        if engine.has_work:
            gpu = worker // self._engines_per_gpu * self._engines_per_gpu
            neighbours = sum(self._busy[gpu : gpu + self._engines_per_gpu]) - 1
            step = engine.step(self._now_s, neighbours)
            factor = math.exp(self._draw.gauss(-(self._jitter**2) / 2, self._jitter)) if self._jitter else 1.0
            self._at(self._now_s + step.duration_s * factor, lambda: self._end_iteration(worker, step))

    def _end_iteration(self, worker: int, step: Step) -> None:
        self._engines[worker].flush_events()
        self._placement.on_events(worker, self._engines[worker].drain_events(), self._now_s)
        for request_id, output in step.outputs:
            self._on_output(request_id, output)
        self._iterate(worker)

    def _on_output(self, request_id: str, output: EngineOutput) -> None:
        request = self._requests[request_id]
        if request.first_s is None:
            request.first_s = self._now_s
        request.answer_tokens += len(output.token_ids)
        self._placement.on_output(request_id, output, self._now_s, request.answer_tokens)
        if output.finish_reason is None:
            return
        del self._requests[request_id]
        self._in_flight[request.worker] -= 1
        self._answered.append(request.answered(output.cached_tokens, self._now_s))
        self._send(request.session, request.turn + 1)


def _block_hash(tokens: Sequence[int], parent: int, namespace: EngineNamespace) -> int:
    """Return the sequence hash of a block, full or not: what a router computes of the prompt."""
    del namespace
    return chain(local_block_hashes(tokens, len(tokens)), parent or None)[-1]


def description_of(recording: Recording, model: EngineModel) -> EngineDescription:
    """Return the engines' settings."""
    return EngineDescription(
        model="recorded",
        version=model.name,
        event_source="simulated",
        block_size=recording.block_size,
        total_kv_blocks=recording.blocks_per_worker,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_seq_len=recording.sequence_tokens_max,
    )
