"""`router bench index`, as it is typed; the processes that it measures in; what the peer is told."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from bench.index.cells import FILL_SEED
from bench.index.child import WORK, make
from bench.index.data import ScheduledRequest, ScheduledStore, chain, pack, write_requests
from bench.index.subjects import PeerTree, subject
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


@pytest.fixture
def told_to_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, object]]]:
    """The peer's binding, which keeps what it is told; its form was taken from ai-dynamo-runtime 1.6.1."""
    told: list[tuple[int, object]] = []

    class RadixTree:
        def apply_event(self, worker: int, event: bytes) -> None:
            told.append((worker, json.loads(event)))

        def find_matches(self, hashes: list[int]) -> SimpleNamespace:
            return SimpleNamespace(scores={(3, 0): len(hashes), (4, 0): 0})

    module = ModuleType("dynamo._core")
    module.RadixTree = RadixTree  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dynamo", ModuleType("dynamo"))
    monkeypatch.setitem(sys.modules, "dynamo._core", module)
    yield told
    monkeypatch.undo()


def test_the_peer_is_told_the_same_in_its_own_form(told_to_peer: list[tuple[int, object]]) -> None:
    peer = PeerTree()
    peer.fresh(1, 0)
    steps = [
        peer.store(ScheduledStore(3, None, 0, pack([1, 2]))),
        peer.store(ScheduledStore(4, 2, 2, pack([5]))),
        peer.remove(3, pack([2])),
    ]
    for call in peer.bind(steps):
        call()
    (first,) = peer.match(pack([1, 2])).arguments
    blocks = [{"block_hash": each, "tokens_hash": local} for each, local in zip((1, 2), first, strict=True)]
    third = {"block_hash": 5, "tokens_hash": peer.match(pack([5])).arguments[0][0]}
    assert told_to_peer == [
        (3, {"event_id": 1, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}),
        (4, {"event_id": 1, "data": {"stored": {"parent_hash": 2, "blocks": [third]}}}),
        (3, {"event_id": 1, "data": {"removed": {"block_hashes": [2]}}}),
    ]
    assert peer.depths(pack([1, 2])) == {3: 2}
