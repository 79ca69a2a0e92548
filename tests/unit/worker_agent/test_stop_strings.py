"""Stop strings, wherever chunks of text end."""

from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from worker_agent.api.choice_text import StopFilter


def naive_cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Return the text up to the first stop string, found letter by letter, and whether there was one."""
    for end in range(1, len(text) + 1):
        if ended := [stop for stop in stops if stop and text[:end].endswith(stop)]:
            return text[: end - max(map(len, ended))], True
    return text, False


def filtered(chunks: list[str], stops: tuple[str, ...], filter_of: Callable[[tuple[str, ...]], StopFilter]) -> str:
    """Return what is shown of the chunks; what was shown stays true at every step."""
    stop_filter, whole = filter_of(stops), "".join(chunks)
    expected, is_stopped = naive_cut(whole, stops)
    shown = ""
    for chunk in chunks:
        shown += stop_filter.push(chunk)
        assert expected.startswith(shown)
    shown += stop_filter.flush()
    assert stop_filter.stopped == is_stopped
    return shown


texts = st.text("ab", max_size=12)
stop_strings = st.lists(st.text("ab", max_size=4), max_size=4).map(tuple)


@given(st.lists(texts, max_size=8), stop_strings)
@example(["abbab", "b"], ("bb", "abbabb"))
@example(["a", "b", "a", "b", "b"], ("ababb", "ba"))
def test_the_cut_is_that_of_the_whole_text_wherever_its_chunks_end(chunks: list[str], stops: tuple[str, ...]) -> None:
    assert filtered(chunks, stops, StopFilter) == naive_cut("".join(chunks), stops)[0]


@given(st.text("ab", max_size=30), stop_strings, st.integers(1, 5))
def test_no_more_is_held_back_than_the_longest_stop_string_less_a_letter(
    text: str, stops: tuple[str, ...], size: int
) -> None:
    stop_filter = StopFilter(stops)
    shown = 0
    for at in range(0, len(text), size):
        shown += len(stop_filter.push(text[at : at + size]))
        if stop_filter.stopped:
            return
        assert min(at + size, len(text)) - shown <= max((len(stop) - 1 for stop in stops if stop), default=0)


def test_after_the_stop_nothing_more_is_shown() -> None:
    stop_filter = StopFilter(("x",))
    assert [stop_filter.push("ax"), stop_filter.push("b"), stop_filter.flush()] == ["a", "", ""]
    assert stop_filter.stopped


def test_of_stop_strings_that_end_together_the_longest_cuts() -> None:
    assert filtered(["12abc"], ("bc", "abc", "c"), StopFilter) == "12"
