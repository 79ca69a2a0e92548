"""When tokens came, from what is seen of an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.decode_time import DECODE_HEADER, decode_header
from router.native import built


@pytest.mark.parametrize(
    ("first_s", "later_tokens", "decode_s", "is_streamed", "found"),
    [
        (1.0, 4, None, True, (1.0, 0.5)),
        (1.0, 0, None, True, (1.0, None)),
        (3.0, 4, None, True, (3.0, None)),
        (None, 4, None, True, (None, None)),
        (2.9, 4, None, False, (None, None)),
        (2.9, 4, 1.0, False, (2.0, 0.25)),
        (None, 0, 0.0, False, (3.0, None)),
        (None, 4, 3.1, False, (None, None)),
    ],
)
def test_what_is_known_of_an_answer_of_three_seconds(
    first_s: float | None,
    later_tokens: int,
    decode_s: float | None,
    is_streamed: bool,
    found: tuple[float | None, float | None],
) -> None:
    assert built.latency_of(first_s, 3.0, later_tokens, decode_s, is_streamed=is_streamed) == found


@given(
    st.just(0.0) | st.floats(1e-6, 600),
    st.integers(0, 1000),
    st.none() | st.just(0.0) | st.floats(1e-6, 700),
    st.booleans(),
)
def test_no_time_between_tokens_is_0_or_longer_than_the_answer(
    duration_s: float, later_tokens: int, decode_s: float | None, is_streamed: bool
) -> None:
    ttft_s, itl_s = built.latency_of(duration_s / 2, duration_s, later_tokens, decode_s, is_streamed=is_streamed)
    assert itl_s is None or 0 < itl_s * later_tokens <= duration_s * (1 + 1e-9)
    assert ttft_s is None or 0 <= ttft_s <= duration_s


def stated_s(said: bytes, *, is_streamed: bool = False) -> float | None:
    """Return the decode time of an answer with this header."""
    return built.answer_of(b"", {DECODE_HEADER.encode(): said}, is_streamed, has_begun=False).decode_s


def test_a_stream_states_no_decode_time() -> None:
    assert (stated_s(b"812.4"), stated_s(b"812.4", is_streamed=True)) == (0.8124, None)


@given(st.floats(0, 10_000))
def test_what_an_agent_states_is_read_to_the_microsecond(seconds: float) -> None:
    assert stated_s(decode_header(seconds).encode()) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize("said", [b"", b".", b"1.", b".5", b"-1", b"1e3", b" 1", b"1.2.3", b"1" * 10, b"1.1234567"])
def test_what_is_no_number_of_milliseconds_is_not_read(said: bytes) -> None:
    assert stated_s(said) is None
