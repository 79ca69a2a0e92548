"""The results of the bench of one request as tables, Markdown and JSON."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from bench.index.tables import NONE, FigureTable, number
from bench.request.call_path import files_of
from bench.request.results import SHAPES, RequestResults, Stages
from bench.request.run import MODES, MeasuredAmount
from bench.request.stages import ELSE, LOOP, STAGES

ORDER = (*STAGES, LOOP, ELSE)
"""The stages, in the order of the tables."""
_FUNCTIONS = 20
_CALLS_MIN = 0.005
_SHARE_MIN = 0.005


class RequestFacts(NamedTuple):
    """Where and how the figures were measured."""

    machine: str
    commit: str
    amount: MeasuredAmount

    def lines(self, results: RequestResults) -> Iterator[str]:
        """Yield them as lines of text."""
        own, others = self.amount.cores
        cores = f"routers on core {own}, all else on {others}" if own >= 0 else "not pinned to cores"
        yield f"{self.machine}; {cores}"
        yield f"commit {self.commit}; CPU: medians of {self.amount.rounds} rounds of {self.amount.seconds:g} s"
        moments = sorted(each.moments for each in results.stages.values())
        if moments:
            yield f"stages: {moments[0]:,} to {moments[-1]:,} moments a column"
        yield from results.absent


def tables(results: RequestResults) -> list[FigureTable]:
    """Return all tables."""
    made = [_cpu(results)]
    if results.stages:
        made += [*(_stages(results, mode) for mode in MODES), _functions(results)]
    if any(each.path for each in results.stages.values()):
        made += [_calls(results), _paths(results)]
    if results.system_calls:
        made.append(_columns("system calls a request", results.system_calls, _CALLS_MIN, "{:.2f}"))
    if results.objects:
        made.append(_columns("share of CPU time by shared object", results.objects, _SHARE_MIN, "{:.1%}"))
    return [*made, _chunks(results), *_events(results)]


def _cpu(results: RequestResults) -> FigureTable:
    rows = []
    for mode in MODES:
        for shape in SHAPES:
            use = results.cpu(mode, shape.name)
            figures = (use.cpu_us, use.cpu_us - use.kernel_us, use.kernel_us)
            rows.append((f"{mode}, {shape.name}", *map(number, figures)))
    return FigureTable("CPU us of a request", ("request", "all", "user", "kernel"), rows)


def _stages(results: RequestResults, mode: str) -> FigureTable:
    rows = []
    for stage in ORDER:
        row = [stage]
        for shape in SHAPES:
            found = results.stages.get((mode, shape.name))
            if found is None:
                row.append(NONE)
                continue
            share = found.shares.get(stage, 0.0)
            row.append(f"{share * results.cpu(mode, shape.name).cpu_us:.1f} ({share:.1%})")
        rows.append(tuple(row))
    rows.append(("all", *(number(results.cpu(mode, shape.name).cpu_us) for shape in SHAPES)))
    return FigureTable(f"CPU us of a request by stage, {mode}", ("stage", *(shape.name for shape in SHAPES)), rows)


def _functions(results: RequestResults) -> FigureTable:
    """Return the functions with the most own time in mode kv, by the small request."""
    keys = [key for shape in SHAPES if (key := (MODES[0], shape.name)) in results.stages]
    rows = []
    for name in [*results.stages[keys[0]].own][:_FUNCTIONS] if keys else ():
        uses = (results.stages[key].own.get(name, 0.0) * results.cpu(*key).cpu_us for key in keys)
        rows.append((f"`{name}`", *(f"{us:.1f}" for us in uses)))
    columns = ("function, with the libraries that it calls", *(shape for _, shape in keys))
    return FigureTable("CPU us of the functions with the most, kv", columns, rows)


def _calls(results: RequestResults) -> FigureTable:
    keys = [(mode, shape.name) for mode in MODES for shape in SHAPES]
    rows = [(stage, *(f"{results.stages[key].calls.get(stage, 0):.1f}" for key in keys)) for stage in ORDER]
    rows.append(("all", *(f"{sum(results.stages[key].calls.values()):.0f}" for key in keys)))
    return FigureTable("function calls of a request by stage", ("stage", *map(", ".join, keys)), rows)


def _paths(results: RequestResults) -> FigureTable:
    columns = (
        "request",
        "calls",
        "functions",
        "files",
        "of them only forward",
        "open at the first byte",
        "their files",
    )
    rows = []
    for (mode, shape), found in results.stages.items():
        if (path := found.path) is None:
            continue
        counts = (path.calls, len(path.functions), len(files_of(path.functions)), len(path.forwarding))
        rows.append((f"{mode}, {shape}", *map(str, (*counts, len(path.stack), len(files_of(path.stack))))))
    return FigureTable("from the first byte read to the first byte sent", columns, rows)


def _columns(title: str, found: Mapping[tuple[str, str], Mapping[str, float]], least: float, form: str) -> FigureTable:
    """Return a table with a column for each request, and a row for each name that is often enough in one of them."""
    names = {name for each in found.values() for name, value in each.items() if value >= least}
    ordered = sorted(names, key=lambda name: -sum(each.get(name, 0.0) for each in found.values()))
    rows = [(name, *(form.format(each.get(name, 0.0)) for each in found.values())) for name in ordered]
    return FigureTable(title, ("", *map(", ".join, found)), rows)


def _chunks(results: RequestResults) -> FigureTable:
    rows = [
        (f"{mode}, {pace}", number(use.cpu_us), number(use.cpu_us - use.kernel_us), number(use.kernel_us))
        for (mode, pace), use in results.chunks.items()
    ]
    return FigureTable("CPU us of a streamed chunk", ("chunk", "all", "user", "kernel"), rows)


def _events(results: RequestResults) -> Iterator[FigureTable]:
    found = results.events
    if found is None:
        return
    columns = ("batches/s", "blocks/s", "messages/s", "CPU us a batch", "CPU us a message", "CPU ms/s without events")
    yield FigureTable("the feed of KV events, kv", columns, [tuple(map(number, found))])


def as_json(facts: RequestFacts, results: RequestResults) -> bytes:
    """Return everything measured."""
    cells = [
        {
            "mode": mode,
            "shape": shape,
            "rounds": [each._asdict() for each in rounds],
            "stages": _stages_json(results.stages.get((mode, shape))),
            "system_calls": results.system_calls.get((mode, shape)),
            "objects": results.objects.get((mode, shape)),
        }
        for (mode, shape), rounds in results.rounds.items()
    ]
    chunks = [{"mode": mode, "pace": pace, "use": use._asdict()} for (mode, pace), use in results.chunks.items()]
    events = None if results.events is None else results.events._asdict()
    more = {"cells": cells, "chunks": chunks, "events": events, "absent": results.absent}
    return msgspec.json.encode({"machine": facts.machine, "commit": facts.commit} | more)


def _stages_json(found: Stages | None) -> dict[str, Any] | None:
    return None if found is None else found._asdict() | {"path": found.path._asdict() if found.path else None}
