"""Load reports of ranks' engines, for decisions, dashboards and planners. JSON on core NATS.

A report describes the newest iteration. The report of an idle engine has 0 requests, and the last known blocks.
"""

from typing import Annotated

import msgspec

from kv_protocol.errors import decoder_of
from kv_protocol.fleet import Instance

COUNT_MAX = (1 << 53) - 1
"""Bound on a report's counts: every JSON reader holds such integers exactly, and sums fit 64 bits."""
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]


class PhaseLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One iteration by phase, in requests, tokens computed, and tokens with KV in the cache; None: not reported.

    Each phase has what the iteration computed, and what is queued; `paused_`: preempted requests of either phase.
    Source: TensorRT-LLM's `inflightBatchingStats`, `docs/SOURCES.md` E1.7.
    """

    context_requests: Count | None = None
    context_tokens: Count | None = None
    context_kv_tokens: Count | None = None
    generation_requests: Count | None = None
    generation_kv_tokens: Count | None = None
    queued_context_requests: Count | None = None
    queued_context_tokens: Count | None = None
    queued_generation_requests: Count | None = None
    queued_generation_kv_tokens: Count | None = None
    paused_requests: Count | None = None
    paused_kv_tokens: Count | None = None


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest iteration's figures: requests, KV blocks, and tokens of the context (prefill) phase.

    `phases` is None if the engine does not report them.
    """

    instance: Instance
    iteration: Count
    running_requests: Count
    waiting_requests: Count
    used_blocks: Count
    total_blocks: Count
    context_tokens: Count = 0
    iteration_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    phases: PhaseLoad | None = None


encode_load = msgspec.json.Encoder().encode
decode_load = decoder_of("load report", msgspec.json.Decoder(LoadReport).decode)
