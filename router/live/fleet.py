"""What people are shown: the fleet as columns, its decisions as rows. All functions are pure.

A thousand ranks are some tens of kilobytes of JSON.

workers    columns with an entry for each worker; `first_rank` is the index of its first rank in the columns of `ranks`
ranks      columns with an entry for each rank, worker by worker
texts      are in lists, and columns have indexes into these: `trust_reason` and `unfit` (why a worker or rank
           gets no new work) into `reasons`, `model` into `models`, `role` into `roles`

    row of a decision    the chosen rank and the outcome, without the other candidates
    heat of a request    2 ** -(its age / `HALF_LIFE_S`), at the last block of its prompt
    use of a node        models and tenants of the newest decisions that have the node's first block in their prompts

A request that was routed in a mode without overlap has no blocks, and does not count.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice
from math import inf
from statistics import median
from typing import Any, NamedTuple

import msgspec

from indexer.embedded import NodeUse, OutlineNode, PassedRequest
from kv_protocol.codec import pack_u64
from kv_protocol.events import TIERS
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeKnown
from router.decision.report import misses
from router.decision.routing import Lease, Routing
from router.decision.state import RankLoad
from router.fleet.trust import TRUST_STATES, Trust, trust_of
from router.prompt.chains import KeptPrompts

OBSERVED_MAX = 1000
"""How many of the newest decisions `observed` is given."""
_IDLE = RankLoad()
_UNHEARD = trust_of((), "never_heard")
_LOAD = (
    ("active_requests", "active_requests"),
    ("active_blocks", "active_blocks"),
    ("queued_tokens", "prefill_tokens_queued"),
    ("reported_running", "reported_running"),
    ("reported_waiting", "reported_waiting"),
    ("reported_used_blocks", "reported_used_blocks"),
)
REQUESTS_MAX = 8192
HALF_LIFE_S = 60.0
USED_MAX = 1000
"""`uses` gets this many of the newest decisions."""
NAMES_MAX = 8
EXCERPT_TOKENS = 64
_HASH_BYTES = 8
SCANNED_MAX = 10_000
"""How many of the newest decisions are searched for one list."""
OPEN = "open"
"""Stands for the outcome of a request that has none yet."""
_OF_DECISION = (
    "decision_id", "request_id", "model", "phase", "policy", "reason", "isl_tokens", "margin", "cost_unit"
)  # fmt: skip
_OF_CHOSEN = ("worker_id", "dp_rank", "overlap_source", "predicted_blocks", "trust")
"""The fields of a row that come from the decision, and those from its chosen rank."""


class Observed(NamedTuple):
    """What a rank's newest decisions showed: the share of prompt tokens reused, and median latencies; None: unknown."""

    hit_ratio: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None


class _Words(dict[str, int]):
    """The number of each text: texts are numbered from 0, in the order of their first use."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


def fleet_columns(
    routing: Routing,
    blocks: Mapping[WorkerRank, tuple[int, ...]],
    trust: Mapping[WorkerRank, Trust],
    seen: Mapping[WorkerRank, Observed],
    queued: int | None,
) -> dict[str, Any]:
    """Return the fleet now. `blocks` counts the blocks that the index knows of each rank, by tier.

    `blocks`, `trust` and `seen` may be older: a rank that joined since has no blocks, and counts as never heard.
    """
    state, fleet, now_s = routing.state, routing.state.fleet, routing.clock.now()
    workers = list(fleet.workers())
    registrations = [worker.registration for worker in workers]
    ranks = [rank for each in registrations for rank in each.ranks]
    models, roles, reasons = _Words(), _Words(), _Words({"": 0})
    loads, attempts, factors = state.loads(), dict(state.core.attempts()), state.rate_factors()
    held, unknown, unseen = (0,) * len(TIERS), (None, None), Observed()
    return {
        "at_s": round(routing.clock.wall_ns() / 1e9, 3),
        "requests": {
            "in_flight": sum(load.active_requests for load in loads.values()),
            "decided_total": state.core.attempts_total,
            "queued": queued,
        },
        "log_connected": fleet.is_log_connected,
        "policy": state.policy.mode,
        "workers": {
            "worker_id": [each.worker_id for each in registrations],
            "model": [models[each.model] for each in registrations],
            "role": [roles[each.role] for each in registrations],
            "draining": [worker.draining for worker in workers],
            "unfit": [reasons[fleet.unfit(worker, now_s)] for worker in workers],
            "block_size": [each.block_size for each in registrations],
            "total_blocks": [each.total_kv_blocks for each in registrations],
            "first_rank": [*accumulate((len(each.dp_ranks) for each in registrations), initial=0)][:-1],
        },
        "ranks": {
            "worker": [at for at, each in enumerate(registrations) for _ in each.ranks],
            "dp_rank": [rank.dp_rank for rank in ranks],
            "trust": [TRUST_STATES.index(trust.get(rank, _UNHEARD).state) for rank in ranks],
            "trust_reason": [reasons[trust.get(rank, _UNHEARD).reason] for rank in ranks],
            "unfit": [reasons[state.breakers.unfit(rank, now_s)] for rank in ranks],
            **{name: [getattr(loads.get(rank, _IDLE), field) for rank in ranks] for name, field in _LOAD},
            **{f"{tier.name.lower()}_blocks": [blocks.get(rank, held)[tier] for rank in ranks] for tier in TIERS},
            "prefill_factor": [factors.get(rank, unknown)[0] for rank in ranks],
            "decode_factor": [factors.get(rank, unknown)[1] for rank in ranks],
            "decided_total": [attempts.get(rank, 0) for rank in ranks],
            **{field: [getattr(seen.get(rank, unseen), field) for rank in ranks] for field in Observed._fields},
        },
        "models": list(models),
        "roles": list(roles),
        "reasons": list(reasons),
    }


def observed(records: Iterable[Lease]) -> dict[WorkerRank, Observed]:
    """Return what these decisions showed of their ranks. Without a reported reuse the predicted overlap counts."""
    by_rank: dict[WorkerRank, list[Lease]] = defaultdict(list)
    for record in records:
        by_rank[record.verdict.winner].append(record)
    return {rank: _observed(found) for rank, found in by_rank.items()}


def _observed(records: list[Lease]) -> Observed:
    tokens = sum(record.verdict.request.isl_tokens for record in records)
    ttfts = [each.ttft_s for each in records if each.ttft_s is not None]
    itls = [each.itl_s for each in records if each.itl_s is not None]
    return Observed(
        hit_ratio=round(sum(map(_reused, records)) / tokens, 4) if tokens else None,
        ttft_s=round(median(ttfts), 6) if ttfts else None,
        itl_s=round(median(itls), 6) if itls else None,
    )


def _reused(record: Lease) -> int:
    request, outcome = record.verdict.request, record.outcome
    reported = None if outcome is None else outcome.cached_tokens
    reused = record.verdict.overlap_blocks * request.block_size if reported is None else reported
    return min(reused, request.isl_tokens)  # `isl_tokens` may be a lower bound


def listed(routing: Routing, wanted: Mapping[str, str], limit: int, at_s: float | None) -> dict[str, Any]:
    """Return the newest decisions until `at_s` as rows, newest first, and the time of the eldest that is kept.

    `wanted` may have a `worker`, a `model` and an `outcome`. No more than `SCANNED_MAX` decisions are looked at. Times
    are Unix time: the present wall time less the decision's age.
    """
    now_s, wall_s = routing.clock.now(), routing.clock.wall_ns() / 1e9
    until_s = inf if at_s is None else now_s - (wall_s - at_s)
    worker_id, model, outcome = (wanted.get(field, "") for field in ("worker", "model", "outcome"))

    def is_wanted(record: Lease) -> bool:
        verdict, known = record.verdict, record.outcome
        return (
            worker_id in ("", verdict.winner.worker_id)
            and model in ("", verdict.request.model)
            and outcome in ("", OPEN if known is None else known.outcome)
            and verdict.now_s <= until_s
        )

    newest = routing.decisions.newest(SCANNED_MAX)
    begun_s = {each.verdict.request.request_id: each.verdict.now_s for each in newest}
    rows = []
    for record in islice(filter(is_wanted, newest), limit):
        decision, known, age_s = record.verdict.brief(), record.outcome, now_s - record.verdict.now_s
        row = {
            "age_s": round(age_s, 6),
            "at_s": round(wall_s - age_s, 3),
            **{name: getattr(decision, name) for name in _OF_DECISION},
            **{name: getattr(decision.chosen, name) for name in _OF_CHOSEN},
            "overlap_blocks": decision.chosen.overlap_blocks[0],
            "outcome": outcome_fields(known),
            "misses": misses(decision, known, begun_s[decision.request_id]),
        }
        rows.append(row)
    oldest = routing.decisions.oldest
    from_s = None if oldest is None else round(wall_s - (now_s - oldest.verdict.now_s), 3)
    return {"decisions": rows, "from_s": from_s}


def outcome_fields(outcome: OutcomeKnown | None) -> dict[str, object] | None:
    """Return the outcome of a decision by name: the journal's form has no names."""
    return None if outcome is None else msgspec.structs.asdict(outcome)


def warmth(ends: Sequence[tuple[int, float]], now_s: float) -> list[PassedRequest]:
    """Return the newest `REQUESTS_MAX` of `ends` (last block and time of a request), with their heat at this time."""
    newest = sorted(ends, key=lambda each: each[1])[-REQUESTS_MAX:]
    return [PassedRequest(block, 2.0 ** (-max(0.0, now_s - at_s) / HALF_LIFE_S), at_s) for block, at_s in newest]


def uses(nodes: Sequence[OutlineNode], records: Iterable[Lease], kept: KeptPrompts | None = None) -> list[NodeUse]:
    """Return the use of each node, with text if prompts are kept; at most `NAMES_MAX` models and tenants each."""
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
                use.text = kept.excerpt(request.decision_id, place * request.block_size, tokens)
    return found


def _name(names: list[str], name: str) -> None:
    if name and name not in names and len(names) < NAMES_MAX:
        names.append(name)
