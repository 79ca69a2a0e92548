"""What becomes of a router's request on its way to an engine: its bytes but for the router's own."""

from hypothesis import given
from hypothesis import strategies as st

from router.prompt.chains import with_prompt_ids
from worker_agent.api.forwarder import engine_headers, without_prompt_ids

BODIES = (
    b'{"model":"m","prompt":"hi"}',
    b' {\n "messages": [{"content": "{\\"kv_prompt_ids\\":\\"x\\"}"}], "model": "m"}\n',
    b'{"a":{"kv_prompt_ids":"AAAA"}}',
)


def test_what_the_router_puts_before_a_body_is_cut_out_and_no_other_byte_changes() -> None:
    for body in BODIES:
        routed = b"".join(with_prompt_ids(body, b"\x01\x00\x00\x00" * 3))
        assert routed != body
        assert without_prompt_ids(routed) == body[body.index(b"{") :]


def test_a_body_without_ids_passes_as_it_is() -> None:
    for body in (*BODIES, b"", b"[]", b'{"kv_prompt_ids":7}', b"\xff{"):
        assert without_prompt_ids(body) == body


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_any_ids_and_any_rest_are_told_apart(ids: bytes, rest: bytes) -> None:
    body = b'{"model":"m",' + rest
    assert without_prompt_ids(b"".join(with_prompt_ids(body, ids))) == body


def test_the_rank_has_the_engines_name_and_the_routers_words_stay_behind() -> None:
    given_headers = [
        ("Host", "agent:1"),
        ("content-type", "application/json"),
        ("x-request-id", "r1"),
        ("x-dp-rank", "1"),
        ("X-Data-Parallel-Rank", "7"),
        ("authorization", "Bearer the-routers"),
        ("content-length", "20"),
        ("connection", "keep-alive, x-odd"),
        ("x-odd", "1"),
    ]
    kept = [("content-type", "application/json"), ("x-request-id", "r1")]
    name = "X-data-parallel-rank"
    assert engine_headers(given_headers, rank_header=name, dp_rank=None, api_key="") == kept
    assert engine_headers(given_headers, rank_header=name, dp_rank=0, api_key="") == [*kept, (name, "0")]
    assert engine_headers(given_headers, rank_header=name, dp_rank=1, api_key="k") == [
        *kept,
        (name, "1"),
        ("Authorization", "Bearer k"),
    ]
