"""The newest decisions, as rows of lists and streams, and what they say of the tree's prefixes.

    row                  what was chosen and what came of it, without the other candidates
    heat of a request    2 ** -(its age / `HALF_LIFE_S`), at the last block of its prompt
    use of a node        models and tenants of the newest decisions whose prompts have the node's first block

A request that was routed in a mode without overlap has no blocks, and does not count.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from indexer.embedded import NodeUse, OutlineNode, PassedRequest
from kv_protocol.codec import pack_u64
from kv_protocol.journal import OutcomeKnown
from router.decision.kept_prompts import KeptPrompts
from router.decision.report import Misses, misses
from router.decision.routing import Lease, Routing

REQUESTS_MAX = 8192
HALF_LIFE_S = 60.0
USED_MAX = 1000
"""Newest decisions that uses are of."""
NAMES_MAX = 8
EXCERPT_TOKENS = 64
_HASH_BYTES = 8
SCANNED_MAX = 10_000
"""Decisions that are looked at for one question, the newest."""
OPEN = "open"
"""In place of an outcome: the request has none yet."""


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One decision. `at_s` is Unix time by the clock of now."""

    age_s: float
    at_s: float
    decision_id: str
    request_id: str
    model: str
    phase: str
    worker_id: str
    dp_rank: int
    policy: str
    reason: str
    isl_tokens: int
    overlap_blocks: int
    overlap_source: str
    predicted_blocks: int
    trust: str
    margin: float | None
    cost_unit: str
    outcome: dict[str, object] | None
    misses: Misses


class DecisionFilter(NamedTuple):
    """Which decisions are asked for; empty: any. None is later than `until_s`, in the router's time."""

    worker_id: str = ""
    model: str = ""
    outcome: str = ""
    until_s: float | None = None

    def takes(self, record: Lease) -> bool:
        """Return whether the decision is asked for."""
        verdict, known = record.verdict, record.outcome
        outcome = OPEN if known is None else known.outcome
        return (
            self.worker_id in ("", verdict.winner.worker_id)
            and self.model in ("", verdict.request.model)
            and self.outcome in ("", outcome)
            and (self.until_s is None or verdict.now_s <= self.until_s)
        )


def rows(routing: Routing, wanted: DecisionFilter, limit: int) -> list[DecisionRow]:
    """Return the newest decisions that are asked for, newest first; no more than `SCANNED_MAX` are looked at."""
    now_s, wall_s = routing.clock.now(), routing.clock.wall_ns() / 1e9
    newest = routing.decisions.newest(SCANNED_MAX)
    begun_s = {each.verdict.request.request_id: each.verdict.now_s for each in newest}
    taken = islice(filter(wanted.takes, newest), limit)
    return [decision_row(each, begun_s[each.verdict.request.request_id], now_s, wall_s) for each in taken]


def decision_row(record: Lease, begun_s: float, now_s: float, wall_s: float) -> DecisionRow:
    """Return one decision as a row."""
    decision, outcome, age_s = record.verdict.brief(), record.outcome, now_s - record.verdict.now_s
    chosen = decision.chosen
    return DecisionRow(
        age_s=round(age_s, 6),
        at_s=round(wall_s - age_s, 3),
        decision_id=decision.decision_id,
        request_id=decision.request_id,
        model=decision.model,
        phase=decision.phase,
        worker_id=chosen.worker_id,
        dp_rank=chosen.dp_rank,
        policy=decision.policy,
        reason=decision.reason,
        isl_tokens=decision.isl_tokens,
        overlap_blocks=chosen.overlap_blocks[0],
        overlap_source=chosen.overlap_source,
        predicted_blocks=chosen.predicted_blocks,
        trust=chosen.trust,
        margin=decision.margin,
        cost_unit=decision.cost_unit,
        outcome=outcome_fields(outcome),
        misses=misses(decision, outcome, begun_s),
    )


def outcome_fields(outcome: OutcomeKnown | None) -> dict[str, object] | None:
    """Return the outcome of a decision by name: the journal's form has no names."""
    return None if outcome is None else msgspec.structs.asdict(outcome)


def warmth(ends: Sequence[tuple[int, float]], now_s: float) -> list[PassedRequest]:
    """Return the newest `REQUESTS_MAX` requests with their heat at this time."""
    newest = sorted(ends, key=lambda each: each[1])[-REQUESTS_MAX:]
    return [PassedRequest(block, 2.0 ** (-max(0.0, now_s - at_s) / HALF_LIFE_S), at_s) for block, at_s in newest]


def uses(nodes: Sequence[OutlineNode], records: Iterable[Lease], kept: KeptPrompts | None = None) -> list[NodeUse]:
    """Return the use of each node, with text where prompts are kept; at most `NAMES_MAX` models and tenants each."""
    found = [NodeUse([], []) for _ in nodes]
    places = {node.depth_blocks - node.blocks for node in nodes}
    by_block = {(node.depth_blocks - node.blocks, pack_u64([node.first])): at for at, node in enumerate(nodes)}
    for request in (record.verdict.request for record in records):
        hashes = request.sequence_hashes
        for place in places:
            at = by_block.get((place, hashes[place * _HASH_BYTES : (place + 1) * _HASH_BYTES]))
            if at is None:
                continue
            use = found[at]
            _name(use.models, request.model)
            _name(use.tenants, request.tenant)
            if kept is not None and use.text is None:
                tokens = min(nodes[at].blocks * request.block_size, EXCERPT_TOKENS)
                use.text = kept.excerpt(request.request_id, hashes, place * request.block_size, tokens)
    return found


def _name(names: list[str], name: str) -> None:
    if name and name not in names and len(names) < NAMES_MAX:
        names.append(name)
