"""Which part of a generation a request asks for, by role."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kv_protocol.fleet import Role
from kv_protocol.openai.requests import Request, RequestInvalid, decode_chat
from worker_agent.api.request_rules import NOTHING_ASKED, phase_of
from worker_agent.port.handoff import Handoff

STATE = {"first_gen_tokens": [4], "encoded_opaque_state": "/w=="}
HANDOFF = Handoff(first_gen_tokens=(4,), opaque_state=b"\xff")
MEDIA = {"multimodal_embedding_handles": [{"a": 1}]}


def asked(params: dict[str, Any] | None) -> Request:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "disaggregated_params": params}
    return decode_chat(msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("role", "params", "fields"),
    [
        ("aggregated", None, {}),
        ("prefill", None, {}),
        ("decode", None, {}),
        *(
            ("decode", {"request_type": kind, **STATE}, {"handoff": replace(HANDOFF, request_type=kind)})
            for kind in ("context_only", "generation_only")
        ),
        ("decode", {"request_type": "context_and_generation"}, {"is_context_and_generation": True}),
        ("aggregated", {"request_type": "context_and_generation"}, {}),
        ("prefill", {"request_type": "context_only", "disagg_request_id": 7}, {"transfer_id": 7}),
        ("prefill", MEDIA, {"handoff": Handoff(multimodal_embedding_handles=({"a": 1},))}),
        ("aggregated", STATE, {"handoff": HANDOFF}),  # the engine refuses it
    ],
)
def test_a_request_asks_for_what_the_role_does_or_for_the_part_that_it_names(
    role: Role, params: dict[str, Any] | None, fields: dict[str, Any]
) -> None:
    assert phase_of(asked(params), role) == replace(NOTHING_ASKED, **fields)


@pytest.mark.parametrize(
    ("role", "kind", "allowed"),
    [
        ("aggregated", "context_only", "context_and_generation on"),
        ("aggregated", "generation_only", "context_and_generation on"),
        ("prefill", "generation_only", "context_only on"),
        ("prefill", "context_and_generation", "context_only on"),
        ("decode", "rest", "generation_only or context_only or context_and_generation on"),
    ],
)
def test_another_role_s_part_is_refused(role: Role, kind: str, allowed: str) -> None:
    message = f'disaggregated_params.request_type: found "{kind}", allowed {allowed} a worker whose role is {role}'
    with pytest.raises(RequestInvalid, match=message):
        phase_of(asked({"request_type": kind, **STATE}), role)


@pytest.mark.parametrize("params", [None, MEDIA])
def test_an_encode_worker_generates_nothing(params: dict[str, Any] | None) -> None:
    with pytest.raises(RequestInvalid, match='role: found "encode", allowed aggregated, prefill or decode'):
        phase_of(asked(params), "encode")
