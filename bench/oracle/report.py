"""Compared flips as tables, Markdown and JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from bench.index.tables import FigureTable
from bench.oracle.grid import BY_DESIGN, LOADS, PROMPTS, WEIGHTS, Flip, OracleCell

NOT_DRIVEN = (
    "temperature (the choice is drawn; only its distribution could be compared)",
    "shared cache tier (the service has none to be fed)",
    "trust, history, spill gate, predictions, newcomers (the peer has none; here they are off)",
    "weights per request (the service ignores them; it is made anew with each weight in its environment)",
)
"""The part that is not compared, and the reason."""
_EXACT = 1e-9
"""Costs differ by no more: decay divides, and in another order."""


class ComparedCell(NamedTuple):
    """One cell, and where both flip."""

    cell: OracleCell
    peer: Flip
    ours: Flip

    @property
    def is_equal(self) -> bool:
        """Whether both flip at the same load, and both or neither tie there."""
        return (self.peer.load, self.peer.is_tie) == (self.ours.load, self.ours.is_tie)

    @property
    def costs(self) -> tuple[int, int]:
        """How many costs at the flip can be seen of the peer, and how many of them are ours.

        The peer does not count the block that a request ends in; ours does, for both ranks alike.
        """
        own_block = float(self.cell.prompt.tail > 0)
        pairs = [
            (seen, ours)
            for seen, ours in (
                (self.peer.first_cost, self.ours.first_cost),
                (self.peer.second_cost, self.ours.second_cost),
            )
            if seen is not None and ours is not None
        ]
        return len(pairs), sum(abs(ours - own_block - seen) <= _EXACT * max(1.0, seen) for seen, ours in pairs)


class OracleComparison(NamedTuple):
    """All compared cells; `peer` names the other side."""

    machine: str
    peer: str
    judged: Sequence[ComparedCell]
    by_design: Sequence[tuple[str, ComparedCell]]

    @property
    def different(self) -> list[ComparedCell]:
        """Return the cells whose flips differ."""
        return [each for each in self.judged if not each.is_equal]

    def lines(self) -> Iterator[str]:
        """Yield the result as lines of text."""
        different = self.different
        seen, equal = (sum(counts) for counts in zip((0, 0), *(each.costs for each in self.judged), strict=True))
        yield f"{self.machine}; peer: {self.peer}"
        yield (
            f"{len(self.judged)} flips: {len(self.judged) - len(different)} equal, {len(different)} different; "
            f"of {seen} costs of the peer at the flips, {equal} are ours"
        )
        for each in different:
            yield f"DIFFERENT  {each.cell.name}: {_difference(each)}"
        for why, compared in self.by_design:
            yield f"by design  {why}: {compared.cell.name}: {_difference(compared)}"
        for what in NOT_DRIVEN:
            yield f"not driven {what}"


def _difference(each: ComparedCell) -> str:
    return f"peer {_flip_text(each.peer)}, ours {_flip_text(each.ours)}"


def _flip_text(flip: Flip) -> str:
    costs = (f"{cost:g}" if cost is not None else "?" for cost in (flip.first_cost, flip.second_cost))
    return f"flips at {flip.name}, costs {' | '.join(costs)}" if flip.load is not None else "never flips"


def compared(peer: Mapping[str, Flip], ours: Mapping[str, Flip], cells: Sequence[OracleCell]) -> list[ComparedCell]:
    """Return the cells with both flips."""
    return [ComparedCell(cell, peer[cell.name], ours[cell.name]) for cell in cells]


def by_design(peer: Mapping[str, Flip], ours: Mapping[str, Flip]) -> list[tuple[str, ComparedCell]]:
    """Return the cells in which the two are meant to differ, with the reason."""
    return [(why, ComparedCell(cell, peer[cell.name], ours[cell.name])) for why, cell in BY_DESIGN]


def tables(comparison: OracleComparison) -> list[FigureTable]:
    """Return the grid: the load at which the peer flips, by weights and prompt; where ours differs, ours beside it."""
    found = {(each.cell.load, each.cell.weights, each.cell.prompt): each for each in comparison.judged}
    prompts = [prompt for prompt in PROMPTS if any(prompt == each.cell.prompt for each in comparison.judged)]
    made = []
    for load in LOADS:
        rows = [
            (weights.name, *(_cell_text(found[load, weights, prompt]) for prompt in prompts))
            for weights in WEIGHTS
            if (load, weights, prompts[0]) in found
        ]
        columns = ("weights", *(prompt.name for prompt in prompts))
        if rows:
            made.append(
                FigureTable(f"extra {load.name}: blocks at which the choice flips; t: it ties there", columns, rows)
            )
    return made


def _cell_text(each: ComparedCell) -> str:
    texts = [
        "-" if flip.load is None else f"{flip.load}{'t' if flip.is_tie else ''}" for flip in (each.peer, each.ours)
    ]
    return texts[0] if each.is_equal else " != ".join(texts)


def as_json(comparison: OracleComparison) -> bytes:
    """Return every cell with both flips."""
    cells = [("judged", each) for each in comparison.judged] + [(why, each) for why, each in comparison.by_design]
    rows = [
        {"cell": each.cell.name, "as": why, "peer": each.peer._asdict(), "ours": each.ours._asdict()}
        for why, each in cells
    ]
    return msgspec.json.encode({"machine": comparison.machine, "peer": comparison.peer, "cells": rows})


def recording(peer: str, flips: Mapping[str, Flip]) -> bytes:
    """Return the peer's flips to be kept, a line a cell: [load, whether it ties, the first's cost, the second's]."""
    lines = ",\n".join(f"  {_text(name)}: {_text(flip)}" for name, flip in flips.items())
    return f'{{"peer": {_text(peer)}, "flips": {{\n{lines}\n}}}}\n'.encode()


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


class _Recording(msgspec.Struct, frozen=True):
    peer: str
    flips: dict[str, Flip]


def recorded(data: bytes) -> tuple[str, dict[str, Flip]]:
    """Return the recorded peer and its flips, from the output of `recording`."""
    parsed = msgspec.json.decode(data, type=_Recording)
    return parsed.peer, parsed.flips
