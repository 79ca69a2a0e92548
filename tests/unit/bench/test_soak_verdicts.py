"""A soak is judged by its figures: what is planted in them must be found, and nothing else."""

from collections import Counter
from random import Random

import pytest

from bench.soak.clients import AnswerOutcome, Tally
from bench.soak.requests import KINDS, Kind
from bench.soak.verdicts import Quiet, ResourceSample, Soak, growth, problems

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
