"""Load reports of ranks' engines, for decisions, dashboards and planners. JSON on core NATS.

A report describes the newest iteration. While the engine is idle: no requests, and the last known blocks.
"""

import msgspec

from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.fleet import checked_instance
from kv_protocol.ids import checked_u64

COUNT_MAX = (1 << 53) - 1
"""Bound on a report's counts: every JSON reader holds such integers exactly, and sums fit 64 bits."""


class PhaseLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One iteration by phase, in requests, tokens computed, and tokens with KV in the cache; None: not reported.

    By phase: computed in the iteration, and queued; `paused_`: preempted requests of either phase.
    Source: TensorRT-LLM's `inflightBatchingStats`, `docs/SOURCES.md` E1.7.
    """

    context_requests: int | None = None
    context_tokens: int | None = None
    context_kv_tokens: int | None = None
    generation_requests: int | None = None
    generation_kv_tokens: int | None = None
    queued_context_requests: int | None = None
    queued_context_tokens: int | None = None
    queued_generation_requests: int | None = None
    queued_generation_kv_tokens: int | None = None
    paused_requests: int | None = None
    paused_kv_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if (value := getattr(self, field)) is not None:
                _check_count(field, value)


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest iteration's figures: requests, KV blocks, and tokens of the context (prefill) phase.

    `phases` is None if the engine does not report them.
    """

    instance: str
    iteration: int
    running_requests: int
    waiting_requests: int
    used_blocks: int
    total_blocks: int
    context_tokens: int = 0
    iteration_s: float = 0.0
    phases: PhaseLoad | None = None

    def __post_init__(self) -> None:
        checked_instance(self.instance)
        checked_u64("iteration", self.iteration)
        for field in ("running_requests", "waiting_requests", "used_blocks", "total_blocks", "context_tokens"):
            _check_count(field, getattr(self, field))
        if not self.iteration_s >= 0:
            raise LimitExceeded("iteration_s", self.iteration_s, "0 or more")


def _check_count(field: str, value: int) -> None:
    if not 0 <= value <= COUNT_MAX:
        raise LimitExceeded(field, value, f"0..{COUNT_MAX}")


_decoder = msgspec.json.Decoder(LoadReport)
encode_load = msgspec.json.Encoder().encode


def decode_load(data: bytes) -> LoadReport:
    """Return the report in `data`; raise `MalformedMessage`, which names the field, for anything else."""
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"load report: {error}") from error
