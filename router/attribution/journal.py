"""What requests saved, from routers' journals, for a period. Pure.

A journal does not have every candidate's overlap: each decision is made again (`router/journal/replay.py`), so the
sums equal those of the router. A request belongs to the period in which its outcome was written, by the log's time.
If the removals of the period are given, blocks that were evicted are charged as well:

    new blocks     full blocks of a request's prompt and answer that it did not reuse: its rank needed room for them
    removal        k blocks on the rank's GPU tier, as its event stream says, at a second of the log's time
    charged        to the rank's placements whose journal message was written at most `AFTER_S` before or `BEFORE_S`
                   after the removal, in proportion to their new blocks that are not charged yet

So a placement is charged at most its new blocks, and all placements together at most what was removed. That removals
of the same seconds are shared in proportion is an assumption: engines do not say for which request they evict. A
removal without placements near it is charged to none. Clears are no removals.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from kv_protocol.codec import decode_message
from kv_protocol.decided import Decided
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import Removed, Tier
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import JournalMessage, OutcomeKnown
from kv_protocol.subjects import rank_of
from router.attribution.report import AttributionLimits
from router.journal.replay import Continuity, Redecided, Replay
from router.native import built

BEFORE_S, AFTER_S = 1, 10
"""A decision is in the journal some 50 ms after it was taken, a removal in the log some ms after it was made."""
CELLS_MAX = 1_000_000
"""Largest number of pairs of a rank and a second with removals; further removals are counted, but not charged."""
PLACED_MAX = 100_000
"""Placements that wait for removals. At this number those up to the median second are charged and forgotten; all are
forgotten if they came within `AFTER_S`."""
_NS_PER_S = 1_000_000_000
_SECOND = attrgetter("second")


class Removals:
    """Removed blocks by rank and second."""

    def __init__(self) -> None:
        self._of_rank: dict[WorkerRank, Counter[int]] = {}
        self._cells = 0
        self.total = 0

    def add(self, rank: WorkerRank, second: int, blocks: int) -> None:
        """Count blocks that the rank removed."""
        self.total += blocks
        cells = self._of_rank.setdefault(rank, Counter())
        if second not in cells:
            if self._cells >= CELLS_MAX:
                return
            self._cells += 1
        cells[second] += blocks

    def take(self, rank: WorkerRank, until: int | None = None) -> list[tuple[int, int]]:
        """Return the rank's seconds up to `until` (None: all) and their blocks, in order of time; forget them."""
        cells = self._of_rank.get(rank, Counter())
        return [(second, cells.pop(second)) for second in sorted(cells) if until is None or second <= until]


def count_removals(removals: Removals, subject: str, time_ns: int, data: bytes) -> None:
    """Count the removals of a message of `KV_EVENTS`; one that cannot be read counts nothing."""
    try:
        rank, batches = rank_of(subject), decode_message(data)
    except MalformedMessage:
        return
    for batch in batches:
        event = batch.event
        if isinstance(event, Removed) and event.tier == Tier.GPU:
            removals.add(rank, time_ns // _NS_PER_S, len(event.sequence_hashes))


@dataclass(slots=True)
class _Placed:
    second: int
    charge: Callable[[float], None]
    left: float
    """New blocks that are not charged yet."""


class Evictions:
    """Charges removals to placements. All removals come first, placements in any order; `settle` charges the rest."""

    def __init__(self, removals: Removals, placed_max: int = PLACED_MAX) -> None:
        self._removals, self._placed_max = removals, placed_max
        self._placed: dict[WorkerRank, list[_Placed]] = {}
        self._count = 0

    def placed(self, rank: WorkerRank, second: int, new_blocks: int, charge: Callable[[float], None]) -> None:
        """A request came to the rank at that second, and needed room for so many blocks: they are charged to it."""
        self._placed.setdefault(rank, []).append(_Placed(second, charge, float(new_blocks)))
        self._count += 1
        if self._count >= self._placed_max:
            seconds = sorted(each.second for placed in self._placed.values() for each in placed)
            self.settle(seconds[len(seconds) // 2])
        if self._count >= self._placed_max:  # all came within some seconds
            self._placed.clear()
            self._count = 0

    def settle(self, until: int | None = None) -> None:
        """Charge the removals up to a second, None: all; forget the placements that no later one can be charged to."""
        for rank, placed in self._placed.items():
            placed.sort(key=_SECOND)
            for second, blocks in self._removals.take(rank, until):
                _share(placed, second, blocks)
            placed[:] = [each for each in placed if until is not None and each.second > until - AFTER_S]
        self._count = sum(map(len, self._placed.values()))


def _share(placed: list[_Placed], second: int, blocks: int) -> None:
    first = bisect_left(placed, second - AFTER_S, key=_SECOND)
    behind = bisect_right(placed, second + BEFORE_S, key=_SECOND)
    near = [each for each in placed[first:behind] if each.left > 0]
    new_blocks = sum(each.left for each in near)
    part = min(1.0, blocks / new_blocks) if near else 0.0
    for each in near:
        charged = each.left * part
        each.left -= charged
        each.charge(charged)


def new_blocks(placement: built.Placement, outcome: OutcomeKnown) -> int:
    """Return how many full blocks of prompt and answer the rank did not have."""
    reused = placement.predicted_tokens if outcome.cached_tokens is None else outcome.cached_tokens
    tokens = placement.isl_tokens + (outcome.output_tokens or 0)
    return max(0, tokens // placement.block_size - min(reused, placement.isl_tokens) // placement.block_size)


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
        self._evictions = None if removals is None else Evictions(removals)
        self._placed = OrderedDict[str, tuple[WorkerRank, int]]()
        """Rank and second of the decisions without an outcome, with removals alone."""
        self._pending_max = limits.pending_max
        self._since_ns, self._until_ns = since_ns, until_ns
        self._routers: dict[str, tuple[Continuity, Replay]] = {}
        self.first_ns: int | None = None
        """Time of the first message of the period; None: there was none."""
        self.last_ns = 0

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
            charge = partial(self.attribution.charge, placement)
            self._evictions.placed(*placed, new_blocks(placement, outcome), charge)
