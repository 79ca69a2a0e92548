"""How far the known state of a rank is trusted, and why.

    what is known of it                                 trust      overlap                    counts for
    -------------------------------------------------   --------   ------------------------   ----------
    stream followed, no hole, digest equal, parity      EXACT      the index's                1
    any other doubt in its stream                       DEGRADED   the index's, as last known 0.5
    it reuses less than the index says (calibration.py) DEGRADED   the index's                0.5
    it reuses what was not predicted                    FALLBACK   what was routed to it      1
    no stream was received, or the index has no room    FALLBACK   what was routed to it      1
    its engine publishes no KV events                   FALLBACK   what was routed to it      1
    no parity: its hashes cannot be compared            FALLBACK   what was routed to it      1

Parity: the worker registered the block size, hash scheme, canary, tokenizer, template and rule for images that prompts
are hashed with, and a source of events.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kv_protocol.decision import OverlapSource, TrustState

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
