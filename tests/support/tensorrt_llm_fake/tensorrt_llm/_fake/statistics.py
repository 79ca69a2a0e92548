"""Iteration statistics: one row for each iteration that had work, or one for each attention-DP rank.

Queue and completion counts stand on rank 0 alone; `kvCacheStats` and `specDecodingStats` are rank 0's on every row; ids
and drops as they come.
Source: `executor/iteration_stats.py` @ b1179014 (field names and defaults); `docs/SOURCES.md` E1.7.
"""

from dataclasses import dataclass
from typing import Any

from .control import control

Json = dict[str, Any]
QUEUED = ("numQueuedContextRequests", "numQueuedCtxTokens", "numQueuedGenRequests", "numQueuedGenKvTokens")
COUNTED_ONCE = (
    "numQueuedRequests", "numCompletedRequests", "numNewActiveRequests", "newActiveRequestsQueueLatencyMS",
)  # fmt: skip


@dataclass
class RankLoad:
    """What one rank did in an iteration."""

    context_requests: int = 0
    context_tokens: int = 0
    context_kv_tokens: int = 0
    generation_requests: int = 0
    generation_kv_tokens: int = 0


@dataclass
class Iteration:
    """What the engine did in an iteration, in requests, tokens and blocks."""

    number: int
    new: int
    active: int
    queued: int
    queued_tokens: int
    completed: int
    max_active: int
    kv_cache: Json
    ranks: list[RankLoad]
    draft_len: int
    """Tokens drafted for each request that generates; 0: no speculative decoding."""


def rows(iteration: Iteration, sequence: int, dropped: int, *, attention_dp: bool) -> list[Json]:
    """Return the iteration's rows."""
    made = []
    for rank, load in enumerate(iteration.ranks):
        row = _row(iteration, sequence, dropped)
        row["attentionDpRank"] = rank
        row["inflightBatchingStats"] = _batching(iteration, load)
        if attention_dp and rank:
            row |= dict.fromkeys(COUNTED_ONCE, 0)
            row["inflightBatchingStats"] |= dict.fromkeys(QUEUED, 0)
        made.append(row)
    return made


def _row(iteration: Iteration, sequence: int, dropped: int) -> Json:
    wall_ms = control.model.iteration_ms
    return {
        "timestamp": f"01-01-2026 00:00:{iteration.number * wall_ms / 1000 % 60:09.6f}",
        "iter": iteration.number,
        "iterLatencyMS": wall_ms,
        "newActiveRequestsQueueLatencyMS": 0.0,
        "numNewActiveRequests": iteration.new,
        "numActiveRequests": iteration.active,
        "numQueuedRequests": iteration.queued,
        "numCompletedRequests": iteration.completed,
        "maxNumActiveRequests": iteration.max_active,
        "maxBatchSizeStatic": 0,
        "maxBatchSizeTunerRecommended": 0,
        "maxBatchSizeRuntime": 0,
        "maxNumTokensStatic": 0,
        "maxNumTokensTunerRecommended": 0,
        "maxNumTokensRuntime": 0,
        "gpuMemUsage": 0,
        "cpuMemUsage": 0,
        "pinnedMemUsage": 0,
        "kvCacheStats": dict(iteration.kv_cache),
        "staticBatchingStats": dict.fromkeys(
            ("numScheduledRequests", "numContextRequests", "numCtxTokens", "numGenTokens", "emptyGenSlots"), 0
        ),
        "inflightBatchingStats": {},
        "specDecodingStats": _drafts(iteration),
        "schedulerMode": "overlap",
        "statsSequence": sequence,
        "statsDroppedFrames": dropped,
        "hostStepTimeMS": wall_ms,
    }


def _drafts(iteration: Iteration) -> Json | None:
    requests = iteration.ranks[0].generation_requests
    if not iteration.draft_len:
        return None
    return {
        "numDraftTokens": requests * iteration.draft_len,
        "numAcceptedTokens": 0,
        "numRequestsWithDraftTokens": requests,
        "acceptanceLength": 1.0 if requests else 0.0,
        "iterLatencyMS": 0.0,
        "draftOverhead": 0.0,
    }


def _batching(iteration: Iteration, load: RankLoad) -> Json:
    return {
        "numScheduledRequests": load.context_requests + load.generation_requests,
        "numContextRequests": load.context_requests,
        "numGenRequests": load.generation_requests,
        "numPausedRequests": 0,
        "numCtxTokens": load.context_tokens,
        "microBatchId": 0,
        "avgNumDecodedTokensPerIter": 1.0 if load.generation_requests else 0.0,
        "numCtxKvTokens": load.context_kv_tokens,
        "numGenKvTokens": load.generation_kv_tokens,
        "numQueuedContextRequests": iteration.queued,
        "numQueuedCtxTokens": iteration.queued_tokens,
        "numQueuedGenRequests": 0,
        "numQueuedGenKvTokens": 0,
        "numPausedKvTokens": 0,
    }
