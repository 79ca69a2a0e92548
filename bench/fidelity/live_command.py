"""`router bench live`: a live recording of four engines on one GPU, replayed in virtual time, policy by policy.

    hit rate             within 2 points of the recording
    all other figures    within 25 %
    order                two policies whose requests/s differ by more than 3 % in the recording have the same order

Two runs of one policy on the GPU differ by 0.7 to 1.3 % in requests/s; 3 % is beyond that.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, Self

import click
from rich.console import Console
from rich.progress import track

from bench.fidelity.live_recording import (
    WORKERS,
    LiveFleet,
    LiveRun,
    Recording,
    live_engine,
    live_workload,
    load_runs,
)
from bench.fidelity.timings import H100_4B_SGLANG, H200_4B
from bench.placement.policies import PLACEMENTS, Placement
from bench.report import machine_line, percentile
from bench.routing.trace import TraceInvalid
from bench.routing.virtual_fleet import RequestFigures, VirtualFleetShape
from bench.tables import FigureTable, markdown_table
from worker_agent.engines.simulated.scheduling import SGLANG, VLLM

HIT_BOUND = 0.02
RATIO_BOUND = 0.25
APART = 1.03


class LiveFigures(NamedTuple):
    """Requests a second, the cached share of prompt tokens, and latencies in seconds."""

    requests_per_s: float
    hit_ratio: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float

    @classmethod
    def of(cls, answered: Sequence[RequestFigures]) -> Self:
        """Return the figures of a run, which must have requests."""
        return cls(
            len(answered) / max(each.arrival_s + each.e2e_s for each in answered),
            sum(each.cached_tokens for each in answered) / sum(each.isl_tokens for each in answered),
            *(percentile([each.ttft_s for each in answered], quantile) for quantile in (0.5, 0.9, 0.99)),
            *(percentile([each.e2e_s for each in answered], quantile) for quantile in (0.5, 0.99)),
        )

    @classmethod
    def recorded(cls, run: LiveRun) -> Self:
        """Return the figures of a recorded run."""
        ttfts_s = (run.ttft_ms[quantile] / 1e3 for quantile in ("50", "90", "99"))
        return cls(run.req_s, run.hit, *ttfts_s, *(run.e2e_ms[quantile] / 1e3 for quantile in ("50", "99")))

    @classmethod
    def mean(cls, runs: Sequence[Self]) -> Self:
        """Return the mean of each figure over one or more runs."""
        return cls(*(sum(values) / len(runs) for values in zip(*runs, strict=True)))


HIT = LiveFigures._fields.index("hit_ratio")


def within(real: LiveFigures, simulated: LiveFigures) -> list[bool]:
    """Return for each figure whether it is within its bound."""
    return [
        abs(other - one) <= HIT_BOUND if name == "hit_ratio" else abs(other / one - 1) <= RATIO_BOUND
        for name, one, other in zip(LiveFigures._fields, real, simulated, strict=True)
    ]


def order(
    real: Mapping[str, LiveFigures], simulated: Mapping[str, LiveFigures]
) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
    """Return both orders by requests/s, best first; how many pairs over `APART` in `real` agree, and of how many."""
    rates, others = ({name: each.requests_per_s for name, each in figures.items()} for figures in (real, simulated))
    by_rate = sorted(rates, key=rates.__getitem__, reverse=True)
    pairs = [(best, other) for best, other in combinations(by_rate, 2) if rates[best] > APART * rates[other]]
    agreeing = sum(others[best] > others[other] for best, other in pairs)
    return tuple(by_rate), tuple(sorted(others, key=others.__getitem__, reverse=True)), agreeing, len(pairs)


NAMES = {"rr": "round-robin", "dynamo-kv": "dynamo", "dynamo:kv": "dynamo"}
"""Our names of placements, by the GPU kit's names. `placement_of` also knows sglang-router's, which have weights."""
TITLES = ("req/s", "hit, %", "TTFT p50", "p90", "p99", "E2E p50", "p99")
SCALES = (1, 100, *[1000] * 5)


KINDS: dict[str, tuple[VirtualFleetShape, float]] = {
    "vllm": (VirtualFleetShape(live_engine(), (H200_4B,), scheduling=VLLM, engines_per_gpu=WORKERS), 45.0),
    "sglang": (
        VirtualFleetShape(
            live_engine(max_num_seqs=64, max_num_batched_tokens=4096),
            (H100_4B_SGLANG,),
            scheduling=SGLANG,
            engines_per_gpu=WORKERS,
            router_s=3.3e-3,
            jitter=0.4,
        ),
        40.0,
    ),
}
"""The engines of each kind of recording (vLLM 0.24.0, SGLang 0.5.14), and for how many seconds clients sent.

Source: the kit's README (`limit`) and `sgl_lib.py` (`command`).
"""


def placement_of(policy: str) -> Placement | None:
    """Return the placement that a recording calls `policy`; None if the bench has no such rule."""
    return PLACEMENTS.get("sglang" if policy.startswith("sglang") else NAMES.get(policy, policy))


@click.command("live", context_settings={"show_default": True})
@click.option(
    "--runs",
    "files",
    type=(click.Path(exists=True, dir_okay=False, path_type=Path), int),
    multiple=True,
    required=True,
    metavar="FILE BLOCKS",
    help="a live recording, and the blocks of an engine in it; may be repeated",
)
@click.option("--engine", "kind", type=click.Choice([*KINDS]), default="vllm", help="what the recordings are of")
@click.option("--seeds", type=click.IntRange(min=1), default=3, help="simulations of a policy; their mean is compared")
def live(files: tuple[tuple[Path, int], ...], kind: str, seeds: int) -> None:
    """Replay live recordings in virtual time, and print simulated figures beside the GPU's.

    The engines are simulated (`docs/FIDELITY.md`), the router's decisions are its own. A file is what `live.py` or
    `sgl_live.py` of the GPU kit writes, `h200_live_policies.json`, or `h100_sglang_live.json`. Every policy of the file
    that the bench knows is played; repeated runs of one policy are compared by their mean. Cells: GPU / simulated
    (ratio; hit rate: difference in points), in bold if the bound is missed: 2 points of hit rate, 25 % of others.
    """
    model, sending_s = KINDS[kind]
    click.echo(machine_line())
    for path, blocks in files:
        try:
            runs = load_runs(path, blocks)
            recording = live_workload(runs, blocks, sending_s)
        except TraceInvalid as error:
            raise click.UsageError(str(error)) from error
        for line in _report(path.name, runs, recording, model, seeds):
            click.echo(line)


def _report(
    name: str, runs: tuple[LiveRun, ...], recording: Recording, model: VirtualFleetShape, seeds: int
) -> Iterator[str]:
    recorded: dict[str, list[LiveFigures]] = {}
    for run in runs:
        recorded.setdefault(run.policy, []).append(LiveFigures.recorded(run))
    real = {policy: LiveFigures.mean(figures) for policy, figures in recorded.items()}
    rows, simulated, bounds = [], {}, []
    for policy in track(real, transient=True, console=Console(stderr=True)):
        if (placement := placement_of(policy)) is None:
            rows.append((policy, "not simulated", *[""] * (len(TITLES) - 1)))
            continue
        played = (LiveFleet(recording, model, placement, seed=seed).run() for seed in range(seeds))
        simulated[policy] = LiveFigures.mean([LiveFigures.of(each) for each in played])
        bounds += within(real[policy], simulated[policy])
        rows.append((policy, *_cells(real[policy], simulated[policy])))
    title = f"{recording.blocks_per_worker} blocks an engine, {name}"
    yield markdown_table(FigureTable(title, ("policy", *TITLES), rows))
    yield f"{sum(bounds)} of {len(bounds)} figures within their bounds."
    on_gpu, in_simulation, agreeing, apart = order({policy: real[policy] for policy in simulated}, simulated)
    yield f"{agreeing} of {apart} pairs of policies that are over 3 % apart in req/s have the same order."
    yield f"GPU: {' > '.join(on_gpu)}"
    yield f"simulated: {' > '.join(in_simulation)}\n"


def _cells(real: LiveFigures, simulated: LiveFigures) -> Iterator[str]:
    bounds = within(real, simulated)
    for place, (one, other, scale) in enumerate(zip(real, simulated, SCALES, strict=True)):
        apart = f"{(other - one) * 100:+.1f}" if place == HIT else f"{other / one:.2f}"
        cell = f"{one * scale:.4g} / {other * scale:.4g} ({apart})"
        yield cell if bounds[place] else f"**{cell}**"
