"""What a rank's engine says of its load, as far as a decision or a dashboard reads it. JSON on core NATS."""

import msgspec

from kv_protocol.errors import UNDECODABLE, MalformedMessage
from kv_protocol.ids import checked_u64


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest iteration's figures: requests, KV blocks, and tokens of the context (prefill) phase."""

    instance: str
    iteration: int
    running_requests: int
    waiting_requests: int
    used_blocks: int
    total_blocks: int
    context_tokens: int = 0
    iteration_s: float = 0.0

    def __post_init__(self) -> None:
        for field in (
            "iteration", "running_requests", "waiting_requests", "used_blocks", "total_blocks", "context_tokens",
        ):  # fmt: skip
            checked_u64(field, getattr(self, field))


_decoder = msgspec.json.Decoder(LoadReport)
encode_load = msgspec.json.Encoder().encode


def decode_load(data: bytes) -> LoadReport:
    """Return the report in `data`; raise `MalformedMessage`, which names the field, for anything else."""
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"load report: {error}") from error
