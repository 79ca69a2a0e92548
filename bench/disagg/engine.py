"""One simulated worker of a role in virtual time: aggregated, prefill or decode.

It works as `VirtualEngine` does, with two additions. `fetches` is the KV that it waits for since its iteration began;
its driver lets an `Exchange` carry that. A transfer to or from it calls `cut`, as a request in between does, since the
foreseen iterations no longer hold.
"""

from bisect import bisect_right

from bench.routing.tokens import OneToken, prompt_tokens
from bench.routing.trace import TraceRequest
from bench.routing.virtual_engine import FORESEEN_MAX, VirtualEngine
from kv_protocol.decided import RequestPhase
from kv_protocol.events import Batch
from kv_protocol.fleet import Role
from kv_protocol.ids import WorkerRank
from worker_agent.engines.simulated.identity import BlockHash
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.transfer import Fetch, TransferRules
from worker_agent.port.handoff import Handoff
from worker_agent.port.types import EngineDescription, EngineOutput, EngineRequest


class RoleEngine(VirtualEngine):
    """One worker of a role, busy or idle."""

    def __init__(
        self,
        rank: WorkerRank,
        description: EngineDescription,
        block_hash: BlockHash,
        *,
        role: Role,
        transfers: TransferRules,
        foreseen_max: int = FORESEEN_MAX,
    ) -> None:
        super().__init__(rank, description, block_hash, foreseen_max=foreseen_max)
        self.simulator = Simulator(
            description,
            timing=self._timing,
            token_source=OneToken(),
            block_hash=block_hash,
            role=role,
            transfers=transfers,
        )
        self.role: Role = role
        self.fetches: tuple[Fetch, ...] = ()
        """The KV that it waits for since its last iteration began."""

    def submit(
        self,
        request_id: str,
        request: TraceRequest,
        now_s: float,
        *,
        phase: RequestPhase = "whole",
        handoff: Handoff | None = None,
    ) -> None:
        """Queue a phase of a request; `handoff` is the prefill worker's answer. `ends_s` may be sooner now."""
        engine_request = EngineRequest(
            request_id=request_id,
            prompt=prompt_tokens(request),
            max_tokens=request.osl_tokens,
            handoff=handoff,
            is_context_and_generation=phase == "alone",
        )
        self.simulator.submit(engine_request, now_s)
        self.cut(now_s)

    def cut(self, now_s: float) -> None:
        """What was foreseen ends with the iteration that is being computed; `ends_s` may be sooner now."""
        if self._foreseen_s:
            del self._foreseen_s[bisect_right(self._foreseen_s, now_s) + 1 :]
            self.ends_s = self._foreseen_s[-1]

    def begin(self, now_s: float) -> None:
        """Begin an iteration, or a stretch of them; `ends_s` says when it ends, `fetches` what it waits for."""
        self.fetches = ()
        self._foreseen_s = self.simulator.foresee(now_s, self._foreseen_max)
        if self._foreseen_s:
            self.ends_s = self._foreseen_s[-1]
            return
        step = self.simulator.step(now_s)
        self._outputs, self.fetches, self.ends_s = step.outputs, step.fetches, now_s + step.duration_s

    def end(self) -> tuple[tuple[tuple[str, EngineOutput], ...], list[Batch]]:
        """End the iteration; return the outputs by request id, and the batches that it publishes."""
        outputs, batches = super().end()
        self.simulator.flush_events()  # of KV that came during what was foreseen
        late = [batch for event in self.simulator.drain_events() for batch in self.stream.of(event)]
        return outputs, [*batches, *late]
