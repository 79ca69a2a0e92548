"""What a client gets of a stream that is kept for another worker: all but the token comments."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.continuation import token_comment, without_tokens
from router.http.framing import KeptEvents
from router.http.stream_replay import StreamReplayBuffer

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=9)
TEXT = st.one_of(st.text(max_size=20), st.sampled_from([": tokens AAAA", "\n: tokens AAAA\n", "data: [DONE]"]))
EVENTS = st.lists(st.tuples(TOKENS, TEXT), min_size=1, max_size=6)


def said(text: str) -> bytes:
    return b"data: " + json.dumps({"text": text}).encode() + b"\n\n"


def parts(events: Sequence[tuple[list[int], str]]) -> list[tuple[bytes, bytes]]:
    """Return each event as the worker sends it, and as a client gets it."""
    return [(token_comment(tokens) + said(text), said(text)) for tokens, text in events]


@given(EVENTS)
def test_events_lose_their_comments_and_nothing_else(events: list[tuple[list[int], str]]) -> None:
    whole, bare = (b"".join(each) for each in zip(*parts(events), strict=True))
    assert without_tokens(whole) == (bare, sum(len(tokens) for tokens, _ in events))
    assert without_tokens(bare) == (bare, 0)


@given(EVENTS, st.booleans())
def test_all_is_kept_and_the_client_gets_what_it_wants(events: list[tuple[list[int], str]], hides_tokens: bool) -> None:
    kept, got = StreamReplayBuffer(KeptEvents(1 << 20), hides_tokens=hides_tokens), b""
    for whole, bare in parts(events):
        shown = kept.add(whole)
        got += shown
        assert shown == (bare if hides_tokens else whole)
    assert kept.events() == b"".join(whole for whole, _ in parts(events))
    assert kept.later_tokens == sum(len(tokens) for tokens, _ in events[1:])


@pytest.mark.parametrize("bytes_max", [0, 60])
def test_of_a_stream_that_is_too_long_comments_are_hidden_and_counted_on(bytes_max: int) -> None:
    kept, event = StreamReplayBuffer(KeptEvents(bytes_max)), token_comment([1, 2]) + said("ab")
    assert [kept.add(event) for _ in range(4)] == [said("ab")] * 4
    assert (kept.is_overfull, kept.events(), kept.later_tokens) == (True, b"", 6)
