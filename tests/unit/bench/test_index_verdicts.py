"""What the index bench makes of its figures: medians, verdicts, tables, Markdown, JSON."""

from typing import Any

import pytest

from bench.index.exact import SCENARIOS
from bench.index.plan import SEATS, IndexCell, IndexPlan, cells
from bench.index.report import IndexFacts
from bench.index.results import CPU, WALL, IndexResults
from bench.index.verdicts import verdicts

PLAN = IndexPlan(schedule="file", is_huge=True)
FACTS = IndexFacts("a machine", "abc", "ai-dynamo-runtime 1", 1, 3, 1.0, "none")
TIMED = {
    "match": ("match",),
    "cold match": ("match",),
    "trace": ("trace",),
    "bulk": ("build", "match", "stored"),
    "hash": ("hash",),
    "no event": ("told",),
}
NUMBERS = {
    "memory": ("resident", "told"),
    "bulk": ("resident", "told"),
    "limit": ("limit",),
    "trace answers": ("answers",),
}


def found(cell: IndexCell, cost: float, wrong: int) -> dict[str, Any]:
    """Return what a round of a cell finds where everything costs `cost`."""
    told: dict[str, Any] = {name: [cost * 10, cost * 20, 10] for name in TIMED.get(cell.work, ())}
    told |= dict.fromkeys(NUMBERS.get(cell.work, ()), cost)
    if cell.work == "events":
        sizes = [size for size, _ in cell.parameters["sizes"]]
        told |= {f"{name} {size}": [cost * 10, cost * 20, 10] for size in sizes for name in ("stored", "removed")}
    if cell.work == "exact":
        scenario = SCENARIOS.get(cell.name)
        told |= {"errors": wrong} | ({"depth": scenario.depth + wrong} if scenario else {"wrong": wrong, "answers": 9})
    return told | ({"wrong": wrong} if cell.work == "trace answers" else {})


def results(ours: float, peer: float, *, wrong: int = 0, limit: float = 1.0, without: str = "") -> IndexResults:
    """Return results of every cell: what we cost, what the peer costs, how many answers of ours are wrong."""
    made = IndexResults()
    for cell in cells(PLAN):
        for seat in cell.seats:
            if SEATS[seat].process == without:
                continue
            is_peer = SEATS[seat].process == "peer"
            told = found(cell, peer if is_peer else ours, 7 if is_peer else wrong)
            made.add(cell, seat, {"limit": limit} | told)
    return made


def said(made: IndexResults) -> dict[str, bool | None]:
    return {verdict.target: verdict.holds for verdict in verdicts(made)}


def test_a_figure_is_the_median_of_rounds_by_operation() -> None:
    made = IndexResults()
    cell = IndexCell("group", "name", "work", {}, (), 3)
    for cpu_ns, plain in ((30, 1), (10, 5), (20, 2)):
        made.add(cell, "us", {"time": [cpu_ns, 10 * cpu_ns, 10], "plain": plain})
    assert made.figure("group", "name", "us", "time") == 2.0
    assert made.figure("group", "name", "us", "plain") == 2.0
    assert made.total("group", "name", "us", "time", CPU) == 20
    assert made.total("group", "name", "us", "time", WALL) == 200
    assert made.count("group", "name", "us", "plain") == 8
    assert made.sections("group", "name") == ["time", "plain"]
    for seat, section in (("us", "other"), ("other", "time")):
        assert made.figure("group", "name", seat, section) is None
        assert made.ratio("group", "name", "time", ("us", seat)) == (1.0 if seat == "us" else None)


def test_everything_is_reached_by_an_index_that_is_good_enough() -> None:
    assert set(said(results(ours=1, peer=25)).values()) == {True}


def test_everything_is_missed_by_an_index_that_is_not() -> None:
    holds = {target for target, each in said(results(ours=9, peer=9, wrong=1)).items() if each}
    assert holds == {"control: the same index twice", "control: no match is faster than comparing its bytes"}


def test_a_match_that_beats_the_comparison_of_its_bytes_is_told() -> None:
    assert said(results(ours=1, peer=25, limit=1.01))["control: no match is faster than comparing its bytes"] is False


def test_one_wrong_answer_in_one_round_of_a_storm_is_a_miss() -> None:
    made = results(ours=1, peer=25)
    made.rounds["exact", "orderly", "buffers"] = [{"wrong": wrong, "answers": 9} for wrong in (0, 1, 0)]
    assert said(made)["exact: wrong answers"] is False


@pytest.mark.parametrize(
    ("peer", "reached"),
    [(12, {"staircase", "stored 64"}), (10, {"trace replay, buffers"}), (8, {"removed 64"}), (6, {"lists and dicts"})],
)
def test_a_target_is_reached_from_its_very_figure_on(peer: int, reached: set[str]) -> None:
    exactly, less = said(results(ours=1, peer=peer)), said(results(ours=1, peer=peer - 0.01))
    for target in reached:
        (name,) = (each for each in exactly if target in each and not each.startswith("match, lists"))
        assert (exactly[name], less[name]) == (True, False)


def test_without_the_peer_nothing_is_said_of_it() -> None:
    alone = said(results(ours=1, peer=25, without="peer"))
    assert {target for target, each in alone.items() if each is None} == {
        target for target in alone if "the peer's" in target
    }
    assert all(each is not False for each in alone.values())
