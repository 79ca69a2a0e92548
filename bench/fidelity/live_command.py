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
    EngineModel,
    LiveFleet,
    LiveRun,
    Recording,
    RecordingInvalid,
    live_workload,
    load_runs,
)
from bench.fidelity.live_timings import H100_4B_SGLANG, H200_4B
from bench.placement.policies import PLACEMENTS, Placement
from bench.report import machine_line, percentile
from bench.routing.virtual_fleet import RequestFigures
from worker_agent.engines.simulated.scheduling import SGLANG

HIT_BOUND = 0.02
RATIO_BOUND = 0.25
APART = 1.03


class LiveFigures(NamedTuple):
    """Requests a second, a ratio of prompt tokens, and seconds."""

    requests_per_s: float
    hit_ratio: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float

    @classmethod
    def of(cls, answered: Sequence[RequestFigures]) -> Self:
        """Return the figures of a run that had requests."""
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


def is_within(name: str, real: float, simulated: float) -> bool:
    """Return whether a figure is within its bound."""
    if name == "hit_ratio":
        return abs(simulated - real) <= HIT_BOUND
    return abs(simulated / real - 1) <= RATIO_BOUND


def within(real: LiveFigures, simulated: LiveFigures) -> list[bool]:
    """Return for each figure whether it is within its bound."""
    return [is_within(*each) for each in zip(LiveFigures._fields, real, simulated, strict=True)]


class Order(NamedTuple):
    """The policies by requests/s, best first, and of the pairs that are apart in the recording, those that agree."""

    real: tuple[str, ...]
    simulated: tuple[str, ...]
    agreeing: int
    apart: int


def order(real: Mapping[str, LiveFigures], simulated: Mapping[str, LiveFigures]) -> Order:
    """Compare the order of the policies; both have the same."""
    pairs = [pair for pair in combinations(real, 2) if _apart(*(real[each].requests_per_s for each in pair))]
    agreeing = sum(
        (real[one].requests_per_s > real[other].requests_per_s)
        == (simulated[one].requests_per_s > simulated[other].requests_per_s)
        for one, other in pairs
    )
    return Order(_ranked(real), _ranked(simulated), agreeing, len(pairs))


def _apart(one: float, other: float) -> bool:
    return max(one, other) > APART * min(one, other)


def _ranked(figures: Mapping[str, LiveFigures]) -> tuple[str, ...]:
    return tuple(sorted(figures, key=lambda name: -figures[name].requests_per_s))


NAMES = {"rr": "round-robin", "dynamo-kv": "dynamo", "dynamo:kv": "dynamo"}
"""Of the kit, by our names. sglang-router's names and weights are read by `placement_of`."""
TITLES = ("req/s", "hit, %", "TTFT p50", "p90", "p99", "E2E p50", "p99")
SCALES = (1, 100, *[1000] * 5)


class LiveKind(NamedTuple):
    """What a kind of recording does not say: the engines, and for how long clients sent."""

    model: EngineModel
    sending_s: float


KINDS = {
    "vllm": LiveKind(EngineModel(H200_4B, engines_per_gpu=WORKERS), 45.0),
    "sglang": LiveKind(
        EngineModel(
            H100_4B_SGLANG,
            name="sglang 0.5.14",
            scheduling=SGLANG,
            max_num_batched_tokens=4096,
            max_num_seqs=64,
            engines_per_gpu=WORKERS,
            router_s=3.3e-3,
            jitter=0.4,
        ),
        40.0,
    ),
}
"""Source: the kit's README (`limit`) and `sgl_lib.py` (`command`)."""


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
    (ratio; hit rate: difference in points), in bold where the bound is missed: 2 points of hit rate, 25 % of others.
    """
    click.echo(machine_line())
    for path, blocks in files:
        try:
            runs = load_runs(path, blocks)
            recording = live_workload(runs, blocks, KINDS[kind].sending_s)
        except RecordingInvalid as error:
            raise click.UsageError(str(error)) from error
        model = KINDS[kind].model
        for line in _report(path.name, runs, recording, model, seeds):
            click.echo(line)


def _report(
    name: str, runs: tuple[LiveRun, ...], recording: Recording, model: EngineModel, seeds: int
) -> Iterator[str]:
    yield f"\n{name}, {recording.blocks_per_worker} blocks an engine\n"
    yield f"| policy | {' | '.join(TITLES)} |"
    yield f"|---|{'---|' * len(TITLES)}"
    real, simulated, bounds = _real(runs), {}, []
    for policy in track(real, transient=True, console=Console(stderr=True)):
        if (placement := placement_of(policy)) is None:
            yield f"| {policy} | {' | '.join(['not simulated'] + [''] * (len(TITLES) - 1))} |"
            continue
        simulated[policy] = LiveFigures.mean([simulate(recording, model, placement, seed) for seed in range(seeds)])
        bounds += within(real[policy], simulated[policy])
        yield f"| {policy} | {' | '.join(_cells(real[policy], simulated[policy]))} |"
    yield f"\n{sum(bounds)} of {len(bounds)} figures within their bounds."
    yield from _order_lines({policy: real[policy] for policy in simulated}, simulated)


def _real(runs: tuple[LiveRun, ...]) -> dict[str, LiveFigures]:
    by_policy: dict[str, list[LiveFigures]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, []).append(LiveFigures.recorded(run))
    return {policy: LiveFigures.mean(figures) for policy, figures in by_policy.items()}


def simulate(recording: Recording, model: EngineModel, placement: Placement, seed: int = 0) -> LiveFigures:
    """Return the figures of the simulated engines under one placement."""
    return LiveFigures.of(LiveFleet(recording, model, placement, seed=seed).run())


def _cells(real: LiveFigures, simulated: LiveFigures) -> Iterator[str]:
    bounds = within(real, simulated)
    for place, (one, other, scale) in enumerate(zip(real, simulated, SCALES, strict=True)):
        apart = f"{(other - one) * 100:+.1f}" if place == HIT else f"{other / one:.2f}"
        cell = f"{one * scale:.4g} / {other * scale:.4g} ({apart})"
        yield cell if bounds[place] else f"**{cell}**"


def _order_lines(real: Mapping[str, LiveFigures], simulated: Mapping[str, LiveFigures]) -> Iterator[str]:
    found = order(real, simulated)
    yield f"{found.agreeing} of {found.apart} pairs of policies that are over 3 % apart in req/s have the same order."
    yield f"GPU: {' > '.join(found.real)}"
    yield f"simulated: {' > '.join(found.simulated)}\n"
