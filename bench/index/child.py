"""`python -m bench.index.child SUBJECT CORE`: the process in which an index is measured. Standard library alone.

    first   {"version": ...}, or {"absent": why} and it ends
    then    one line of JSON asks, one answers, until there is no more to read
    ask     {"make": key, "work": ..., "shape": ..., "parameters": {...}}    a cell is made
            {"round": key, "seed": n}                                        it is run once
            {"drop": key}                                                    it is gone
    answer  what a round found, or {"error": why}

It is pinned to a core, and collects no garbage while it measures.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, TextIO

from bench.index.cells import ColdMatchCell, EventCell, ExactCell, HashCell, LimitCell, MatchCell, NoEventCell, Work
from bench.index.size_cells import BulkCell, MemoryCell
from bench.index.subjects import PEER_PACKAGE, subject
from bench.index.trace_cells import TraceAnswersCell, TraceCell

WORK: dict[str, Callable[..., Work]] = {
    "events": EventCell,
    "match": MatchCell,
    "no event": NoEventCell,
    "cold match": ColdMatchCell,
    "trace": TraceCell,
    "trace answers": TraceAnswersCell,
    "memory": MemoryCell,
    "bulk": BulkCell,
    "exact": ExactCell,
}


def main() -> None:
    """Answer until the other side has nothing more to ask."""
    name, core = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    if core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    try:
        subject(name, "buffers")
        version = metadata.version(PEER_PACKAGE) if name == "peer" else ""
    except ImportError as error:
        _say(answers, {"absent": str(error)})
        return
    _say(answers, {"version": version})
    gc.disable()
    cells: dict[str, Work] = {}
    for line in sys.stdin:
        _say(answers, _answer(name, cells, json.loads(line)))


def _answer(name: str, cells: dict[str, Work], asked: dict[str, Any]) -> dict[str, Any]:
    try:
        if "round" in asked:
            gc.collect()
            return cells[asked["round"]].round(asked["seed"])
        if "drop" in asked:
            del cells[asked["drop"]]
            return {}
        cells[asked["make"]] = make(name, asked)
    except Exception as error:  # noqa: BLE001 - the other side shows it, whatever it is
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def make(name: str, asked: dict[str, Any]) -> Work:
    """Return the cell that is asked for, of the subject `name`."""
    if asked["work"] == "limit":
        return LimitCell(**asked["parameters"])
    if asked["work"] == "hash":
        return HashCell(name, asked["shape"], **asked["parameters"])
    return WORK[asked["work"]](subject(name, asked["shape"]), **asked["parameters"])


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
