"""Known beginnings of chats: the longest is found, a chat that grows replaces itself, memory is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.prefix_cache import CachedChat, Cut, PrefixCache, shared_bytes


def kept(text: bytes) -> CachedChat:
    """Return a chat with a token a byte, that may be cut before each '#'."""
    cuts = tuple(Cut(at, at + 1, at) for at, byte in enumerate(text) if byte == ord("#") and at)
    return CachedChat(text, b"".join(bytes([byte, 0, 0, 0]) for byte in text), b"", cuts)


def cache_of(*texts: bytes, bytes_max: int = 1 << 20) -> PrefixCache:
    cache = PrefixCache(bytes_max)
    for text in texts:
        cache.keep(kept(text))
    return cache


def known_bytes(cache: PrefixCache, text: bytes) -> int:
    found = cache.known(text)
    if found is None:
        return 0
    assert found.ids == kept(text[: found.cut.at]).ids
    return found.cut.at


@pytest.mark.parametrize(
    ("texts", "text", "known"),
    [
        ([], b"#a#b", 0),
        ([b"#a#b"], b"#a#b", 2),
        ([b"#a#b"], b"#a#b#c", 2),
        ([b"#a#b"], b"#a#x", 2),
        ([b"#a#b"], b"#ax#b", 0),
        ([b"#a#b"], b"#a", 0),
        ([b"#a#b"], b"", 0),
        ([b"#a#b#c", b"#a#x"], b"#a#b#d", 4),
        ([b"#a#b#c#d", b"#b", b"#a#c"], b"#a#b#c#e", 6),
        ([b"#s#a#b", b"#s#z#b"], b"#s#m", 2),
    ],
)
def test_the_longest_known_beginning_ends_before_a_mark_that_both_have(
    texts: list[bytes], text: bytes, known: int
) -> None:
    assert known_bytes(cache_of(*texts), text) == known


def test_half_a_mark_is_none() -> None:
    cache = PrefixCache(1 << 20)
    cache.keep(CachedChat(b"ab<mark>cd", b"", b"", (Cut(2, 8, 2),)))
    assert [known_or_none(cache, text) for text in (b"ab<mark", b"ab<mark]", b"ab<mark>", b"ab<mark>x")] == [0, 0, 2, 2]


def known_or_none(cache: PrefixCache, text: bytes) -> int:
    known = cache.known(text)
    return known.cut.at if known else 0


def test_a_chat_that_grows_replaces_its_former_self() -> None:
    cache = cache_of(b"#a#b", b"#a#b#c", b"#a#b#c#d")
    assert len(cache) == 1
    assert cache.size_bytes == kept(b"#a#b#c#d").size_bytes


def test_branches_of_a_chat_are_kept_beside_each_other() -> None:
    assert len(cache_of(b"#a#b", b"#a#c", b"#a#b#d", b"#a#c#d")) == 2


def test_a_chat_that_is_asked_again_is_kept_once() -> None:
    cache = cache_of(b"#a#b", b"#a#b")
    assert (len(cache), cache.size_bytes) == (1, kept(b"#a#b").size_bytes)


def test_beyond_its_bytes_the_least_recently_used_go() -> None:
    texts = [b"#a#1", b"#b#1", b"#c#1"]
    cache = cache_of(*texts, bytes_max=3 * kept(texts[0]).size_bytes)
    assert known_bytes(cache, b"#a#2") == 2
    cache.keep(kept(b"#d#1"))
    assert [known_bytes(cache, text) for text in (*texts, b"#d#1")] == [2, 0, 2, 2]
    assert (cache.evicted, len(cache)) == (1, 3)


def test_a_chat_larger_than_everything_is_not_kept() -> None:
    assert len(cache_of(b"#a#b", bytes_max=100)) == 0
    assert len(cache_of(b"#a#b", bytes_max=0)) == 0


def test_what_was_known_is_counted() -> None:
    cache = cache_of(b"#a#b")
    known_bytes(cache, b"#a#bcd")
    known_bytes(cache, b"#x")
    assert (cache.requested_bytes, cache.known_bytes) == (8, 2)


texts = st.lists(st.sampled_from([b"#a", b"#b", b"#", b"c", b"\xff", b"#a#a"]), max_size=6).map(b"".join)


@given(st.lists(texts, max_size=8), texts)
def test_no_other_chat_shares_more(many: list[bytes], text: bytes) -> None:
    def at(each: bytes) -> int:
        return max((cut.at for cut in kept(each).cuts if text[: cut.mark_end] == each[: cut.mark_end]), default=0)

    assert known_bytes(cache_of(*many), text) == max(map(at, many), default=0)


@given(st.lists(texts, max_size=20), st.integers(0, 4000))
def test_what_it_holds_is_what_it_says(many: list[bytes], bytes_max: int) -> None:
    cache = cache_of(*many, bytes_max=bytes_max)
    chats = cache.chats()
    assert cache.size_bytes == sum(chat.size_bytes for chat in chats) <= bytes_max
    assert [chat.text for chat in chats] == sorted({chat.text for chat in chats})
    assert len(chats) == len(cache)


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_shared_bytes_are_those_that_both_begin_with(start: bytes, one: bytes, other: bytes) -> None:
    expected = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    assert shared_bytes(start + one, start + other) == len(start) + expected
