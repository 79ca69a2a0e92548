"""`router bench index`, as it is typed; what its processes measure; what it says of figures."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.index.cells import FILL_SEED, WORK
from bench.index.command import IndexPlan, cells, tables, verdicts
from bench.index.subjects import ScheduledRequest, chain, pack, subject, write_requests
from bench.routing.trace import PrefixTree
from bench.tables import Rounds
from router.__main__ import main

TINY = ("--peer-python", "no-such-python", "--quick", "--core", "-1")


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "index", *arguments])


def test_json_names_the_machine_the_commit_and_the_missing_peer(tmp_path: Path) -> None:
    written, markdown = tmp_path / "found.json", tmp_path / "found.md"
    ran = typed(*TINY, "--only", "memory", "--json", str(written), "--markdown", str(markdown))
    assert ran.exit_code == 0, ran.output
    told = json.loads(written.read_bytes())
    assert "cores" in told["facts"][0]
    assert told["facts"][1].startswith("commit ")
    assert told["peer"] == "absent (no-such-python: No such file or directory)"
    assert {(each["cell"], each["subject"], len(each["rounds"])) for each in told["cells"]} >= {
        ("memory, holders 16", "buffers", 1),
    }
    assert "### Memory, bytes a unique block" in markdown.read_text()


def small(file: Path) -> dict[str, dict[str, Any]]:
    """Return parameters of every kind of work, as small as they go."""
    blocks = 1024
    trace = {"file": str(file), "ranks": 2, "cache_blocks": 8}
    return {
        "events": {"index_blocks": blocks, "sizes": [(64, 512), (512, 512)]},
        "match": {"depth": 8, "holders": 2, "calls": 10},
        "cold match": {"index_blocks": blocks, "calls": 2},
        "trace": trace,
        "trace answers": trace,
        "memory": {"blocks": blocks, "holders": 2},
        "bulk": {"blocks": blocks, "capacity_blocks": 2 * blocks, "calls": 2, "round_blocks": 512},
    }


FOUND = {
    "events": {"stored 64", "removed 64", "stored 512", "removed 512"},
    "match": {"match"},
    "cold match": {"match"},
    "trace": {"trace"},
    "trace answers": {"answers", "wrong"},
    "memory": {"resident"},
    "bulk": {"build", "resident", "match", "stored"},
}


@pytest.mark.parametrize("shape", ["buffers", "lists"])
@pytest.mark.parametrize("work", FOUND)
def test_every_kind_of_work_has_its_figures(tmp_path: Path, work: str, shape: str) -> None:
    file = tmp_path / "schedule"
    write_requests(
        file, iter([ScheduledRequest(1, 0, pack([1, 2]), b""), ScheduledRequest(1, 1, pack([1, 3]), pack([2]))])
    )
    round_of = WORK[work](subject("native", shape), **small(file)[work])
    for seed in (1, 2):
        assert set(round_of(seed)) == FOUND[work]
    assert set(FOUND) == set(WORK)


def test_an_index_is_as_before_once_its_events_are_removed() -> None:
    of = subject("native", "buffers")
    WORK["events"](of, index_blocks=1024, sizes=[(8, 512), (64, 1024)])(7)
    assert of.depths(chain(FILL_SEED, 0)) == {0: 512}
    assert of.depths(chain(FILL_SEED, 1)) == {1: 512}
    assert of.depths(chain(7, 0)) == {}
    assert of.index.statistics().held_blocks == 1024  # type: ignore[union-attr]


def test_a_cache_lets_go_of_what_was_used_longest_ago_and_of_a_block_before_its_parent() -> None:
    tree = PrefixTree()
    tree.insert((1, 2, 3))
    tree.insert((1, 4))
    assert (tree.evict(2), tree.depth((1, 2, 3)), tree.depth((1, 4))) == ([3, 2], 1, 2)


def measured(ours: float, peer: float, wrong: int = 0) -> Rounds:
    """Return results of every cell: what we cost, what the peer costs, how many answers of ours are wrong."""
    made = Rounds()
    for cell in cells(IndexPlan(schedule={}, is_huge=True)):
        names = {f"{each} {size}" for each in ("stored", "removed") for size in (1, 8, 64, 512)} | FOUND[cell.work]
        for seat in cell.seats:
            figures = dict.fromkeys(names, peer if seat == "peer" else ours) | {"wrong": 7 if seat == "peer" else wrong}
            made.add(seat, cell.name, {name: figures[name] for name in names})
    return made


def test_an_index_that_is_good_enough_reaches_every_target_and_one_that_is_not_misses_all() -> None:
    assert {each.holds for each in verdicts(measured(1, 25))} == {True}
    assert {each.holds for each in verdicts(measured(9, 9, wrong=1))} == {False}


def test_without_a_peer_its_targets_are_not_judged_and_the_tables_say_so() -> None:
    alone = Rounds()
    alone.add("buffers", "trace, answers", {"wrong": 0})
    assert [each.holds for each in verdicts(alone) if each.target != "wrong answers"] == [None] * 9
    assert tables(alone)[0].rows == [("trace, answers", "wrong", "0", "-", "-", "-", "-", "-", "-")]
