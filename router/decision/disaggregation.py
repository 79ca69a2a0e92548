"""Decides where a prompt is computed: by a prefill worker, or by the worker that decodes it.

    conditional     the decode worker computes the prompt itself if
    off             never, as long as there are prefill workers
    isl_bounding    it lacks few of the prompt's tokens: effective < `effective_isl_tokens`
                    and effective / ISL < `effective_isl_ratio`
    prefill_load    every prefill rank has more tokens queued than `prefill_busy` x max_num_batched_tokens
    isl_or_load     the condition of isl_bounding or that of prefill_load holds

    effective = ISL - tokens of the prompt that the decode rank holds; the decode rank is the one that would be chosen
    to compute and decode all of it. A rank that uses more than `decode_busy` of its blocks computes no prompts,
    whatever the policy.

Source: `docs/SOURCES.md` D4.4.
"""

from typing import Literal, get_args

import msgspec

from kv_protocol.decided import RequestPhase
from kv_protocol.openai.requests import RequestInvalid
from router.decision.eligibility import BATCHED_TOKENS_DEFAULT
from router.decision.policy_config import DisaggregationSection
from router.decision.verdict import Verdict

_FIELD = "disaggregated_params"
_PHASE_OF: dict[str, RequestPhase] = {
    "context_only": "prefill",
    "generation_only": "decode",
    "context_and_generation": "alone",
}
PlacementReason = Literal["short", "prefill_busy", "decode_busy", "long"]
"""Why a prompt is computed where it is."""
PLACEMENT_REASONS: tuple[PlacementReason, ...] = get_args(PlacementReason)
AT_DECODE: tuple[PlacementReason, ...] = ("short", "prefill_busy")
"""The reasons for which the decode worker computes the prompt."""


class _DisaggregatedParams(msgspec.Struct, frozen=True):
    request_type: Literal["context_only", "generation_only", "context_and_generation"]


def placement(verdict: Verdict, limits: DisaggregationSection) -> PlacementReason:
    """Return the reason; `conditional` must not be off. `verdict` decides for a rank that computes and decodes all."""
    request, total_blocks = verdict.request, verdict.registration.total_kv_blocks
    isl_tokens, held_blocks = request.isl_tokens, min(verdict.expected_blocks, request.reusable_blocks)
    effective = isl_tokens - held_blocks * request.block_size
    used_blocks = verdict.numbers["active_blocks"][verdict.place]
    is_few = effective < limits.effective_isl_tokens
    is_short = bool(isl_tokens) and is_few and effective / isl_tokens < limits.effective_isl_ratio
    if limits.decode_busy is not None and total_blocks and used_blocks / total_blocks > limits.decode_busy:
        return "decode_busy"
    if limits.conditional != "prefill_load" and is_short:
        return "short"
    busy = limits.prefill_busy
    if limits.conditional != "isl_bounding" and busy is not None and _prefill_load(verdict) > busy:
        return "prefill_busy"
    return "long"


def _prefill_load(verdict: Verdict) -> float:
    """Return the smallest queued tokens / max_num_batched_tokens of a prefill rank that is fit; inf: there is none."""
    queued, ranks = verdict.numbers["queued_tokens"], verdict.model_view
    loads = (
        int(queued[place]) / (registration.max_num_batched_tokens or BATCHED_TOKENS_DEFAULT)
        for place, registration in enumerate(ranks.registrations)
        if registration.role == "prefill" and not ranks.unfit[place]
    )
    return min(loads, default=float("inf"))


def requested_phase(params: bytes, *, accepted: bool) -> RequestPhase:
    """Return the phase that `disaggregated_params` ask for; raise `RequestInvalid` if they cannot be used."""
    if not accepted:
        raise RequestInvalid(_FIELD, "a value", "none: workers say them (disaggregation.accept_params is false)")
    try:
        request_type = _params.decode(params).request_type
    except msgspec.DecodeError as error:
        raise RequestInvalid(_FIELD, "another value", f"an object with request_type ({error})") from error
    return _PHASE_OF[request_type]


_params = msgspec.json.Decoder(_DisaggregatedParams)
