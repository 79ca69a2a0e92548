"""A choice's text and tokens, whatever comes at once and wherever stop strings end."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from kv_runtime.text.byte_model import ByteText
from worker_agent.api.choice_text import ChoiceText, Piece, StopFilter, TokenSpan
from worker_agent.api.parsers.calls import AnswerOptions, AnswerParser, ContentDelta
from worker_agent.port.sampling import TokenLogprob, TokenLogprobs
from worker_agent.port.types import EngineOutput

few_letters = st.lists(st.text("ab", max_size=4), max_size=4)


@given(st.text("ab", max_size=30), few_letters, st.integers(1, 5))
def test_no_more_is_held_back_than_the_longest_stop_string_less_a_letter(
    text: str, stops: list[str], size: int
) -> None:
    stop_filter = StopFilter(tuple(stops))
    shown = 0
    for at in range(0, len(text), size):
        shown += len(stop_filter.push(text[at : at + size]))
        if stop_filter.stopped:
            return
        assert min(at + size, len(text)) - shown <= max((len(stop) - 1 for stop in stops if stop), default=0)


TEXT = ByteText()
END = min(TEXT.eos_ids)


def place(token: int) -> TokenLogprobs:
    return TokenLogprobs(chosen=TokenLogprob(token_id=token, logprob=-token / 100))


def output(tokens: Sequence[int], finish_reason: str | None = None) -> EngineOutput:
    return EngineOutput(
        token_ids=tuple(tokens),
        cached_tokens=0,
        finish_reason=finish_reason,  # type: ignore[arg-type]
        logprobs=tuple(place(token) for token in tokens),
    )


def outputs(tokens: Sequence[int], cuts: Iterable[int], finish_reason: str = "length") -> list[EngineOutput]:
    """Return the tokens in as many outputs as `cuts` make, the last of which says how the choice ended."""
    at = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    parts = [tokens[begin:end] for begin, end in pairwise(at)]
    return [*(output(part) for part in parts[:-1]), output(parts[-1], finish_reason)]


class Told(NamedTuple):
    """All of an answer."""

    text: str
    places: list[TokenSpan]
    finish_reason: str | None


def choice_text(stops: tuple[str, ...], *, with_logprobs: bool) -> ChoiceText:
    return ChoiceText(0, TEXT, stops, AnswerParser("a", AnswerOptions()), with_logprobs=with_logprobs)


def told(given_: Iterable[EngineOutput], stops: Sequence[str]) -> Told:
    choice = choice_text(tuple(stops), with_logprobs=True)
    pieces: list[Piece] = []
    for each in given_:
        pieces.append(choice.push(each))
        if choice.is_over:
            break
    places = [each for piece in pieces for each in piece.spans]
    return Told("".join(piece.content for piece in pieces), places, pieces[-1].finish_reason)


def expected(tokens: Sequence[int], stops: Sequence[str]) -> Told:
    """Return what is told of tokens when all of the text is known: the cut is where the first stop string ends."""
    text = TEXT.decode(tokens)
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop and stop in text]
    cut = len(text) if not ends else min(ends)[0] + min(ends)[1]
    spans = spans_of(tokens)
    shown = [TokenSpan(token, start, place(token)) for token, start, end in spans if end <= cut or start < cut]
    if not ends:
        shown = [TokenSpan(token, start, place(token)) for token, start, _ in spans]
    return Told(text[:cut], shown, "stop" if ends else "length")


def spans_of(tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return each token with begin and end of its text: that of the first prefix that has more whole characters."""
    lengths = [len(prefix(tokens, at)) for at in range(len(tokens) + 1)]
    whole = len(TEXT.decode(tokens))
    spans = []
    for at, token in enumerate(tokens):
        longer = next((length for length in lengths[at + 1 :] if length > lengths[at]), whole)
        spans.append((token, lengths[at], longer if longer > lengths[at] else whole + 1))
    return spans


def prefix(tokens: Sequence[int], count: int) -> str:
    detokenizer = TEXT.detokenizer()
    return detokenizer.push(tokens[:count])


letters = st.lists(st.sampled_from([*b"abc", *"é€".encode(), END]), max_size=14)
texts = (st.text("abcé€", max_size=10) | st.text("ab", max_size=30)).map(lambda text: list(text.encode()))
cuts = st.lists(st.integers(0, 30), max_size=6)
stop_strings = st.lists(st.text("abcé€", min_size=1, max_size=3), max_size=3) | few_letters


@given(texts | letters, cuts, stop_strings)
@example(list(b"abbabb"), [5], ["bb", "abbabb"])
@example(list(b"ababb"), [1, 2, 3, 4], ["ababb", "ba"])
@example(list(b"12abc"), [], ["bc", "abc", "c"])  # they end together: the longest cuts
@example(list("a€".encode()), [2, 3], ["€"])
@example([97, END], [1], [])
@example([0xE2, 0x82], [1], [])
def test_text_and_tokens_do_not_depend_on_what_came_at_once(tokens: list[int], at: list[int], stops: list[str]) -> None:
    assert told(outputs(tokens, at), stops) == expected(tokens, stops)


def test_the_tokens_are_counted_up_to_the_one_that_completes_a_stop_string() -> None:
    choice = choice_text(("bc",), with_logprobs=False)
    piece = choice.push(output(list(b"abcdef")))
    assert (piece.content, piece.finish_reason, choice.tokens) == ("a", "stop", 3)


def test_a_choice_that_is_over_says_nothing_more() -> None:
    choice = choice_text(("b",), with_logprobs=True)
    choice.push(output(list(b"ab")))
    assert (choice.push(output(list(b"cd"), "length")), choice.tokens) == (Piece(), 2)


def test_without_log_probabilities_no_token_is_told() -> None:
    choice = choice_text((), with_logprobs=False)
    assert choice.push(output(list(b"ab"), "stop")) == Piece(events=(ContentDelta("ab"),), finish_reason="stop")


def test_tokens_of_which_nothing_is_known_are_told_all_the_same() -> None:
    choice = choice_text((), with_logprobs=True)
    bare = EngineOutput(token_ids=(97, 98), cached_tokens=0, finish_reason="stop", logprobs=(place(97),))
    assert choice.push(bare).spans == (TokenSpan(97, 0, place(97)), TokenSpan(98, 1, None))
