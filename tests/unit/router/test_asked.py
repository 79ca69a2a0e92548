"""A client's headers and body as what routing reads; what cannot be read is refused by the header's name."""

import json
from itertools import count
from typing import Any

import pytest

from kv_protocol.decided import RouteRequest
from kv_protocol.hashing import Hashing
from kv_protocol.openai.endpoints import PATHS, ApiEndpoint
from kv_protocol.openai.inbound import UNCOMMON_KEYS
from kv_protocol.openai.requests import RequestInvalid, decode_inbound
from router.native import built
from router.request.reading import PLAIN as SAMPLES
from router.request.route_request import WISHING_HEADERS, route_request

HASHING = Hashing(16, "xxh3-1337")
PLAIN = built.PlainRequests(SAMPLES, UNCOMMON_KEYS, [*WISHING_HEADERS])
BOOLEANS = ("add_special_tokens", "continue_final_message", "add_generation_prompt")


def asked(headers: dict[bytes, bytes] | None = None, **body: Any) -> RouteRequest:
    numbers = count(1)
    inbound = decode_inbound("/v1/completions", json.dumps({"model": "m", "prompt": "hello"} | body).encode())
    return route_request(lambda: f"id-{next(numbers)}", inbound, headers or {}, HASHING)


def test_without_a_word_nothing_is_asked_but_the_model() -> None:
    found = asked()
    assert (found.decision_id, found.request_id, found.model) == ("id-1", "id-2", "m")
    assert (found.isl_tokens, found.sequence_hashes, found.block_size) == (0, b"", 16)
    assert (found.pinned_worker, found.pinned_dp_rank, found.session_id, found.priority) == (None, None, "", 0)


def test_headers_are_heeded() -> None:
    found = asked(
        {
            b"x-request-id": b"mine",
            b"x-worker-instance-id": b"w1",
            b"x-dp-rank": b"3",
            b"x-session-id": b"talk",
            b"x-required-taints": b"a, b",
            b"x-preferred-taints": b"fast=1.5, far=-2",
            b"x-request-priority": b"-4",
            b"x-request-strict-priority": b"2",
        }
    )
    assert (found.request_id, found.pinned_worker, found.pinned_dp_rank, found.session_id) == ("mine", "w1", 3, "talk")
    assert (found.required_taints, found.preferred_taints) == (("a", "b"), (("fast", 1.5), ("far", -2.0)))
    assert (found.priority, found.strict_priority) == (-4, 2)


def test_the_body_says_it_where_no_header_does() -> None:
    hints = {"priority": 7, "strict_priority": 1, "osl": 99}
    targets = {"ttft_target": 500, "itl_target": 20}
    found = asked(nvext={"backend_instance_id": "w2", "dp_rank": 1, "agent_hints": hints, "router": targets})
    assert (found.pinned_worker, found.pinned_dp_rank, found.priority, found.strict_priority) == ("w2", 1, 7, 1)
    assert (found.expected_osl, found.ttft_target_s, found.itl_target_s) == (99, 0.5, 0.02)
    assert asked({b"x-worker-instance-id": b"w1"}, nvext={"backend_instance_id": "w2"}).pinned_worker == "w1"
    assert asked({b"x-worker-instance-id": b""}, nvext={"decode_worker_id": 5}).pinned_worker == "5"


@pytest.mark.parametrize(
    ("body", "ttft_s", "itl_s"),
    [
        ({"extra_args": {"ttft_target": 100, "itl_target": 20, "priority": 10}}, 0.1, 0.02),
        ({"extra_args": {"ttft_target": 0}}, 0.0, None),
        ({"extra_args": {"ttft_target": 100}, "nvext": {"router": {"ttft_target": 500}}}, 0.5, None),
        ({"extra_args": {"ttft_target": 100}, "nvext": {"agent_hints": {"osl": 9}}}, 0.1, None),
        ({"extra_args": {"ttft_target": "soon"}}, None, None),
        ({"extra_args": ["ttft_target"]}, None, None),
    ],
)
def test_latency_targets_are_also_read_of_extra_args(
    body: dict[str, Any], ttft_s: float | None, itl_s: float | None
) -> None:
    found = asked(**body)
    assert (found.ttft_target_s, found.itl_target_s, found.priority) == (ttft_s, itl_s, 0)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-dp-rank", b"x"),
        ("x-dp-rank", b"4096"),
        ("x-dp-rank", b"-1"),
        ("x-session-id", b"s" * 129),
        ("x-session-id", b"\xff"),
        ("x-request-priority", b"1.5"),
        ("x-request-strict-priority", b"9999999999"),
        ("x-required-taints", b",".join([b"t"] * 17)),
        ("x-required-taints", b"t" * 129),
        ("x-preferred-taints", b"fast"),
        ("x-preferred-taints", b"fast=nan"),
        ("x-preferred-taints", b"=1"),
    ],
)
def test_a_header_that_cannot_be_read_is_refused_by_its_name(header: str, value: bytes) -> None:
    with pytest.raises(RequestInvalid) as refused:
        asked({header.encode(): value})
    assert refused.value.field == header


@pytest.mark.parametrize("value", [b"", b"x" * 129, b"\xff\xfe", b"a\tb"])
def test_a_request_id_that_cannot_be_shown_is_replaced(value: bytes) -> None:
    assert asked({b"x-request-id": value}).request_id == "id-2"


def is_plain(endpoint: ApiEndpoint = "chat", headers: dict[bytes, bytes] | None = None, **fields: Any) -> bool:
    given = {"messages": [{"role": "user", "content": "hi"}]} if endpoint == "chat" else {"prompt": "hi"}
    body = json.dumps({"model": "m", "stream": True, "temperature": 0.5, "stop": "x"} | given | fields).encode()
    return PLAIN.have(decode_inbound(PATHS[endpoint], body), headers or {})


def test_a_chat_or_a_completion_that_states_no_wish_is_plain() -> None:
    assert is_plain(max_tokens=5, stream_options={"include_usage": True}, seed=3, n=None)
    assert is_plain("completions", {b"accept": b"*/*", b"authorization": b"Bearer key"}, echo=True)
    assert not PLAIN.have(decode_inbound("/v1/embeddings", b'{"model":"m","input":"x"}'), {})


@pytest.mark.parametrize("key", UNCOMMON_KEYS)
def test_each_key_that_is_a_wish_makes_a_chat_one_that_is_not_plain(key: str) -> None:
    wish = {"nvext": {}, "extra_args": {}, "cache_salt": "s", "reasoning_effort": "low", "n": 2, "priority": 1}
    wishes: dict[str, Any] = {key: wish.get(key, True if key in BOOLEANS else [{}])}
    assert not is_plain(**wishes)


@pytest.mark.parametrize("header", sorted(WISHING_HEADERS))
def test_each_header_that_is_a_wish_makes_a_request_one_that_is_not_plain(header: bytes) -> None:
    assert not is_plain(headers={header: b""})
    assert not is_plain("completions", {header: b"x"})
