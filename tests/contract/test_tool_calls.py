"""Every family's golden answers give the same however they are cut, and hold back nothing that could be shown."""

import random

import pytest

from tests.support.planting import plant
from tests.support.tool_calls import Case, fed, golden_cases, parsed, read_of
from worker_agent.api.parsers.calls import Event, joined
from worker_agent.api.parsers.reader import Reader

CASES = golden_cases()
SPOILT = 30
SEED = 20261122

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.name}")


@each_case
def test_an_answer_in_one_piece_is_read(case: Case) -> None:
    parser = case.parser()
    assert read_of(parsed(parser, [case.text])) == case.read
    assert parser.has_open_call == case.is_open
    assert parser.finish_reason("stop") == case.finish_reason
    assert parser.finish_reason("length") == "length"


@each_case
def test_a_cut_anywhere_changes_nothing(case: Case) -> None:
    whole = parsed(case.parser(), [case.text])
    for at in range(len(case.text) + 1):
        assert parsed(case.parser(), [case.text[:at], case.text[at:]]) == whole, f"cut at {at}"
    assert parsed(case.parser(), list(case.text)) == whole


@each_case
def test_what_is_shown_depends_on_the_text_so_far_alone(case: Case) -> None:
    letter_by_letter, shown = case.parser(), list[Event]()
    for at, letter in enumerate(case.text, 1):
        shown = joined([*shown, *letter_by_letter.feed(letter)])
        assert shown == fed(case.parser(), [case.text[:at]]), f"after {at} characters"


@each_case
def test_spoilt_answers_are_read_alike_however_they_are_cut(case: Case) -> None:
    draw = random.Random(f"{SEED} {case.family} {case.name}")
    for _ in range(SPOILT):
        at, length = draw.randrange(len(case.text)), draw.randrange(12)
        other = draw.choice(CASES).text
        begin = draw.randrange(len(other))
        spoilt = case.text[:at] + other[begin : begin + draw.randrange(24)] + case.text[at + length :]
        whole = parsed(case.parser(), [spoilt])
        assert parsed(case.parser(), list(spoilt)) == whole, f"seed {SEED}: {spoilt!r}"
        read_of(whole)


@pytest.mark.planted
def test_a_parser_that_misses_a_marker_cut_in_two_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(Reader, "_open_at", lambda _self, _markers, end: end, monkeypatch)
    case = next(each for each in CASES if each.read.tool_calls)
    with pytest.raises((AssertionError, StopIteration)):
        test_a_cut_anywhere_changes_nothing(case)
