"""What is handed from worker to worker, as JSON and as the engine's own parameters."""

import enum
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.core.disaggregated import (
    STATE_BYTES_MAX,
    Handoff,
    HandoffInvalid,
    TransferIds,
    handoff_json,
    handoff_of,
    handoff_of_json,
    params_of,
)
from worker_agent.core.sampling import TokenLogprob

LOGPROB = TokenLogprob(token_id=4, logprob=-0.5, rank=1)


class Style(enum.IntEnum):
    SECOND = 1


def test_the_json_has_the_engine_s_names_base64_and_lists() -> None:
    handoff = Handoff(opaque_state=b"\xff\x00", first_gen_tokens=(4,), first_gen_log_probs=(((LOGPROB,),),))
    assert msgspec.json.decode(handoff_json(handoff)) == {
        "opaque_state": "/wA=",
        "first_gen_tokens": [4],
        "first_gen_log_probs": [[[{"token_id": 4, "logprob": -0.5, "rank": 1}]]],
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


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{",
        b'{"opaque_state":"***"}',
        b'{"opaque_state":7}',
        b'{"surprise":1}',
        b'{"multimodal_hashes":[[1,2]]}',
        b'{"ctx_request_id":-1}',
        msgspec.json.encode({"first_gen_tokens": [1] * 1000}),
        msgspec.json.encode({"opaque_state": b"\0" * (STATE_BYTES_MAX + 1)}),
    ],
)
def test_anything_else_is_refused_with_its_field(data: bytes) -> None:
    with pytest.raises(HandoffInvalid, match=r"^disaggregated_params: "):
        handoff_of_json(data)


def test_the_engine_s_own_parameters_become_data_and_come_back() -> None:
    probable = SimpleNamespace(logprob=-0.5, rank=1)
    params = SimpleNamespace(
        request_type="context_only",
        first_gen_tokens=[4],
        first_gen_log_probs=[[{4: probable}]],
        first_gen_logits=object(),
        opaque_state=b"\xff",
        schedule_style=Style.SECOND,
        multimodal_hashes=[[1] * 8],
    )
    handoff = handoff_of(params)
    assert (handoff.first_gen_log_probs, handoff.schedule_style) == ((((LOGPROB,),),), 1)
    assert params_of(handoff, "generation_only", with_media=False) == {
        "request_type": "generation_only",
        "first_gen_tokens": [4],
        "first_gen_log_probs": [[{4: LOGPROB}]],
        "opaque_state": b"\xff",
        "schedule_style": 1,
    }


def test_what_cannot_be_handed_over_is_an_error_of_ours() -> None:
    with pytest.raises(HandoffInvalid, match="of the engine"):
        handoff_of(SimpleNamespace(opaque_state="text"))


@given(st.integers(0, 255), st.integers(0, 63), st.integers(0, 1 << 50))
def test_an_id_says_where_and_when_it_was_given(node: int, process: int, now_ms: int) -> None:
    given_id = TransferIds(node, process).next(now_ms)
    assert 0 < given_id < 1 << 63
    assert (given_id >> 24, given_id >> 16 & 255, given_id >> 10 & 63) == (now_ms % (1 << 39), node, process)


def test_a_thousand_ids_in_one_millisecond_differ() -> None:
    ids = TransferIds(3)
    assert len({ids.next(5) for _ in range(1024)}) == 1024


@pytest.mark.parametrize(("node", "process"), [(-1, 0), (256, 0), (0, 64)])
def test_a_place_outside_the_bits_is_refused(node: int, process: int) -> None:
    with pytest.raises(ValueError, match=r"allowed 0\.\.255 and 0\.\.63"):
        TransferIds(node, process)
