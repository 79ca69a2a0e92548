"""The result of a decision, and its journal record.

A record has every cost term of eight candidates at most: the winner, then the cheapest of the others, cheapest first,
the first among equals. Of the other candidates it has only the cost. Format: `kv_protocol/decided.py`.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kv_protocol.decided import (
    TERMS,
    TIERS,
    WIDE,
    Decided,
    RouteRequest,
    promise,
)
from kv_protocol.decision import CostTerms
from kv_protocol.journal import encode_record
from kv_protocol.ledger import Routed
from router.decision.policy import Policy
from tests.reference.policies import Choice
from tests.reference.time_cost import predicted_s
from tests.reference.view import Row, View

BEST_MAX = 8
U16_MAX = 0xFFFF


class Verdict(NamedTuple):
    """A decision. `places` are the candidates' indices in `view`; `choice` has indices of candidates."""

    request: RouteRequest
    policy: Policy
    reason: str
    seed: int
    view: View
    """All ranks at the time of the decision."""
    places: Sequence[int]
    choice: Choice

    @property
    def winner(self) -> Row:
        """The rank that takes the request."""
        return self.view.rows[self.places[self.choice.winner]]

    @property
    def promise(self) -> Routed:
        """The lease: the request's blocks, and the tokens not expected to be cached."""
        request, uncached_tokens = self.request, self.request.isl_tokens
        if uncached_tokens:
            uncached_tokens -= min(self.winner.expected, request.reusable_blocks) * request.block_size
        return promise(request, self.winner.rank, uncached_tokens, self.winner.epoch)

    def record(self, kv_seq: int) -> bytes:
        """Return the journal's record; `kv_seq` is how far the index had read its events."""
        choice, winner, terms = self.choice, self.winner, self.choice.terms
        ttft_s = itl_s = None
        if terms is not None and self.view.output_tokens is not None:
            ttft_s, itl_s = predicted_s(winner, terms[choice.winner], self.request, self.view.output_tokens)
        best = [] if terms is None else _best(terms, choice.winner)
        others = [at for at in range(len(self.places)) if at not in best]
        record = Decided(
            now_s=self.view.now_s,
            request=self.request,
            policy=self.policy.mode,
            seed=self.seed,
            kv_seq=kv_seq,
            turn=self.view.turn,
            ranks=len(self.view.rows),
            winner=self.places[choice.winner],
            worker_id=winner.rank.worker_id,
            dp_rank=winner.rank.dp_rank,
            runner_up=None if choice.runner_up is None else self.places[choice.runner_up],
            margin=choice.margin,
            reason=self.reason,
            uncached_tokens=self.promise.uncached_tokens,
            epoch=winner.epoch,
            action="admit" if choice.meets_targets else self.policy.unmet,
            ttft_s=ttft_s,
            itl_s=itl_s,
            best=struct.pack(f"<{len(best)}H", *(self.places[at] for at in best)),
            terms=b"" if terms is None else _packed_terms([terms[at] for at in best]),
            costs=b"" if terms is None else struct.pack(f"<{len(others)}f", *(terms[at].cost for at in others)),
            overlap=b"" if self.view.is_blank else packed_overlap([row.depths for row in self.view.rows]),
        )
        return encode_record(record)


def packed_mask(mask: int) -> bytes:
    """Return the bytes of a mask of terms: 7 bits each, lowest first; bit 7 is set in all but the last."""
    return bytes((mask,)) if mask < 0x80 else bytes((mask & 0x7F | 0x80,)) + packed_mask(mask >> 7)


def _best(terms: list[CostTerms], winner: int) -> list[int]:
    cheapest = sorted(range(len(terms)), key=lambda at: terms[at].cost)
    return [winner, *(at for at in cheapest if at != winner)][:BEST_MAX]


def _packed_terms(best: list[CostTerms]) -> bytes:
    """Return the columns of terms that are not their default for all of them, behind the mask that names them."""
    mask, columns = 0, b""
    for at, (name, default) in enumerate(zip(TERMS, CostTerms.__struct_defaults__, strict=True)):
        column = struct.pack(f"<{len(best)}d", *(getattr(each, name) for each in best))
        if column != struct.pack("<d", default) * len(best):
            mask, columns = mask | 1 << at, columns + column
    return packed_mask(mask) + columns


def packed_overlap(depths: list[tuple[int, ...]]) -> bytes:
    """Return the depths of all ranks: of each tier that adds some, which ranks have more, and how much more."""
    deepest = max(each[-1] for each in depths)
    if not deepest:
        return b""
    flags, parts = WIDE if deepest > U16_MAX else 0, b""
    for tier in range(TIERS):
        more = [each[tier] - (each[tier - 1] if tier else 0) for each in depths]
        if any(more):
            flags |= 1 << tier
            holders = sum(1 << at for at, blocks in enumerate(more) if blocks)
            parts += holders.to_bytes((len(more) + 7) // 8, "little")
            parts += struct.pack(f"<{sum(map(bool, more))}{'I' if flags & WIDE else 'H'}", *filter(None, more))
    return bytes((flags,)) + parts
