"""Parses the phase that a request asks a worker for, and the handoff of the phase before.

    role          without              `disaggregated_params.request_type`
                  the key              context_only          generation_only   context_and_generation
    aggregated    both phases          refused               refused           both phases
    prefill       prompt, first token  prompt, first token   refused           refused
    decode        refused, by engine   the rest              the rest          both phases, on this worker
    encode        nothing is generated: refused

A prefill worker's own answer has `context_only`: it may be passed on unchanged. `disagg_request_id` in a request to a
prefill worker is the id of the transfer; without one the engine assigns its own.
Source: as of `port/handoff.py`; NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/openai_disagg_service.py`.
"""

import msgspec

from kv_protocol.fleet import Role
from kv_protocol.openai.requests import Request, RequestInvalid
from worker_agent.port.handoff import Handoff, handoff_of_request

_FIELD = "disaggregated_params"
_REQUEST_TYPES: dict[Role, tuple[str, ...]] = {
    "aggregated": ("context_and_generation",),
    "prefill": ("context_only",),
    "decode": ("generation_only", "context_only", "context_and_generation"),
}


class GenerationPhase(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of these names of an `EngineRequest`."""

    handoff: Handoff | None = None
    transfer_id: int | None = None
    is_context_and_generation: bool = False


def phase_of(request: Request, role: Role) -> GenerationPhase:
    """Return the phase; raise `RequestInvalid` if the role does not serve it."""
    if role == "encode":
        raise RequestInvalid("role", role, "aggregated, prefill or decode: an encoder generates nothing")
    handoff = handoff_of_request(request.disaggregated_params)
    if handoff is None:
        return GenerationPhase()
    kind, allowed = handoff.request_type, _REQUEST_TYPES[role]
    if kind is not None and kind not in allowed:
        raise RequestInvalid(f"{_FIELD}.request_type", kind, f"{' or '.join(allowed)} on a worker whose role is {role}")
    if kind == "context_and_generation":
        return GenerationPhase(is_context_and_generation=role == "decode")
    if role != "prefill":
        return GenerationPhase(handoff=handoff)
    has_media = handoff.multimodal_embedding_handles is not None
    return GenerationPhase(handoff=handoff if has_media else None, transfer_id=handoff.disagg_request_id)
