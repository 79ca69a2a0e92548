"""The phases of one request, pure: which comes next, and which ranks are no longer tried.

    phase     its worker answered      no worker eligible    its worker failed before its answer began
    whole     the answer               -                     whole elsewhere
    prefill   decode; or the answer,   alone                 prefill elsewhere; alone, when the retries are used up
              if its first token was
              the last
    decode    the answer               alone                 decode elsewhere, if the worker never took the handoff;
                                                             else the prompt's KV is lost: prefill
    alone     the answer               -                     alone elsewhere

`-`: nothing more is tried; the client gets an error, and an answer that has begun ends there. `whole`: an aggregated
worker computes prompt and answer; `alone`: a decode worker does, without a prefill worker.

A client that runs the phases itself fixes the phase: its request is retried in that phase only. Each phase may fail
`retry_limit` times and is tried once more. If a worker fails after its answer began, the request migrates: it goes to
another worker with the tokens so far added to its prompt, at most `migration_limit` times.
So a request is tried at most (migration_limit + 1) x (4 x retry_limit + 4) times, and a prompt is prefilled twice only
if its KV was lost.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

from kv_protocol.decided import RequestPhase
from kv_protocol.ids import WorkerRank

Reroute = Literal["no_prefill_worker", "prefill_failed", "no_decode_worker", "decode_failed", "migrated"]
"""Why a request leaves its first plan."""
REROUTES: tuple[Reroute, ...] = get_args(Reroute)
StreamLoss = Literal["not_resumable", "no_seam", "no_worker"]
"""Why a cut stream ends: its ids or events are not known, or it has migrated `migration_limit` times; the next worker
would not continue it where it was cut; no worker is left."""
STREAM_LOSSES: tuple[StreamLoss, ...] = get_args(StreamLoss)
_SPLITS = frozenset({"prefill", "decode"})


def first_phase(roles: frozenset[str], *, may_split: bool) -> RequestPhase:
    """Return the first phase; `roles` are those of the workers that are fit."""
    if may_split and roles >= _SPLITS:
        return "prefill"
    return "alone" if "decode" in roles and "aggregated" not in roles else "whole"


class RequestPlan(msgspec.Struct, frozen=True):
    """The phases of one request from one moment on. Each event returns the plan that follows it.

    A plan with `is_fixed` stays in its phase; without `falls_back` a phase that cannot be served ends the request.
    """

    phase: RequestPhase
    retry_limit: int
    migration_limit: int = 0
    is_fixed: bool = False
    falls_back: bool = True
    migrations: int = 0
    reroutes: tuple[Reroute, ...] = ()
    tried_by_phase: Mapping[RequestPhase, tuple[WorkerRank, ...]] = {}
    failures_by_phase: Mapping[RequestPhase, int] = {}

    @property
    def is_aside(self) -> bool:
        """Whether this phase's answer goes to a decode worker, which continues it, and not to the client."""
        return self.phase == "prefill" and not self.is_fixed

    @property
    def tried(self) -> tuple[WorkerRank, ...]:
        """Ranks that failed in this phase."""
        return self.tried_by_phase.get(self.phase, ())

    @property
    def retries(self) -> int:
        """How often this phase has failed."""
        return self.failures_by_phase.get(self.phase, 0)

    def to(self, phase: RequestPhase) -> "RequestPlan":
        """Return the plan of the same request in another phase, by no failure."""
        return replace(self, phase=phase)

    def no_candidate(self) -> "RequestPlan | None":
        """Return the plan that follows if no worker is eligible for the phase; None: no other phase is tried."""
        if self.is_fixed or not self.falls_back:
            return None
        if self.phase == "prefill":
            return _rerouted(self, "no_prefill_worker", "alone")
        return _rerouted(self, "no_decode_worker", "alone") if self.phase == "decode" else None

    def failed(self, rank: WorkerRank, *, took_handoff: bool) -> "RequestPlan | None":
        """Return the plan after a worker failed before its answer began; None: the request is not tried again.

        `took_handoff`: the worker may have fetched the prefill worker's KV, which can be fetched once only.
        """
        phase, failures = self.phase, self.retries + 1
        plan = replace(
            self,
            tried_by_phase={**self.tried_by_phase, phase: (*self.tried, rank)},
            failures_by_phase={**self.failures_by_phase, phase: failures},
        )
        if failures <= self.retry_limit:
            if phase != "decode" or not took_handoff:
                return plan
            return None if self.is_fixed else _rerouted(plan, "decode_failed", "prefill")
        if phase != "prefill" or self.is_fixed or not self.falls_back:
            return None
        return _rerouted(plan, "prefill_failed", "alone")

    @property
    def may_migrate(self) -> bool:
        """Whether another worker may continue the answer if its worker fails now."""
        return self.migrations < self.migration_limit

    def migrated(self, rank: WorkerRank) -> "RequestPlan":
        """Return the plan that resumes on another rank, after `rank` failed in the middle of the answer."""
        assert self.may_migrate
        plan = replace(
            self,
            migrations=self.migrations + 1,
            failures_by_phase={},
            tried_by_phase={self.phase: (rank,)},
        )
        return _rerouted(plan, "migrated", "prefill" if self.phase == "decode" else self.phase)


def _rerouted(plan: RequestPlan, why: Reroute, phase: RequestPhase) -> RequestPlan:
    rerouted = replace(plan, phase=phase, reroutes=(*plan.reroutes, why))
    if phase != "alone":
        return rerouted
    tried = {"alone": plan.tried_by_phase.get("decode", ()), **plan.tried_by_phase}  # both phases have decode workers
    return replace(rerouted, tried_by_phase=tried)
