"""Decides where a prompt is computed: by a prefill worker, or by the worker that decodes it.

    conditional     the decode worker computes the prompt itself if
    off             never, as long as there are prefill workers
    isl_bounding    it lacks few of the tokens: effective < `effective_isl_tokens`
                    and effective / ISL < `effective_isl_ratio`
    prefill_load    every prefill rank has more queued than `prefill_busy` x max_num_batched_tokens
    isl_or_load     one of the two applies

    effective = ISL - tokens of the prompt that the decode rank holds; the decode rank is the one that would be chosen
    to compute and decode all of it. A rank that uses more than `decode_busy` of its blocks computes no prompts,
    whatever the policy.

Source: `docs/SOURCES.md` D4.4.
"""

from typing import Literal, NamedTuple, get_args

import msgspec

from kv_protocol.decided import RequestPhase
from kv_protocol.openai.requests import RequestInvalid
from router.decision.eligibility import BATCHED_TOKENS_DEFAULT
from router.decision.verdict import Verdict

ConditionalPolicy = Literal["off", "isl_bounding", "prefill_load", "isl_or_load"]


_FIELD = "disaggregated_params"
_PHASE_OF: dict[str, RequestPhase] = {
    "context_only": "prefill",
    "generation_only": "decode",
    "context_and_generation": "alone",
}
PlacementReason = Literal["short", "prefill_busy", "decode_busy", "long"]
PLACEMENT_REASONS: tuple[PlacementReason, ...] = get_args(PlacementReason)


class _DisaggregatedParams(msgspec.Struct, frozen=True):
    request_type: Literal["context_only", "generation_only", "context_and_generation"]


class ConditionalLimits(NamedTuple):
    """The policy and its bounds; None: no bound."""

    policy: ConditionalPolicy = "off"
    effective_isl_tokens: int = 2048
    effective_isl_ratio: float = 0.7
    prefill_busy: float | None = None
    decode_busy: float | None = None


class Placement(NamedTuple):
    """Whether the decode worker computes the prompt, and the figures behind it."""

    is_local: bool
    reason: PlacementReason
    effective_tokens: int
    isl_tokens: int
    prefill_load: float
    """Smallest queued tokens / max_num_batched_tokens of a prefill rank that takes work; inf: there is none."""
    decode_load: float
    """The share of its blocks that the decode rank uses; 0 if its block count is not stated."""


def placement(verdict: Verdict, limits: ConditionalLimits) -> Placement:
    """Return where the prompt is computed. `verdict` is the decision for a rank that computes and decodes all."""
    request = verdict.request
    held_tokens = min(verdict.expected_blocks, request.reusable_blocks) * request.block_size
    effective = request.isl_tokens - held_tokens
    prefill_load, decode_load = _prefill_load(verdict), _decode_load(verdict)

    def placed(reason: PlacementReason) -> Placement:
        is_local = reason in ("short", "prefill_busy")
        return Placement(is_local, reason, effective, request.isl_tokens, prefill_load, decode_load)

    if limits.decode_busy is not None and decode_load > limits.decode_busy:
        return placed("decode_busy")
    if limits.policy != "prefill_load" and _is_short(effective, request.isl_tokens, limits):
        return placed("short")
    if limits.policy != "isl_bounding" and limits.prefill_busy is not None and prefill_load > limits.prefill_busy:
        return placed("prefill_busy")
    return placed("long")


def _is_short(effective: int, isl_tokens: int, limits: ConditionalLimits) -> bool:
    """A prompt of unknown length is not short."""
    if not isl_tokens:
        return False
    return effective < limits.effective_isl_tokens and effective / isl_tokens < limits.effective_isl_ratio


def _prefill_load(verdict: Verdict) -> float:
    queued, ranks = verdict.ints("queued_tokens"), verdict.model_view
    loads = (
        int(queued[place]) / (registration.max_num_batched_tokens or BATCHED_TOKENS_DEFAULT)
        for place, registration in enumerate(ranks.registrations)
        if registration.role == "prefill" and not ranks.unfit[place]
    )
    return min(loads, default=float("inf"))


def _decode_load(verdict: Verdict) -> float:
    total = verdict.registration.total_kv_blocks
    return int(verdict.ints("active_blocks")[verdict.place]) / total if total else 0.0


def requested_phase(params: bytes, *, accepted: bool) -> RequestPhase:
    """Return the one phase that a request's `disaggregated_params` ask for; raise `RequestInvalid`."""
    if not accepted:
        raise RequestInvalid(_FIELD, "a value", "none: workers say them (disaggregation.accept_params is false)")
    try:
        request_type = _params.decode(params).request_type
    except msgspec.DecodeError as error:
        raise RequestInvalid(_FIELD, "another value", f"an object with request_type ({error})") from error
    return _PHASE_OF[request_type]


_params = msgspec.json.Decoder(_DisaggregatedParams)
