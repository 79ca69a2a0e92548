"""`router bench index`, as it is typed; the processes that it measures in; what the peer is told."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.index.cells import FILL_SEED
from bench.index.child import WORK, make
from bench.index.data import ScheduledRequest, chain, pack, write_requests
from bench.index.subjects import subject
from router.__main__ import main

TINY = ("--peer-python", "no-such-python", "--quick", "--core", "-1")


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "index", *arguments])


def test_json_names_the_machine_the_commit_and_the_missing_peer() -> None:
    ran = typed(*TINY, "--only", "control", "--json", "-")
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert {"machine", "commit", "cells", "verdicts"} <= set(told)
    assert told["peer"] == "ai-dynamo-runtime absent (no-such-python: No such file or directory)"
    assert [(each["cell"], each["seat"], len(each["rounds"])) for each in told["cells"]] == [
        ("the same index twice", "buffers", 2),
        ("the same index twice", "twin", 2),
        ("one block that no rank has", "buffers", 2),
        ("one block that no rank has", "lists", 2),
        ("an event without blocks", "buffers", 2),
        ("an event without blocks", "lists", 2),
    ]


def small(file: Path) -> dict[str, dict[str, object]]:
    """Return parameters of every kind of work, as small as they go."""
    blocks = 1024
    trace = {"file": str(file), "ranks": 2, "cache_blocks": 8}
    return {
        "events": {"index_blocks": blocks, "sizes": [(64, 512), (512, 512)]},
        "match": {"depth": 8, "holders": 2, "calls": 10},
        "no event": {"calls": 10},
        "cold match": {"index_blocks": blocks, "calls": 2},
        "trace": trace,
        "trace answers": trace,
        "memory": {"blocks": blocks, "holders": 2},
        "bulk": {"blocks": blocks, "capacity_blocks": 2 * blocks, "calls": 2, "round_blocks": 512},
        "exact": {"name": "hole"},
        "hash": {"tokens": 64, "block_size": 16, "calls": 10},
        "limit": {"kind": "empty call", "size_bytes": 0, "operations": 10},
    }


FOUND = {
    "events": {"stored 64", "removed 64", "stored 512", "removed 512"},
    "match": {"match"},
    "no event": {"told"},
    "cold match": {"match"},
    "trace": {"trace"},
    "trace answers": {"answers", "wrong"},
    "memory": {"resident", "told"},
    "bulk": {"build", "resident", "told", "match", "stored"},
    "exact": {"depth", "errors"},
    "hash": {"hash"},
    "limit": {"limit"},
}


@pytest.mark.parametrize("shape", ["buffers", "lists"])
@pytest.mark.parametrize("work", FOUND)
def test_every_kind_of_work_finds_what_the_tables_look_for(tmp_path: Path, work: str, shape: str) -> None:
    file = tmp_path / "schedule"
    write_requests(
        file, iter([ScheduledRequest(1, 0, pack([1, 2]), b""), ScheduledRequest(1, 1, pack([1, 3]), pack([2]))])
    )
    cell = make("native", {"work": work, "shape": shape, "parameters": small(file)[work]})
    for seed in (1, 2):
        assert set(cell.round(seed)) - {"limit"} == FOUND[work] - {"limit"}
    assert set(FOUND) == {*WORK, "hash", "limit"}


def test_an_index_is_as_before_once_its_events_are_removed() -> None:
    of = subject("native", "buffers")
    cell = WORK["events"](of, index_blocks=1024, sizes=[(8, 512), (64, 1024)], is_leaf_first=True)
    cell.round(7)
    assert of.depths(chain(FILL_SEED, 0)) == {0: 512}
    assert of.depths(chain(FILL_SEED, 1)) == {1: 512}
    assert of.depths(chain(7, 0)) == {}
    assert of.index.statistics().held_blocks == 1024  # type: ignore[attr-defined]
