"""Answers as OpenAI clients read them; and stop strings, wherever chunks of text end."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from kv_protocol.openai import ChatRequest, CompletionRequest
from worker_agent.core.answers import SSE_DONE, Answer, StopFilter, sse_error, usage

CREATED = 1_700_000_000
CHAT = Answer(ChatRequest(model="m", messages=[]), "7", CREATED)
COMPLETION = Answer(CompletionRequest(model="m", prompt="hi"), "7", CREATED)
USAGE = usage(10, 3, 8)


def data_of(event: bytes) -> dict[str, Any]:
    """Return the JSON of exactly one server-sent event."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert b"\n" not in event[6:-2]
    decoded: dict[str, Any] = msgspec.json.decode(event[6:-2])
    return decoded


def chat_chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {
        "id": "chatcmpl-7",
        "created": CREATED,
        "model": "m",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
    }


def completion_chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {
        "id": "cmpl-7",
        "created": CREATED,
        "model": "m",
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}],
    }


# -------------------------------------------------------------------- answers
def test_a_chat_s_stream_opens_with_the_role_and_a_completion_s_with_nothing() -> None:
    assert data_of(CHAT.opening()) == chat_chunk({"role": "assistant", "content": ""})
    assert COMPLETION.opening() == b""


@pytest.mark.parametrize("text", ["hi", "", "two\nlines\r\n", 'quote " and \\', "\u2028 é 😀"])
def test_text_goes_out_as_one_event_whatever_is_in_it(text: str) -> None:
    assert data_of(CHAT.delta(text)) == chat_chunk({"content": text})
    assert data_of(COMPLETION.delta(text)) == completion_chunk(text)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_closes_with_the_reason(reason: str) -> None:
    assert data_of(CHAT.closing(reason)) == chat_chunk({}, reason)
    assert data_of(COMPLETION.closing(reason)) == completion_chunk("", reason)


@pytest.mark.parametrize("answer", [CHAT, COMPLETION])
def test_the_usage_comes_in_an_event_of_its_own_without_choices(answer: Answer) -> None:
    opened = data_of(answer.delta("x"))
    assert data_of(answer.usage_event(USAGE)) == {**opened, "choices": [], "usage": USAGE}


def test_a_whole_chat_answer() -> None:
    assert msgspec.json.decode(CHAT.whole("hi", "stop", USAGE)) == {
        "id": "chatcmpl-7",
        "created": CREATED,
        "model": "m",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def test_a_whole_completion() -> None:
    whole = {**completion_chunk("hi", "length"), "usage": USAGE}
    assert msgspec.json.decode(COMPLETION.whole("hi", "length", USAGE)) == whole


def test_usage_says_how_much_of_the_prompt_was_reused() -> None:
    assert usage(10, 3, 8) == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_the_end_of_a_stream_and_an_error_in_it() -> None:
    assert SSE_DONE == b"data: [DONE]\n\n"
    assert sse_error(b'{"error":{}}') == b'data: {"error":{}}\n\n'


# -------------------------------------------------------------------- stop strings
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


@pytest.mark.parametrize("chunks", [["abc", "END", "def"], ["abcE", "N", "Ddef"], ["abcENDdef"], [*"abcENDdef"]])
def test_a_stop_string_is_found_across_chunk_borders(chunks: list[str]) -> None:
    assert filtered(chunks, ("END",), StopFilter) == "abc"


def test_what_looked_like_the_beginning_of_a_stop_string_is_shown_when_it_was_none() -> None:
    stop_filter = StopFilter(("END",))
    assert [stop_filter.push(text) for text in ("abE", "N", "x", "EN")] == ["ab", "", "ENx", ""]
    assert (stop_filter.flush(), stop_filter.stopped) == ("EN", False)


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    for stops in ((), ("",)):
        stop_filter = StopFilter(stops)
        assert (stop_filter.push("abc"), stop_filter.flush(), stop_filter.stopped) == ("abc", "", False)


def test_after_the_stop_nothing_more_is_shown() -> None:
    stop_filter = StopFilter(("x",))
    assert [stop_filter.push("ax"), stop_filter.push("b"), stop_filter.flush()] == ["a", "", ""]
    assert stop_filter.stopped


def test_of_stop_strings_that_end_together_the_longest_cuts() -> None:
    assert filtered(["12abc"], ("bc", "abc", "c"), StopFilter) == "12"


class CutsAtTheFirstBeginning(StopFilter):
    """Planted bug: where it cuts depends on where chunks end."""

    def push(self, text: str) -> str:
        at = min((at for stop in self._stops if (at := (self._held + text).find(stop)) >= 0), default=-1)
        if self.stopped or at < 0:
            return super().push(text)
        self.stopped = True
        return (self._held + text)[:at]


class HoldsNothingBack(StopFilter):
    """Planted bug: does not look across chunk borders."""

    def push(self, text: str) -> str:
        return super().push(text) + self.flush()


@pytest.mark.parametrize("planted", [CutsAtTheFirstBeginning, HoldsNothingBack])
def test_the_property_fails_on_a_planted_bug(planted: type[StopFilter]) -> None:
    @settings(max_examples=1000, database=None, derandomize=True, phases=[Phase.generate])
    @given(st.lists(texts, max_size=8), stop_strings)
    def search(chunks: list[str], stops: tuple[str, ...]) -> None:
        assert filtered(chunks, stops, planted) == naive_cut("".join(chunks), stops)[0]

    with pytest.raises(AssertionError):
        search()
