"""What a rank's engine says of its load, as far as a decision, a dashboard or a planner reads it. JSON on core NATS.

A report is of the newest iteration, or, while the engine has nothing to do, of its rest: no requests, the blocks that
it held last.
"""

import msgspec

from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.fleet import checked_instance
from kv_protocol.ids import checked_u64

COUNT_MAX = (1 << 53) - 1
"""Requests, blocks and tokens of a report: every JSON reader takes it for a whole number, and sums fit 64 bits."""


class PhaseLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One iteration by phase, in requests, tokens computed, and tokens whose KV is there; None: the engine says not.

    What the iteration computed, context and generation; what waits to be computed, likewise; and what was begun and
    had to give way. Source: TensorRT-LLM's `inflightBatchingStats`, `docs/SOURCES.md` E1.7.
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
                checked_u64(field, value)


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest iteration's figures: requests, KV blocks, and tokens of the context (prefill) phase.

    `phases` is there where the engine tells them apart.
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
            if not 0 <= (value := getattr(self, field)) <= COUNT_MAX:
                raise LimitExceeded(field, value, f"0..{COUNT_MAX}")


_decoder = msgspec.json.Decoder(LoadReport)
encode_load = msgspec.json.Encoder().encode


def decode_load(data: bytes) -> LoadReport:
    """Return the report in `data`; raise `MalformedMessage`, which names the field, for anything else."""
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"load report: {error}") from error
