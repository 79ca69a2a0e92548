"""What requests saved, from routers' journals, for a period. Pure.

A journal does not have every candidate's overlap: each decision is taken again (`router/journal/replay.py`), which
gives what the router summed up itself. A request is of the period in which its outcome was written, by the log's time.
With the removals of that time, blocks that were evicted are charged, too (`evictions.py`).
"""

from collections import OrderedDict

from kv_protocol.decided import Decided
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import JournalMessage, OutcomeKnown
from router.attribution.attribution import AttributionLimits
from router.attribution.evictions import Evictions, Removals, new_blocks
from router.journal.continuity import Continuity
from router.journal.replay import Redecided, Replay
from router.native import built

_NS_PER_S = 1_000_000_000


class JournalSavings:
    """The sums of all routers whose journals are read, from `since_ns` (included) to `until_ns`; None: no bound."""

    def __init__(
        self,
        limits: AttributionLimits,
        since_ns: int | None = None,
        until_ns: int | None = None,
        removals: Removals | None = None,
    ) -> None:
        self.attribution = built.Attribution(*limits)
        self.not_repeated = 0
        """Decisions whose candidates are not known, because the journal lacks records before them."""
        self._evictions = None if removals is None else Evictions(removals, self.attribution.charge)
        self._placed = OrderedDict[str, tuple[WorkerRank, int]]()
        """Rank and second of the decisions without an outcome, with removals alone."""
        self._pending_max = limits.pending_max
        self._since_ns, self._until_ns = since_ns, until_ns
        self._routers: dict[str, tuple[Continuity, Replay]] = {}
        self.first_ns: int | None = None
        """Time of the first message of the period; None: there was none."""
        self.last_ns = 0

    @property
    def routers(self) -> list[str]:
        """The routers that were read, by name."""
        return sorted(self._routers)

    def take(self, router: str, time_ns: int, message: JournalMessage) -> None:
        """Fold in the records of a router's next message, which the log took at this time (since 1970)."""
        continuity, replay = self._routers.setdefault(router, (Continuity(), Replay()))
        is_inside = (self._since_ns is None or time_ns >= self._since_ns) and (
            self._until_ns is None or time_ns < self._until_ns
        )
        if is_inside:
            self.first_ns = time_ns if self.first_ns is None else self.first_ns
            self.last_ns = time_ns
        for record in continuity.records(message):
            found = replay.take(record)
            if isinstance(record, Decided) and isinstance(found, Redecided):
                if found.verdict is not None:
                    self.attribution.decided(found.verdict)
                    self._place(record, time_ns)
                elif is_inside:
                    self.not_repeated += 1
            elif isinstance(record, OutcomeKnown) and is_inside:
                self._end(record)
            elif isinstance(record, OutcomeKnown):
                self.attribution.forget(record.decision_id)

    def settle(self) -> None:
        """All messages were read: charge the removals that are left."""
        if self._evictions is not None:
            self._evictions.settle()

    def _place(self, record: Decided, time_ns: int) -> None:
        if self._evictions is not None:
            self._placed[record.request.decision_id] = record.rank, time_ns // _NS_PER_S
            if len(self._placed) > self._pending_max:
                self._placed.popitem(last=False)

    def _end(self, outcome: OutcomeKnown) -> None:
        placement = self.attribution.ended(outcome.decision_id, outcome.outcome == "ok", outcome.cached_tokens)
        placed = self._placed.pop(outcome.decision_id, None)
        if self._evictions is not None and placement is not None and placed is not None:
            self._evictions.placed(*placed, placement, new_blocks(placement, outcome))
