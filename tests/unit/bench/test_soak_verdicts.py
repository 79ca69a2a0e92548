"""Answers of a soak are judged by what they must say, and the soak by its figures: what is planted must be found."""

import json
from collections import Counter
from random import Random

import pytest

from bench.soak.clients import AnswerOutcome, SoakAnswer, Tally, judged, judged_when_left
from bench.soak.requests import KINDS, REFUSED, Kind, SoakRequest
from bench.soak.verdicts import Quiet, ResourceSample, Soak, growth, problems

BY_NAME = {kind.name: kind for kind in (*KINDS, REFUSED)}
WHOLE, STREAMED, TWO = BY_NAME["completion"], BY_NAME["completion, streamed"], BY_NAME["stream of two choices"]


def request(kind: Kind, *texts: str, status: int = 200) -> SoakRequest:
    return SoakRequest(kind, texts=texts, tokens=len(texts[0]) if texts else 0, status=status)


def framed(status: int, body: bytes) -> SoakAnswer:
    found = SoakAnswer()
    found.status, found.payload = status, bytearray(body)
    return found


def chunked(*events: object) -> SoakAnswer:
    data = (f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n".encode() for each in events)
    return framed(200, b"".join(data))


def said(text: str, index: int = 0, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish_reason}]}


def usage(tokens: int) -> dict[str, object]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


GOOD = chunked(said("ab"), said("c"), said("", finish_reason="length"), usage(3), "[DONE]")


def test_a_stream_is_right_with_its_text_reason_usage_and_end() -> None:
    assert judged(request(STREAMED, "abc"), GOOD) is AnswerOutcome.RIGHT


@pytest.mark.parametrize(
    "events",
    [
        (said("ab"), said("d"), said("", finish_reason="length"), usage(3), "[DONE]"),
        (said("ab"), said("c"), said("c", finish_reason="length"), usage(3), "[DONE]"),
        (said("abc"), usage(3), "[DONE]"),
        (said("abc", finish_reason="stop"), usage(3), "[DONE]"),
        (said("abc", finish_reason="length"), usage(2), "[DONE]"),
        (said("abc", finish_reason="length"), "[DONE]"),
        (said("abc", finish_reason="length"), usage(3)),
        (said("abd"), {"error": {"message": "it died"}}, "[DONE]"),
        (said("ab"), {"error": {"message": "it died"}}),
        ("{",),
    ],
    ids=["text", "twice", "no reason", "reason", "usage", "no usage", "no end", "error", "error, no end", "no JSON"],
)
def test_a_stream_that_says_something_else_is_wrong(events: tuple[object, ...]) -> None:
    assert judged(request(STREAMED, "abc"), chunked(*events)) is AnswerOutcome.WRONG


def test_an_error_event_behind_the_right_beginning_is_an_honest_end() -> None:
    events = (said("ab"), {"error": {"message": "it died"}}, "[DONE]")
    assert judged(request(STREAMED, "abc"), chunked(*events)) is AnswerOutcome.ERROR_EVENT


def test_each_choice_is_compared_with_its_own_text() -> None:
    events = [said("a", 0), said("x", 1), said("b", 0, "length"), said("y", 1, "length"), usage(4), "[DONE]"]
    assert judged(request(TWO, "ab", "xy"), chunked(*events)) is AnswerOutcome.RIGHT
    assert judged(request(TWO, "ab", "yx"), chunked(*events)) is AnswerOutcome.WRONG


def test_a_whole_answer_is_compared_too() -> None:
    body = json.dumps(usage(3) | said("abc", finish_reason="length")).encode()
    assert judged(request(WHOLE, "abc"), framed(200, body)) is AnswerOutcome.RIGHT
    assert judged(request(WHOLE, "abd"), framed(200, body)) is AnswerOutcome.WRONG


def test_a_refusal_is_due_only_with_the_status_that_the_request_deserves() -> None:
    error = b'{"error": {"message": "max_tokens: found -1"}}'
    bad = request(REFUSED, status=400)
    assert judged(bad, framed(400, error)) is AnswerOutcome.REFUSED
    assert judged(bad, framed(404, error)) is AnswerOutcome.FAILED
    assert judged(bad, framed(400, b"{}")) is AnswerOutcome.WRONG
    assert judged(request(WHOLE, "abc"), framed(400, error)) is AnswerOutcome.FAILED


def test_what_came_before_a_client_left_must_be_right() -> None:
    for text, outcome in {"ab": AnswerOutcome.LEFT, "ax": AnswerOutcome.WRONG}.items():
        begun = chunked(said(text), said("c"))
        del begun.payload[-20:]
        assert judged_when_left(request(STREAMED, "abc"), begun) is outcome


MIB = 1 << 20
STREAM = next(kind for kind in KINDS if kind.can_migrate)
TWO_CHOICES = next(kind for kind in KINDS if kind.choices == 2)


def tally(*odd: tuple[Kind, AnswerOutcome, bool]) -> Tally:
    """Return that of ten thousand right answers and of some `odd` ones: kind, outcome, was hit."""
    counted = Tally()
    for kind, outcome, was_hit in [(STREAM, AnswerOutcome.RIGHT, False)] * 10_000 + list(odd):
        counted.add(kind, outcome, tokens=4, took_s=0.01, was_hit=was_hit, detail="some bytes")
    return counted


def took(rss_bytes: int = 100 * MIB, descriptors: int = 21, threads: int = 7) -> ResourceSample:
    return ResourceSample(rss_bytes, descriptors, threads, 0.0)


def moments(**planted: object) -> list[Quiet]:
    """Return ten quiet moments of a good run; `planted`: a figure, or a function of the moment's number."""
    found = []
    for number in range(1, 11):
        now = {name: each(number) if callable(each) else each for name, each in planted.items()}
        metrics = Counter[str]({"http_connections": 64, "journal_unpublished_records": 2})
        metrics.update(now.pop("metrics", {}))  # type: ignore[arg-type]
        figures: dict[str, object] = {"router": took(), "nats": took(), "workers": {"w0": took(), "w7": took()}}
        figures |= {"metrics": metrics, "clients": 64, "store_bytes": MIB, "verified": ""}
        found.append(Quiet(requests=number * 1000, **(figures | now)))  # type: ignore[arg-type]
    return found


def found(quiet: list[Quiet] | None = None, counted: Tally | None = None, **other: object) -> list[str]:
    figures: dict[str, object] = {"faults": [], "complaints": [], "leases_peak": 64.0, "users": 64, "steady": ["w0"]}
    soak = Soak(counted or tally(), quiet=moments() if quiet is None else quiet, **(figures | other))  # type: ignore[arg-type]
    return problems(soak)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    draw = Random(3)
    noisy = moments(
        router=lambda _: took(100 * MIB + draw.randrange(2 * MIB), draw.choice((21, 22)), draw.choice((7, 8)))
    )
    assert found(noisy) == []


@pytest.mark.parametrize(
    "outcome",
    [
        AnswerOutcome.CUT,
        AnswerOutcome.WRONG,
        AnswerOutcome.HUNG,
        AnswerOutcome.FAILED,
        AnswerOutcome.TURNED_AWAY,
        AnswerOutcome.ERROR_EVENT,
    ],
)
def test_one_lost_request_in_ten_thousand_is_found(outcome: AnswerOutcome) -> None:
    (problem,) = found(counted=tally((STREAM, outcome, False)))
    assert problem.startswith(f"1 requests lost: {outcome}")
    assert "some bytes" in problem


@pytest.mark.parametrize(
    ("kind", "was_hit", "is_excused"),
    [(TWO_CHOICES, True, True), (TWO_CHOICES, False, False), (STREAM, True, False)],
    ids=["could not migrate", "its worker lived", "could migrate"],
)
def test_an_error_event_is_excused_only_of_a_killed_worker_s_stream_that_could_not_migrate(
    kind: Kind, *, was_hit: bool, is_excused: bool
) -> None:
    assert bool(found(counted=tally((kind, AnswerOutcome.ERROR_EVENT, was_hit)))) is not is_excused


def test_a_descriptor_leaked_for_each_fault_is_found() -> None:
    (problem,) = found(moments(router=lambda number: took(descriptors=20 + number)))
    assert "router: descriptors grew by 9" in problem


def test_a_leaked_thread_and_leaked_memory_of_a_worker_are_found() -> None:
    leaking = moments(workers=lambda number: {"w0": took((100 + 2 * number) * MIB, threads=9 + number)})
    assert [problem.split(" grew")[0] for problem in found(leaking)] == ["w0: resident memory, bytes", "w0: threads"]


def test_a_router_whose_bounded_memories_fill_may_grow_in_a_short_run_and_not_without_end() -> None:
    assert found(moments(router=lambda number: took((100 + 3 * number) * MIB))) == []
    (problem,) = found(moments(router=lambda number: took((100 + 10 * number) * MIB)))
    assert "router: resident memory, bytes grew by" in problem


def test_one_odd_moment_is_no_growth() -> None:
    assert found(moments(router=lambda number: took(200 * MIB if number == 10 else 100 * MIB))) == []


def test_a_leaked_lease_is_found_where_all_is_quiet() -> None:
    problem, *others = found(moments(metrics=lambda number: {"ledger_active_requests": number > 4}))
    assert problem == "quiet after 5,000 requests: ledger_active_requests is 1, 0 allowed"
    assert len(others) == 5


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ({"verified": "exit code 1: w3/0 differs"}, "indexer verify: exit code 1"),
        ({"clients": 60}, "the router has 64 connections, its clients 60"),
        ({"metrics": {"journal_unpublished_records": 5000}}, "records of the journal wait"),
        ({"metrics": {"journal_lost_records_total": 1}}, "journal_lost_records_total is 1"),
        ({"metrics": {"stream_digest_mismatches_total": 1}}, "stream_digest_mismatches_total is 1"),
    ],
)
def test_what_else_may_not_be_is_found(planted: dict[str, object], words: str) -> None:
    problem = found(moments(**planted))[0]
    assert words in problem


def test_growth_is_the_median_slope_over_the_whole_run() -> None:
    assert growth([(float(x), 5.0 + 2 * x) for x in range(10)]) == pytest.approx(18.0)
    assert growth([(0.0, 1.0)]) == 0
