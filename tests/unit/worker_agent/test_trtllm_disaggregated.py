"""What is handed from worker to worker, as JSON and as the engine's own parameters."""

import dataclasses
import enum
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.openai.requests import RequestInvalid
from tests.support.engine_description import handoff_of_json
from worker_agent.port.handoff import (
    STATE_BYTES_MAX,
    Handoff,
    HandoffInvalid,
    handoff_json,
    handoff_keys,
    handoff_of,
    params_of,
    read_handoff,
    without_media,
)
from worker_agent.port.sampling import TokenLogprob

LOGPROB = TokenLogprob(token_id=4, logprob=-0.5, rank=1)
PROBABLE = SimpleNamespace(logprob=-0.5, rank=1)


class Style(enum.IntEnum):
    SECOND = 1


def test_the_json_has_the_engine_s_names_base64_and_lists() -> None:
    handoff = Handoff(opaque_state=b"\xff\x00", first_gen_tokens=(4, 5), first_gen_log_probs=((LOGPROB,), -0.25))
    assert msgspec.json.decode(handoff_json(handoff)) == {
        "encoded_opaque_state": "/wA=",
        "first_gen_tokens": [4, 5],
        "first_gen_log_probs": [[{"token_id": 4, "logprob": -0.5, "rank": 1}], -0.25],
    }


@given(
    st.builds(
        Handoff,
        opaque_state=st.none() | st.binary(max_size=64),
        first_gen_tokens=st.none() | st.lists(st.integers(0, 1 << 31), max_size=4).map(tuple),
        ctx_request_id=st.none() | st.integers(0, (1 << 63) - 1),
        ctx_info_endpoint=st.none() | st.text(max_size=8),
        multimodal_hashes=st.none()
        | st.lists(st.tuples(*[st.integers(-(1 << 31), 1 << 31)] * 8), max_size=2).map(tuple),
    )
)
def test_what_is_written_is_read(handoff: Handoff) -> None:
    assert handoff_of_json(handoff_json(handoff)) == handoff


def test_what_another_server_says_to_its_orchestrator_is_read_and_dropped() -> None:
    said = {
        "request_type": "context_only",
        "first_gen_tokens": [4],
        "first_gen_log_probs": None,
        "first_gen_logits": [{"data": "", "shape": [0], "dtype": "float16"}],
        "ctx_request_id": 5,
        "encoded_opaque_state": "/w==",
        "draft_tokens": None,
        "schedule_style": 0,
        "ctx_usage": {"prompt_tokens": 1, "prompt_tokens_details": None},
        "return_prompt_token_ids_b64": False,
        "resolved_thinking": None,
        "conversation_id": "c",
    }
    expected = Handoff(
        request_type="context_only",
        first_gen_tokens=(4,),
        ctx_request_id=5,
        opaque_state=b"\xff",
        schedule_style=0,
        ctx_usage={"prompt_tokens": 1, "prompt_tokens_details": None},
    )
    assert handoff_of_json(msgspec.json.encode(said)) == expected


@pytest.mark.parametrize("nothing", [b"", b"null"])
def test_a_request_without_them_has_none(nothing: bytes) -> None:
    assert read_handoff(msgspec.Raw(nothing)) is None


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"[]", ""),
        (b"{", ""),
        (b'{"encoded_opaque_state":"***"}', ".encoded_opaque_state"),
        (b'{"not a name":1}', ""),
        (b'{"opaque_state":"y"}', ""),
        (msgspec.json.encode({"n" * 65: 1}), ""),
        (msgspec.json.encode({f"newer_{number}": 1 for number in range(33)}), ""),
        (b'{"multimodal_hashes":[[1,2]]}', r".multimodal_hashes\[0\]"),
        (b'{"ctx_request_id":-1}', ".ctx_request_id"),
        (msgspec.json.encode({"first_gen_tokens": [1] * 1000}), ".first_gen_tokens"),
        (msgspec.json.encode({"first_gen_log_probs": [-0.5] * 1000}), ".first_gen_log_probs"),
        (msgspec.json.encode({"encoded_opaque_state": b"\0" * (STATE_BYTES_MAX + 1)}), ".encoded_opaque_state"),
    ],
)
def test_anything_else_is_refused_with_its_field(data: bytes, field: str) -> None:
    with pytest.raises(RequestInvalid, match=f"^disaggregated_params{field}: found "):
        handoff_of_json(data)


def test_once_the_prompt_is_computed_its_media_are_not_handed_on() -> None:
    state = Handoff(opaque_state=b"x", ctx_request_id=3)
    with_media = msgspec.structs.replace(state, multimodal_embedding_handles=({"a": 1},), multimodal_hashes=((1,) * 8,))
    assert without_media(with_media) == state


def test_the_positions_of_a_prompt_with_media_are_handed_on_to_the_decode_worker() -> None:
    positions = {"mrope_position_ids_handle": {"a": 1}, "mrope_position_deltas_handle": {"b": 2}}
    handoff = without_media(handoff_of_json(msgspec.json.encode(positions | {"multimodal_hashes": [[1] * 8]})))
    assert handoff_keys(handoff) == positions
    assert params_of(handoff, "generation_only", with_media=False) == {"request_type": "generation_only", **positions}


def test_the_engine_s_own_parameters_become_data_and_come_back() -> None:
    params = SimpleNamespace(
        request_type="context_only",
        first_gen_tokens=[4],
        first_gen_log_probs=[{4: PROBABLE}, -0.25],
        first_gen_logits=object(),
        opaque_state=b"\xff",
        schedule_style=Style.SECOND,
        multimodal_hashes=[[1] * 8],
    )
    handoff = handoff_of(params)
    assert (handoff.first_gen_log_probs, handoff.schedule_style) == (((LOGPROB,), -0.25), 1)
    assert params_of(handoff, "generation_only", with_media=False) == {
        "request_type": "generation_only",
        "first_gen_tokens": [4],
        "first_gen_log_probs": [[LOGPROB], -0.25],
        "opaque_state": b"\xff",
        "schedule_style": 1,
    }


@dataclasses.dataclass
class Newer:
    """The engine's parameters in a version that has more of them."""

    ctx_request_id: int = 5
    multimodal_item_runs: Any = None
    newer: Any = None
    tensor: Any = None


def test_keys_of_a_newer_version_pass_through_from_engine_to_engine() -> None:
    runs = [[(0, 4, [1])]]
    handoff = handoff_of(Newer(multimodal_item_runs=runs, newer={"a": [1, None]}, tensor=object()))
    read = handoff_of_json(handoff_json(handoff))
    assert read.others == {"multimodal_item_runs": [[[0, 4, [1]]]], "newer": {"a": [1, None]}}
    assert msgspec.json.decode(handoff_json(handoff)).keys() == {"ctx_request_id", "multimodal_item_runs", "newer"}
    request = read_handoff(msgspec.Raw(handoff_json(handoff)))
    assert request == read
    assert params_of(read, "context_only", with_media=True)["multimodal_item_runs"] == [[[0, 4, [1]]]]
    kept = {"request_type": "generation_only", "ctx_request_id": 5, "newer": {"a": [1, None]}}
    assert params_of(read, "generation_only", with_media=False) == kept
    assert without_media(read).others == {"newer": {"a": [1, None]}}


def test_a_known_key_cannot_hide_among_the_others() -> None:
    handoff = handoff_of_json(b'{"others":{"request_type":"x"},"ctx_request_id":1}')
    told = params_of(handoff, "context_only", with_media=True)
    assert (told["request_type"], told["ctx_request_id"]) == ("context_only", 1)
    assert told["others"] == {"request_type": "x"}


def test_what_cannot_be_handed_over_is_an_error_of_ours() -> None:
    with pytest.raises(HandoffInvalid, match="of the engine"):
        handoff_of(SimpleNamespace(opaque_state="text"))
