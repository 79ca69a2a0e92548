"""What requests saved, from routers' journals, for a period. Pure.

A journal does not have every candidate's overlap: each decision is made again (`router/journal/replay.py`), so the
sums equal those of the router. A request belongs to the period in which its outcome was written, by the log's time.
If the removals of the period are given, blocks that were evicted are charged as well:

    new blocks     full blocks of a request's prompt and answer that it did not reuse: its rank needed room for them
    removal        blocks that left the rank's GPU, as its event stream says, at a second of the log's time
    charged        to the rank's requests, one after another as they ended, each at most its new blocks. Only requests
                   count that were decided at most `AFTER_S` before or `BEFORE_S` after the removal, by the log's time

So a request is charged at most its new blocks, and all requests together at most what was removed. Their order is an
assumption: engines do not say for which request they evict. A removal without requests near it is charged to none.
Clears do not count as removals.
"""

from collections import Counter, OrderedDict, defaultdict

from kv_protocol.codec import decode_message
from kv_protocol.decided import Decided
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import Removed, Tier
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeKnown
from kv_protocol.subjects import rank_of
from router.attribution.report import PENDING_MAX
from router.journal.replay import JournalEntry, Redecided, Replay
from router.native import built

BEFORE_S, AFTER_S = 1, 10
"""Seconds. A decision is logged up to 0.5 s after it was taken, a removal within ms: the removal may come first."""
CELLS_MAX = 1_000_000
"""Largest number of pairs of a rank and a second with removals; further removals are counted, but not charged."""
_NS_PER_S = 1_000_000_000


class Removals:
    """Removed blocks by rank and second, as far as they are not charged yet."""

    def __init__(self) -> None:
        self._cells = Counter[tuple[WorkerRank, int]]()
        self.total = 0
        """All blocks that were removed."""

    def add(self, rank: WorkerRank, second: int, blocks: int) -> None:
        """Count blocks that the rank removed."""
        self.total += blocks
        if (rank, second) in self._cells or len(self._cells) < CELLS_MAX:
            self._cells[rank, second] += blocks

    def charge(self, rank: WorkerRank, second: int, new_blocks: int) -> int:
        """Return how many removed blocks are charged to a request that came to the rank at that second."""
        left = new_blocks
        for at in range(second - BEFORE_S, second + AFTER_S + 1):
            charged = min(left, self._cells[rank, at])
            if charged:
                self._cells[rank, at] -= charged
                left -= charged
        return new_blocks - left


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


def new_blocks(placement: built.Placement, outcome: OutcomeKnown) -> int:
    """Return how many full blocks of prompt and answer the rank did not have."""
    reused = placement.predicted_tokens if outcome.cached_tokens is None else outcome.cached_tokens
    tokens = placement.isl_tokens + (outcome.output_tokens or 0)
    return max(0, tokens // placement.block_size - min(reused, placement.isl_tokens) // placement.block_size)


class JournalSavings:
    """The sums of all routers that wrote these journals, from `since_ns` (included) to `until_ns`; None: no bound."""

    def __init__(
        self,
        attribution: built.Attribution,
        since_ns: int | None = None,
        until_ns: int | None = None,
        removals: Removals | None = None,
    ) -> None:
        self.attribution = attribution
        self.not_repeated = 0
        """Decisions of the period that could not be made again: the journal lacks records before them."""
        self._removals = removals
        self._placed = OrderedDict[str, tuple[WorkerRank, int]]()
        """Rank and second of each decision without an outcome; kept only if removals are charged."""
        self._since_ns, self._until_ns = since_ns, until_ns
        self._replays = defaultdict[str, Replay](Replay)
        self.first_ns: int | None = None
        """Time of the first message of the period; None: there was none."""
        self.last_ns = 0

    def take(self, entry: JournalEntry) -> None:
        """Fold in the records of a router's next message."""
        time_ns = entry.time_ns
        is_inside = (self._since_ns is None or time_ns >= self._since_ns) and (
            self._until_ns is None or time_ns < self._until_ns
        )
        if is_inside:
            self.first_ns = time_ns if self.first_ns is None else self.first_ns
            self.last_ns = time_ns
        for record, found in self._replays[entry.router].read(entry.message):
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

    def _place(self, record: Decided, time_ns: int) -> None:
        if self._removals is not None:
            self._placed[record.request.decision_id] = record.rank, time_ns // _NS_PER_S
            if len(self._placed) > PENDING_MAX:
                self._placed.popitem(last=False)

    def _end(self, outcome: OutcomeKnown) -> None:
        placement = self.attribution.ended(outcome.decision_id, outcome.outcome == "ok", outcome.cached_tokens)
        placed = self._placed.pop(outcome.decision_id, None)
        if self._removals is not None and placement is not None and placed is not None:
            charged = self._removals.charge(*placed, new_blocks(placement, outcome))
            self.attribution.charge(placement, charged)
