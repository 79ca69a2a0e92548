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
HANDOFF = {"first_gen_tokens": (4,), "opaque_state": b"\xff"}
MEDIA = {"multimodal_embedding_handles": [{"a": 1}]}


def asked(params: dict[str, Any] | None) -> Request:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "disaggregated_params": params}
    return decode_chat(msgspec.json.encode(body))


@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode"])
def test_a_request_that_says_nothing_asks_for_what_the_role_does(role: Role) -> None:
    assert phase_of(asked(None), role) == NOTHING_ASKED


@pytest.mark.parametrize("kind", ["context_only", "generation_only"])
def test_a_decode_worker_goes_on_where_the_prefill_worker_stopped(kind: str) -> None:
    phase = phase_of(asked({"request_type": kind, **STATE}), "decode")
    assert phase == replace(NOTHING_ASKED, handoff=Handoff(request_type=kind, **HANDOFF))  # type: ignore[arg-type]


def test_a_decode_worker_serves_alone_where_it_is_asked_for_all() -> None:
    assert phase_of(asked({"request_type": "context_and_generation"}), "decode") == replace(
        NOTHING_ASKED, is_context_and_generation=True
    )
    assert phase_of(asked({"request_type": "context_and_generation"}), "aggregated") == NOTHING_ASKED


def test_a_prefill_worker_may_be_told_the_transfer_s_id_and_nothing_else() -> None:
    assert phase_of(asked({"request_type": "context_only", "disagg_request_id": 7}), "prefill") == replace(
        NOTHING_ASKED, transfer_id=7
    )


def test_a_prefill_worker_takes_what_an_encode_worker_said() -> None:
    handoff = Handoff(multimodal_embedding_handles=({"a": 1},))
    assert phase_of(asked(MEDIA), "prefill") == replace(NOTHING_ASKED, handoff=handoff)


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


def test_an_aggregated_worker_hands_what_it_was_told_to_the_engine_which_refuses_it() -> None:
    assert phase_of(asked(STATE), "aggregated").handoff == Handoff(**HANDOFF)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [None, MEDIA])
def test_an_encode_worker_generates_nothing(params: dict[str, Any] | None) -> None:
    with pytest.raises(RequestInvalid, match='role: found "encode", allowed aggregated, prefill or decode'):
        phase_of(asked(params), "encode")
