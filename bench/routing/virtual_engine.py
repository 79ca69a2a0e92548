"""One simulated worker in virtual time."""

from bisect import bisect_right

import msgspec

from bench.routing.canonical_stream import CanonicalStream
from bench.routing.tokens import OneToken, prompt_tokens
from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest
from kv_protocol.events import Batch
from kv_protocol.ids import WorkerRank
from worker_agent.engines.simulated.blocks import NewPool, rank_pool
from worker_agent.engines.simulated.identity import BlockHash
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.scheduling import TRTLLM, Scheduling
from worker_agent.engines.simulated.timing import H200_8B, EngineTiming
from worker_agent.port.types import EngineDescription, EngineOutput, EngineRequest

FORESEEN_MAX = 64
"""Iterations computed at once; a request that comes sooner wastes the rest of what was foreseen."""
_ONE_TOKEN = OneToken()


def scaled(timing: EngineTiming, factor: float) -> EngineTiming:
    """Return the timing of an engine that needs `factor` times as long for everything."""
    seconds = {name: getattr(timing, name) * factor for name in timing.__struct_fields__ if name.endswith("_s")}
    return msgspec.structs.replace(timing, **seconds)


class VirtualEngine:
    """One worker, busy or idle. `begin`, wait until the time that it returns, `end`; repeat while it `has_work`.

    Iterations that can only decode are foreseen and computed at once, which changes no time, no
    event and no end of an answer; their tokens are not reported one by one. A request that comes in between cuts the
    stretch off at the end of the iteration that is being computed, as it would have had to wait for that end anyway.
    """

    def __init__(
        self,
        rank: WorkerRank,
        description: EngineDescription,
        block_hash: BlockHash,
        *,
        slowdown: float = 1.0,
        foreseen_max: int = FORESEEN_MAX,
        new_pool: NewPool = rank_pool,
        timing: EngineTiming = H200_8B,
        id_tokens: int = TRACE_BLOCK_TOKENS,
        scheduling: Scheduling = TRTLLM,
    ) -> None:
        """Each id of a request's blocks stands for `id_tokens`."""
        self.rank = rank
        self._timing, self._id_tokens = scaled(timing, slowdown), id_tokens
        self.simulator = Simulator(
            description,
            timing=self._timing,
            scheduling=scheduling,
            token_source=_ONE_TOKEN,
            block_hash=block_hash,
            new_pool=new_pool,
        )
        self.stream = CanonicalStream(description.block_size)
        self._foreseen_max = foreseen_max
        self._foreseen_s: list[float] = []
        self._outputs: tuple[tuple[str, EngineOutput], ...] = ()
        self.waiting_requests = 0
        """That wait for their first iteration, as the engine's metrics would say: at an iteration's end or later."""
        self.ends_s: float | None = None
        """When what is being computed ends; None while the engine is idle."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return self.simulator.has_work

    def request_s(self, request: TraceRequest) -> float:
        """Return how long a request is on its way to this engine."""
        return self._timing.request_s(request.isl_tokens)

    def submit(self, request_id: str, request: TraceRequest, now_s: float) -> None:
        """Queue a request; it is looked at when the next iteration begins. `ends_s` may be sooner now."""
        engine_request = EngineRequest(
            request_id=request_id, prompt=prompt_tokens(request, self._id_tokens), max_tokens=request.osl_tokens
        )
        self.simulator.submit(engine_request, now_s)
        self.waiting_requests += 1
        if self._foreseen_s:
            del self._foreseen_s[bisect_right(self._foreseen_s, now_s) + 1 :]
            self.ends_s = self._foreseen_s[-1]

    def begin(self, now_s: float, neighbours: int = 0, factor: float = 1.0) -> None:
        """Begin an iteration, or a stretch of them; `ends_s` says when it ends.

        `neighbours` compute on the same GPU; one iteration lasts `factor` times as long as the engine model says.
        """
        self._foreseen_s = self.simulator.foresee(now_s, self._foreseen_max)
        if self._foreseen_s:
            self.ends_s = self._foreseen_s[-1]
        else:
            step = self.simulator.step(now_s, neighbours)
            self._outputs, self.ends_s = step.outputs, now_s + step.duration_s * factor
            self.waiting_requests = step.statistics[0].inflight_batching_stats.num_queued_context_requests

    def end(self) -> tuple[tuple[tuple[str, EngineOutput], ...], list[Batch]]:
        """End the iteration; return the outputs by request id, and the batches that it publishes."""
        self.ends_s = None
        if self._foreseen_s:
            self.simulator.skip(len(self._foreseen_s))
            self._foreseen_s = []
            return (), []
        self.simulator.flush_events()
        batches = [batch for event in self.simulator.drain_events() for batch in self.stream.of(event)]
        outputs, self._outputs = self._outputs, ()
        return outputs, batches
