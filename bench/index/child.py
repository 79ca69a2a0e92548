"""The process in which an index is measured: a role as `bench/child.py` has them, of the standard library only.

    first    {"version": ...}, or {"absent": why} and it ends
    make     a cell by its key, of a kind of work, for the shape of the subject, with parameters
    round    run a cell once; the response has its figures
    drop     delete a cell

It is pinned to a core, and collects no garbage while it measures.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, TextIO

from bench.index import cells as works
from bench.index.subjects import PEER_PACKAGE, subject

WORK: dict[str, Callable[..., works.Work]] = {
    "events": works.EventCell,
    "match": works.MatchCell,
    "cold match": works.ColdMatchCell,
    "trace": works.TraceCell,
    "trace answers": works.TraceAnswersCell,
    "memory": works.MemoryCell,
    "bulk": works.BulkCell,
}


def main() -> None:
    """Answer requests until stdin ends."""
    name, core = (json.loads(sys.argv[1])[each] for each in ("subject", "core"))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is not an answer
    if core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    try:
        subject(name, "buffers")
        version = metadata.version(PEER_PACKAGE) if name == "peer" else ""
    except ImportError as error:
        _write(answers, {"absent": str(error)})
        return
    _write(answers, {"version": version})
    gc.disable()
    cells: dict[str, works.Work] = {}
    for line in sys.stdin:
        _write(answers, _answer(name, cells, json.loads(line)))


def _answer(name: str, cells: dict[str, works.Work], request: dict[str, Any]) -> dict[str, Any]:
    try:
        match request["command"]:
            case "make":
                cells[request["key"]] = make(name, request)
            case "round":
                gc.collect()
                return cells[request["key"]].round(request["seed"])
            case "drop":
                del cells[request["key"]]
    except Exception as error:  # noqa: BLE001 - the other side shows it, whatever it is
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def make(name: str, request: dict[str, Any]) -> works.Work:
    """Return the requested cell of the subject `name`."""
    return WORK[request["work"]](subject(name, request["shape"]), **request["parameters"])


def _write(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
