"""Every family's golden answers give the same however they are cut, and hold back nothing that could be shown."""

import random
from collections.abc import Generator
from typing import Any

import pytest

from tests.support.planting import inside, plant
from tests.support.tool_calls import Case, fed, golden_cases, parsed, read_of
from worker_agent.api.parsers.events import Event, joined
from worker_agent.api.parsers.json_calls import JsonCalls
from worker_agent.api.parsers.reader import Reader
from worker_agent.api.parsers.reasoning import ThinkParser

CASES = golden_cases()
PAIRS = 200
SPOILT = 30
SEED = 20261122

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.name}")


def test_there_are_answers_of_six_families_with_calls_and_without() -> None:
    families = {case.family for case in CASES}
    assert families >= {"hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek_v3", "gpt_oss"}
    for family in families - {"deepseek_v31"}:
        counts = {len(case.read.tool_calls) for case in CASES if case.family == family}
        assert counts >= {0, 1, 2}, family


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
def test_two_cuts_change_nothing(case: Case) -> None:
    draw, whole = random.Random(SEED), parsed(case.parser(), [case.text])
    for _ in range(PAIRS):
        first, second = sorted(draw.choices(range(len(case.text) + 1), k=2))
        chunks = [case.text[:first], case.text[first:second], case.text[second:]]
        assert parsed(case.parser(), chunks) == whole, f"seed {SEED}, cuts at {first} and {second}"


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


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (Reader, "_open_at", lambda _self, _markers, end: end),
        (Reader, "peek", lambda self: _at_once(self._text[self._at : self._at + 1])),
        (JsonCalls, "_string_to", inside(JsonCalls, "_scalar")),
        (ThinkParser, "_content", lambda _self, _text: None),
    ],
    ids=["a marker cut in two is missed", "the end of a chunk is the end", "quotes hide nothing", "content is lost"],
)
@pytest.mark.planted
def test_planted_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, planted: Any) -> None:
    plant(owner, name, planted, monkeypatch)
    seen = []
    for case in CASES:
        for chunks in ([case.text], list(case.text)):
            try:
                seen.append(read_of(parsed(case.parser(), chunks)) != case.read)
            except (AssertionError, StopIteration):
                seen.append(True)
    assert any(seen)


def _at_once(text: str) -> Generator[None, None, str]:
    yield from ()
    return text
