"""How far the known state of a rank is trusted, and why.

    what is known of the rank                           trust      overlap                    counts for
    -------------------------------------------------   --------   ------------------------   ----------
    stream followed, no hole, digest equal, parity      EXACT      the index's                1
    any other doubt in its stream                       DEGRADED   the index's, as last known 0.5
    it reuses less than the index says                  DEGRADED   the index's                0.5
    it reuses what was not predicted                    FALLBACK   what was routed to it      1
    no stream was received, or the index has no room    FALLBACK   what was routed to it      1
    its engine publishes no KV events                   FALLBACK   what was routed to it      1
    no parity: its hashes cannot be compared            FALLBACK   what was routed to it      1

Parity: the worker registered the block size, hash scheme, canary, tokenizer, template and rule for images that prompts
are hashed with, and a source of events.

`Calibration` compares, rank by rank, the reuse that the index predicted with the reuse that workers report. A fold.

    of a rank's last 64 requests that show something          doubt             what follows
    -------------------------------------------------------   ---------------   -----------------------------------
    half or more reused less than the index says is held      overpredicted     DEGRADED: half credit
    half or more reused what nothing had predicted            underpredicted    FALLBACK: what was routed to it

A request shows something if the index predicted a block of its prompt, or the worker reused one. A difference of less
than a block is none: engines compute the last token of a cached prompt again, and reuse parts of blocks.

Only what the rank's GPU holds must be reused. What other tiers hold, and what requests in flight are about to bring,
may be. Blocks that were evicted between decision and prefill count as overpredicted: they got too much credit as well.

A new epoch of the rank's stream ends a doubt. Overpredicted ends as well once fewer than a quarter of the last requests
show it; underpredicted only after `RETRY_S`: as the index is not used meanwhile, no requests are compared with it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from kv_protocol.decision import OverlapSource, TrustState
from kv_protocol.ids import WorkerRank

TRUST_STATES: tuple[TrustState, ...] = ("EXACT", "DEGRADED", "FALLBACK")
PARITY_FIELDS = ("block_size", "hash_scheme", "canary", "tokenizer_digest", "template_digest", "images", "event_source")
_NOTHING_KNOWN = {
    "never_heard": "no KV events heard",
    "refused": "no room in the index",
    "underpredicted": "underpredicted",
    "no_events": "no events",
}
_DOUBTS = {"log_away": "event log away"}
"""Reasons of the index as explanations show them; the others are shown unchanged."""
CompareDoubt = Literal["overpredicted", "underpredicted"]
COMPARE_DOUBTS: tuple[CompareDoubt, ...] = ("overpredicted", "underpredicted")
WINDOW = 64
ENOUGH = 16
"""With fewer requests a rank is not judged."""
RETRY_S = 300.0
_MERGED_MAX = 64
_MOVES_MAX = 256


class Disparity(NamedTuple):
    """A registered field, one of `PARITY_FIELDS`, that differs from how prompts are hashed."""

    field: str
    found: str | int
    allowed: str | int

    def __str__(self) -> str:
        return f"{self.field}: found {self.found!r}, allowed {self.allowed!r}"


class Trust(NamedTuple):
    """A rank's trust state, and the reason; empty for EXACT."""

    state: TrustState
    reason: str

    @property
    def overlap_source(self) -> OverlapSource:
        """The source of the rank's overlap."""
        return "approximate" if self.state == "FALLBACK" else "index"


EXACT = Trust("EXACT", "")


def trust_of(disparities: Sequence[Disparity], stale: str) -> Trust:
    """Return the trust in a rank with these disparities, and with this doubt about its stream (empty: none)."""
    if not disparities and not stale:
        return EXACT
    unknown = "; ".join(map(str, disparities)) or _NOTHING_KNOWN.get(stale, "")
    if unknown:
        return Trust("FALLBACK", f"{unknown}; approximate")
    return Trust("DEGRADED", _DOUBTS.get(stale, stale))


_DOUBT_OF = {trust_of((), doubt).reason: doubt for doubt in ("", *_NOTHING_KNOWN, *_DOUBTS)}


def doubt_of(trust: Trust, before: str) -> str:
    """Return the doubt behind a rank's trust.

    For a rank with disparities trust does not depend on the doubt: return the doubt known `before`.
    """
    doubt = trust.reason if trust.state == "DEGRADED" else before
    return _DOUBT_OF.get(trust.reason, doubt)


class Compared(NamedTuple):
    """A request at the rank that answered it: prompt tokens that it was predicted and reported to reuse."""

    rank: WorkerRank
    epoch: int
    decision_id: str
    block_size: int
    held_tokens: int
    """The tokens that the rank's GPU holds by the index, without those that are expected to be evicted before use."""
    possible_tokens: int
    """The tokens that the rank holds on any tier, or gets by requests in flight."""
    reported_tokens: int


class Move(NamedTuple):
    """The beginning or end of a doubt, with counts of the requests that caused it."""

    rank: WorkerRank
    doubt: CompareDoubt
    is_over: bool
    requests: int
    overpredicted: int
    underpredicted: int
    newest: str
    """The last decision that was compared."""

    def evidence(self) -> dict[str, Any]:
        """Return what the requests showed, for people."""
        names = ("doubt", "requests", "overpredicted", "underpredicted")
        return {**{name: getattr(self, name) for name in names}, "newest_decision": self.newest}


class _Rank:
    """The last requests of a rank, and the doubt that they raised."""

    __slots__ = ("doubt", "epoch", "newest", "since_s", "window")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.window = deque[int](maxlen=WINDOW)
        """What each request showed: 1 overpredicted, -1 underpredicted, 0 neither."""
        self.doubt: CompareDoubt | None = None
        self.since_s = 0.0
        self.newest = ""

    def counts(self) -> tuple[int, int, int]:
        """Return how many requests there are, and how many were overpredicted and underpredicted."""
        return len(self.window), self.window.count(1), self.window.count(-1)

    def verdict(self) -> CompareDoubt | None:
        requests, high, low = self.counts()
        if requests < ENOUGH:
            return self.doubt
        if 2 * low >= requests:
            return "underpredicted"
        if 2 * high >= requests or (self.doubt == "overpredicted" and 4 * high >= requests):
            return "overpredicted"
        return None


class Calibration:
    """The comparisons of all ranks. `now_s` never decreases."""

    def __init__(self) -> None:
        self._ranks: dict[WorkerRank, _Rank] = {}
        self.doubts_of = lru_cache(_MERGED_MAX)(self._doubts_of)
        """Returns each rank's doubt: the index's, else the calibration's; the same object while nothing changes."""
        self.evidence: dict[WorkerRank, Move] = {}
        """The move that began the doubt of each rank in doubt."""
        self.moves = deque[Move](maxlen=_MOVES_MAX)
        """The newest doubts that began or ended; `FleetWatch` takes them out and logs them."""
        self.begun_total: dict[CompareDoubt, int] = dict.fromkeys(COMPARE_DOUBTS, 0)

    def apply(self, compared: Compared, now_s: float) -> None:
        """Fold a request in."""
        known = self._ranks.get(compared.rank)
        if known is None or known.epoch != compared.epoch:
            if known is not None:
                self._set(compared.rank, known, None, now_s)
            known = self._ranks[compared.rank] = _Rank(compared.epoch)
        if max(compared.possible_tokens, compared.reported_tokens) >= compared.block_size:
            known.newest = compared.decision_id
            known.window.append(_error(compared))
            self._set(compared.rank, known, known.verdict(), now_s)

    def rows(self) -> list[dict[str, Any]]:
        """Return for people, rank by rank, how many requests were compared, and the doubt (empty: none)."""
        return [
            {
                **rank._asdict(),
                **dict(zip(("requests", "overpredicted", "underpredicted"), known.counts(), strict=True)),
                "doubt": known.doubt or "",
                "newest": known.newest,
            }
            for rank, known in self._ranks.items()
        ]

    def tick(self, now_s: float, ranks: Iterable[WorkerRank]) -> None:
        """Forget ranks that are not in `ranks`; end `underpredicted` after `RETRY_S`."""
        for rank in self._ranks.keys() - ranks:
            del self._ranks[rank]
            if self.evidence.pop(rank, None) is not None:
                self.doubts_of.cache_clear()
        for rank, known in self._ranks.items():
            if known.doubt == "underpredicted" and now_s - known.since_s >= RETRY_S:
                self._set(rank, known, None, now_s)

    def _doubts_of(self, ranks: tuple[WorkerRank, ...], of_index: tuple[str, ...]) -> tuple[str, ...]:
        own = {rank: move.doubt for rank, move in self.evidence.items()}
        return tuple([doubt or own.get(rank, "") for rank, doubt in zip(ranks, of_index, strict=True)])

    def _set(self, rank: WorkerRank, known: _Rank, doubt: CompareDoubt | None, now_s: float) -> None:
        before = known.doubt
        if doubt == before:
            return
        counts, newest = known.counts(), known.newest
        self.moves += [
            Move(rank, each, each == before, *counts, newest) for each in (before, doubt) if each is not None
        ]
        known.doubt, known.since_s = doubt, now_s
        self.doubts_of.cache_clear()
        if doubt is None:
            del self.evidence[rank]
        else:
            self.evidence[rank] = self.moves[-1]
            self.begun_total[doubt] += 1
        if before == "underpredicted" or doubt == "underpredicted":
            known.window.clear()  # predictions have another source from now on


def _error(compared: Compared) -> int:
    if compared.held_tokens - compared.reported_tokens >= compared.block_size:
        return 1
    return -1 if compared.reported_tokens - compared.possible_tokens >= compared.block_size else 0
