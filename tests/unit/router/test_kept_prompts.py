"""Beginnings and ends of prompts that are kept for people: what is kept, and how much of it."""

from array import array
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.codec import pack_u64
from router.decision.kept_prompts import HEAD_TOKENS, TAIL_TOKENS, KeptPrompts, PromptText

BYTES_MAX = 40_000
HASHES = bytes(range(16))


def words(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def ids(count: int) -> bytes:
    return array("I", range(count)).tobytes()


def test_a_short_prompt_is_kept_whole_and_a_long_one_without_its_middle() -> None:
    kept = KeptPrompts(words)
    kept.keep("short", ids(3), HASHES)
    kept.keep("exact", ids(HEAD_TOKENS + TAIL_TOKENS), HASHES)
    kept.keep("long", ids(2000), HASHES)
    assert kept.text("short", HASHES) == PromptText("0 1 2", "", 0)
    assert kept.text("exact", HASHES) == PromptText(words(range(HEAD_TOKENS)), words(range(512, 1024)), 0)
    assert kept.text("long", HASHES) == PromptText(words(range(HEAD_TOKENS)), words(range(1488, 2000)), 976)
    assert kept.text("other", HASHES) is None


def test_a_decision_on_another_prompt_under_the_same_id_has_no_text() -> None:
    kept = KeptPrompts(words)
    kept.keep("job", ids(3), HASHES[:8])
    assert kept.text("job", HASHES) is not None, "resumed on another worker, with what was generated"
    kept.keep("job", ids(4), HASHES[8:])
    assert kept.text("job", HASHES[:8]) is None
    assert kept.text("job", HASHES[8:]) == PromptText("0 1 2 3", "", 0)


def test_of_prompts_that_no_hash_tells_apart_none_is_shown() -> None:
    kept = KeptPrompts(words)
    for count in (3, 3):
        kept.keep("job", ids(count), b"")
        assert kept.text("job", b"") is not None
    for count in (4, 4, 3):
        kept.keep("job", ids(count), b"")
        assert kept.text("job", b"") is None


def test_a_prompt_without_ids_is_not_kept() -> None:
    kept = KeptPrompts(words)
    kept.keep("image", b"", HASHES)
    assert (kept.text("image", HASHES), kept.size_bytes) == (None, 0)


@given(st.lists(st.tuples(st.sampled_from([f"r{n}" for n in range(30)]), st.integers(1, 3000)), max_size=60))
def test_the_newest_prompts_are_kept_within_the_bound(sent: list[tuple[str, int]]) -> None:
    kept, newest = KeptPrompts(words, BYTES_MAX), dict[str, int]()
    for request_id, count in sent:
        kept.keep(request_id, ids(count), pack_u64([count]))
        newest.pop(request_id, None)
        newest[request_id] = count
        assert kept.size_bytes <= BYTES_MAX
        assert kept.text(request_id, pack_u64([count])) is not None
    found = {request_id: kept.text(request_id, pack_u64([count])) for request_id, count in newest.items()}
    are_kept = [text is not None for text in found.values()]
    assert are_kept == sorted(are_kept), "the oldest are dropped first"
    for request_id, text in found.items():
        if text is not None:
            assert len(f"{text.head} {text.tail}".split()) + text.omitted_tokens == newest[request_id]
