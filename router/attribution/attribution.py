"""What requests saved, by model, tenant, LoRA adapter and prefix family: a fold over decisions and outcomes. Pure.

    decision that computes a prompt     kept until its outcome, at most `pending_max`; the oldest is dropped
    outcome "ok"                        its saving is added to the total and to one row of each of `DIMENSIONS`
    any other outcome                   counted as not answered: what a failed attempt computed is not known. Another
                                        decision may have answered the same request
    prompt that was not encoded         counted as unseen: neither its length nor its prefix is known

The same records in the same order give the same sums, in a running router and from its journal.
"""

from collections import Counter
from typing import ClassVar, Literal, NamedTuple

from kv_protocol.journal import OutcomeKnown
from router.attribution.savings import Placement, Sums, placement_of, saving_of
from router.attribution.top_rows import TopRows
from router.decision.verdict import Verdict
from router.journal.records import Recordable

Dimension = Literal["model", "tenant", "lora", "prefix"]
DIMENSIONS: tuple[Dimension, ...] = ("model", "tenant", "lora", "prefix")
NotCounted = Literal["not_answered", "unseen", "dropped", "not_repeated"]
"""`not_repeated`: of a journal that lacks records before the decision, so that its candidates are not known."""
NOT_COUNTED: tuple[NotCounted, ...] = ("not_answered", "unseen", "dropped", "not_repeated")


class AttributionLimits(NamedTuple):
    """How many names have rows of their own in each dimension, and which block of a prompt names its family.

    `pending_max`: largest number of decisions without an outcome.
    """

    rows_max: int = 64
    family_blocks: int = 4
    pending_max: int = 65_536


class Attribution:
    """All sums, of one router or of several; a recorder of what is applied to a router's state."""

    reads: ClassVar[tuple[type, ...]] = (Verdict, OutcomeKnown)

    def __init__(self, limits: AttributionLimits) -> None:
        self._limits = limits
        self._pending: dict[str, Placement] = {}
        self.total = Sums()
        self.rows: dict[Dimension, TopRows] = {each: TopRows(limits.rows_max) for each in DIMENSIONS}
        self.not_counted: Counter[NotCounted] = Counter(dict.fromkeys(NOT_COUNTED, 0))

    @property
    def pending(self) -> int:
        """Decisions whose outcome is not known yet."""
        return len(self._pending)

    def record(self, what: Recordable) -> None:
        """`what` was applied."""
        if isinstance(what, Verdict):
            self.decided(what)
        elif isinstance(what, OutcomeKnown):
            self.ended(what)

    def decided(self, verdict: Verdict) -> None:
        """A decision is carried out."""
        placement = placement_of(verdict, self._limits.family_blocks)
        if placement is None:
            return
        if len(self._pending) >= self._limits.pending_max:
            del self._pending[next(iter(self._pending))]
            self.not_counted["dropped"] += 1
        self._pending[verdict.request.decision_id] = placement

    def ended(self, outcome: OutcomeKnown) -> Placement | None:
        """The outcome of a decision is known; return the decision if it was counted."""
        placement = self._pending.pop(outcome.decision_id, None)
        if placement is None:
            return None
        if outcome.outcome != "ok" or not placement.isl_tokens:
            self.not_counted["unseen" if outcome.outcome == "ok" else "not_answered"] += 1
            return None
        saving, rows = saving_of(placement, outcome), self.rows
        self.total.add(saving)
        rows["model"].count(placement.model, saving)
        rows["tenant"].count(placement.tenant, saving)
        rows["lora"].count(placement.lora, saving)
        rows["prefix"].count(placement.prefix, saving)
        return placement

    def forget(self, decision_id: str) -> None:
        """The outcome of a decision is of another period."""
        self._pending.pop(decision_id, None)

    def charge(self, placement: Placement, blocks: float) -> None:
        """Blocks were evicted after this decision, which was counted."""
        self.total.evicted_blocks += blocks
        self.rows["model"].charge(placement.model, blocks)
        self.rows["tenant"].charge(placement.tenant, blocks)
        self.rows["lora"].charge(placement.lora, blocks)
        self.rows["prefix"].charge(placement.prefix, blocks)
