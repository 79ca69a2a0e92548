"""Beginnings and ends of prompts that are kept for people: what is kept, and how much of it."""

from array import array
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from router.decision.kept_prompts import HEAD_TOKENS, TAIL_TOKENS, KeptPrompts, PromptText

BYTES_MAX = 40_000


def words(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def ids(count: int) -> bytes:
    return array("I", range(count)).tobytes()


def test_a_short_prompt_is_kept_whole_and_a_long_one_without_its_middle() -> None:
    kept = KeptPrompts(words)
    kept.keep("short", ids(3))
    kept.keep("exact", ids(HEAD_TOKENS + TAIL_TOKENS))
    kept.keep("long", ids(2000))
    assert kept.text("short") == PromptText("0 1 2", "", 0)
    assert kept.text("exact") == PromptText(words(range(HEAD_TOKENS)), words(range(512, 1024)), 0)
    assert kept.text("long") == PromptText(words(range(HEAD_TOKENS)), words(range(1488, 2000)), 976)
    assert kept.text("other") is None


def test_a_prompt_without_ids_is_not_kept() -> None:
    kept = KeptPrompts(words)
    kept.keep("image", b"")
    assert (kept.text("image"), kept.size_bytes) == (None, 0)


@given(st.lists(st.tuples(st.sampled_from([f"r{n}" for n in range(30)]), st.integers(1, 3000)), max_size=60))
def test_the_newest_prompts_are_kept_within_the_bound(sent: list[tuple[str, int]]) -> None:
    kept = KeptPrompts(words, BYTES_MAX)
    for request_id, count in sent:
        kept.keep(request_id, ids(count))
        assert kept.size_bytes <= BYTES_MAX
        assert kept.text(request_id) is not None
    newest_first = list(dict.fromkeys(request_id for request_id, _ in reversed(sent)))
    are_kept = [kept.text(request_id) is not None for request_id in newest_first]
    assert are_kept == sorted(are_kept, reverse=True), "the oldest are dropped first"
    kept_counts = {request_id: count for request_id, count in sent if kept.text(request_id)}
    for request_id, count in kept_counts.items():
        found = kept.text(request_id)
        assert found is not None
        assert len(f"{found.head} {found.tail}".split()) + found.omitted_tokens == count
