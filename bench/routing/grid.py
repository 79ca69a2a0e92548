"""The cells of the routing-quality bench, and running them side by side.

grid       every slowdown x workers x rate x mode, at the first lag
lags       the middle cell again, in kv mode, at every other lag
control    the middle cell again, every mode, on the same trace without any shared block
bound      one LRU cache of the fleet's total size, for every number of workers
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

from bench.routing.figures import RoutingFigures, Slo, figures
from bench.routing.lru_bound import lru_hit_rate
from bench.routing.tokens import TraceHashes
from bench.routing.trace import TraceInvalid, TraceRequest, at_rate, without_sharing
from bench.routing.virtual_fleet import VirtualFleet, VirtualFleetShape
from bench.side_by_side import play_side_by_side
from router.decision.policy import CostParameters, Policy

INDEX_MODE = "kv"
"""The mode whose dependence on the lag of events is shown."""
_Number = TypeVar("_Number", int, float)


class GridShape(NamedTuple):
    """The varied and the fixed parameters. Lags in seconds; a slowdown of 2 is an engine that needs twice as long."""

    workers: tuple[int, ...] = (4, 8, 16)
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    modes: tuple[str, ...] = ("kv", "round-robin")
    lags_s: tuple[float, ...] = (0.005,)
    slowdowns: tuple[float, ...] = (1.0,)
    control: bool = True
    kv_tokens: int = 700_000
    block_size: int = 512
    seed: int = 1
    slo: Slo = Slo()
    cost: CostParameters = CostParameters()


class RoutingCell(NamedTuple):
    """One run: a fleet, a speed, a mode, and whether prompts share blocks."""

    workers: int
    rate: float
    mode: str
    lag_s: float
    slowdown: float
    shared: bool = True


class GridResult(NamedTuple):
    """All figures by cell, and the bound's hit rate by number of workers."""

    shape: GridShape
    figures: dict[RoutingCell, RoutingFigures]
    bound: dict[int, float]


def middle(values: Sequence[_Number]) -> _Number:
    """Return the middle one, as listed."""
    return values[len(values) // 2]


def cells(shape: GridShape) -> list[RoutingCell]:
    """Return all cells, each once."""
    grid = [
        RoutingCell(workers, rate, mode, shape.lags_s[0], slowdown)
        for slowdown, workers, rate, mode in product(shape.slowdowns, shape.workers, shape.rates, shape.modes)
    ]
    return list(dict.fromkeys([*grid, *lag_cells(shape), *control_cells(shape)]))


def lag_cells(shape: GridShape) -> list[RoutingCell]:
    """Return the middle cell at every lag, fastest first; none where there is one lag, or no mode that cares."""
    if len(shape.lags_s) == 1 or INDEX_MODE not in shape.modes:
        return []
    workers, rate = middle(shape.workers), middle(shape.rates)
    return [RoutingCell(workers, rate, INDEX_MODE, lag_s, shape.slowdowns[0]) for lag_s in sorted(shape.lags_s)]


def control_cells(shape: GridShape) -> list[RoutingCell]:
    """Return the middle cell in every mode, without sharing."""
    workers, rate, lag_s, slowdown = middle(shape.workers), middle(shape.rates), shape.lags_s[0], shape.slowdowns[0]
    modes = shape.modes if shape.control else ()
    return [RoutingCell(workers, rate, mode, lag_s, slowdown, shared=False) for mode in modes]


def check_fits(requests: Sequence[TraceRequest], shape: GridShape) -> None:
    """Return when every request fits into one worker's KV cache; raise `TraceInvalid` otherwise."""
    pool_blocks = shape.kv_tokens // shape.block_size
    for number, request in enumerate(requests, 1):
        blocks = -(-(request.isl_tokens + request.osl_tokens) // shape.block_size)
        if blocks > pool_blocks:
            found = f"{request.isl_tokens} + {request.osl_tokens} tokens = {blocks} blocks of {shape.block_size}"
            raise TraceInvalid(f"request {number}", "length", found, f"a worker's {pool_blocks} blocks at most")


def run_cell(shape: GridShape, requests: Sequence[TraceRequest], cell: RoutingCell) -> RoutingFigures:
    """Play the trace in one cell and return its figures."""
    played = at_rate(requests if cell.shared else without_sharing(requests), cell.rate)
    fleet_shape = VirtualFleetShape(cell.workers, shape.kv_tokens, shape.block_size, cell.lag_s, cell.slowdown)
    outcomes = VirtualFleet(
        fleet_shape, Policy.current(mode=cell.mode, parameters=shape.cost), played, seed=shape.seed
    ).run()
    return figures(outcomes, workers=cell.workers, slo=shape.slo)


def run_grid(
    shape: GridShape, requests: Sequence[TraceRequest], *, jobs: int, on_cell: Callable[[], None] = lambda: None
) -> GridResult:
    """Play the trace in every cell, `jobs` at a time in processes of their own (1: here); `on_cell` after each."""
    found: dict[RoutingCell, RoutingFigures] = {}
    for cell, cell_figures in play_side_by_side(partial(run_cell, shape, requests), cells(shape), jobs):
        found[cell] = cell_figures
        on_cell()
    return GridResult(shape, {cell: found[cell] for cell in cells(shape)}, bounds(shape, requests))


def bounds(shape: GridShape, requests: Sequence[TraceRequest]) -> dict[int, float]:
    """Return the hit rate of one cache of the fleet's total size, by number of workers; it does not see the rate."""
    hashes = TraceHashes(shape.block_size)
    prompts = [(request.isl_tokens, hashes.of_prompt(request)) for request in requests]
    pool_blocks = shape.kv_tokens // shape.block_size
    return {
        workers: lru_hit_rate(prompts, blocks_max=workers * pool_blocks, block_size=shape.block_size)
        for workers in shape.workers
    }
