"""The phases of one request, pure: which comes next, and which ranks are no longer tried.

    phase     its worker answered      no worker eligible    its worker failed before its answer began
    whole     the answer               -                     whole elsewhere
    prefill   decode; or the answer,   alone                 prefill elsewhere; alone, when the retries are used up
              where its first token
              was the last
    decode    the answer               alone                 decode elsewhere, where the worker never took the handoff;
                                                             else the prompt's KV is lost: prefill
    alone     the answer               -                     alone elsewhere
    -         nothing more is tried: an error, or, once the client has some of the answer, its end

A plan whose phase is `fixed`, because the client runs the other phases itself, is retried in that phase only. Each
phase may fail `retry_limit` times and is tried once more. After a worker failed whose answer had begun, the request
migrates: it goes to another worker with the tokens so far added to its prompt, at most `migration_limit` times.
So a request is tried at most (migration_limit + 1) x (4 x retry_limit + 4) times, and a prompt is prefilled twice only
where its KV was lost.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from kv_protocol.decided import RequestPhase
from kv_protocol.ids import WorkerRank

Reroute = Literal["no_prefill_worker", "prefill_failed", "no_decode_worker", "decode_failed", "migrated"]
"""Why a request leaves its first plan."""
REROUTES: tuple[Reroute, ...] = get_args(Reroute)
StreamLoss = Literal["not_resumable", "no_seam", "no_worker"]
"""Why a cut stream ends: its ids or events are not known, or the limit is reached; the next worker would not continue
it where it was cut; no worker is left."""
STREAM_LOSSES: tuple[StreamLoss, ...] = get_args(StreamLoss)
_SPLITS = frozenset({"prefill", "decode"})


def first_phase(roles: frozenset[str], *, may_split: bool) -> RequestPhase:
    """Return the first phase; `roles` are those of the workers that are fit."""
    if may_split and roles >= _SPLITS:
        return "prefill"
    return "alone" if "decode" in roles and "aggregated" not in roles else "whole"


class RequestPlan:
    """The phases of one request. Not shared: every event changes them."""

    migrations = 0
    reroutes: tuple[Reroute, ...] = ()
    _tried: Mapping[RequestPhase, tuple[WorkerRank, ...]] = MappingProxyType({})
    _failures: Mapping[RequestPhase, int] = MappingProxyType({})

    def __init__(
        self,
        phase: RequestPhase,
        *,
        retry_limit: int,
        migration_limit: int = 0,
        fixed: bool = False,
        falls_back: bool = True,
    ) -> None:
        """Without `falls_back` a phase that cannot be served ends the request."""
        self.phase: RequestPhase = phase
        self.is_fixed, self._falls_back = fixed, falls_back
        self.retry_limit, self.migration_limit = retry_limit, migration_limit
        self.is_aside = phase == "prefill" and not fixed
        """Whether the phase's answer is a prefill worker's, which a decode worker continues, and not the client's."""

    @property
    def tried(self) -> tuple[WorkerRank, ...]:
        """Ranks that failed in this phase."""
        return self._tried.get(self.phase, ())

    @property
    def retries(self) -> int:
        """How often this phase has failed."""
        return self._failures.get(self.phase, 0)

    def prefilled(self) -> None:
        """The prompt is computed: decode is next."""
        assert self.phase == "prefill"
        self._enter("decode")

    def compute_at_decode(self) -> None:
        """The decode worker computes the prompt, too."""
        assert not self.is_fixed
        self._enter("alone")

    def beside(self, phase: RequestPhase) -> "RequestPlan":
        """Return the same plan in another phase, for a trial decision."""
        plan = RequestPlan(phase, retry_limit=self.retry_limit, migration_limit=self.migration_limit)
        plan._tried = self._tried
        return plan

    def no_candidate(self) -> bool:
        """No worker is eligible for the phase; return whether another phase is to be tried."""
        if self.is_fixed or not self._falls_back:
            return False
        if self.phase == "prefill":
            self._reroute("no_prefill_worker", "alone")
        elif self.phase == "decode":
            self._reroute("no_decode_worker", "alone")
        else:
            return False
        return True

    def failed(self, rank: WorkerRank, *, took_handoff: bool) -> bool:
        """A worker failed before its answer began; return whether the request is to be tried again.

        `took_handoff`: the worker may have fetched the prefill worker's KV, which can be fetched once only.
        """
        phase = self.phase
        failures = self.retries + 1
        self._tried = {**self._tried, phase: (*self.tried, rank)}
        self._failures = {**self._failures, phase: failures}
        if failures <= self.retry_limit:
            if phase == "decode" and took_handoff:
                if self.is_fixed:
                    return False
                self._reroute("decode_failed", "prefill")
            return True
        if phase != "prefill" or self.is_fixed or not self._falls_back:
            return False
        self._reroute("prefill_failed", "alone")
        return True

    def may_fail(self) -> bool:
        """Return whether the request is tried again if its worker fails now, which may have taken the handoff."""
        if self.retries < self.retry_limit:
            return self.phase != "decode" or not self.is_fixed
        return self.phase == "prefill" and not self.is_fixed and self._falls_back

    def may_migrate(self) -> bool:
        """Return whether a request whose answer has begun may resume on another worker."""
        return self.migrations < self.migration_limit

    def migrated(self, rank: WorkerRank) -> None:
        """Resume on another rank: `rank` failed in the middle of the answer."""
        assert self.may_migrate()
        phase = self.phase
        self.migrations += 1
        self._failures = {}
        self._tried = {phase: (rank,)}
        self._reroute("migrated", "prefill" if phase == "decode" else phase)

    def _reroute(self, why: Reroute, phase: RequestPhase) -> None:
        self.reroutes = (*self.reroutes, why)
        self._enter(phase)
        if phase == "alone":  # of the same workers
            self._tried = {"alone": self._tried.get("decode", ()), **self._tried}

    def _enter(self, phase: RequestPhase) -> None:
        self.phase = phase
        self.is_aside = phase == "prefill" and not self.is_fixed
