"""`router bench live`: a live recording of four engines on one GPU, replayed in virtual time, policy by policy."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import click
from msgspec.structs import replace
from rich.console import Console
from rich.progress import track

from bench.fidelity.live_figures import HIT, LiveFigures, order, within
from bench.fidelity.live_fleet import EngineModel, LiveFleet
from bench.fidelity.live_recording import WORKERS, LiveRun, Recording, RecordingInvalid, live_workload, load_runs
from bench.placement.policies import PLACEMENTS, Placement
from bench.report import machine_line
from router.decision.policy import CostParameters, Policy
from worker_agent.engines.simulated.scheduling import SGLANG
from worker_agent.engines.simulated.timing import H100_4B_SGLANG, H200_4B

NAMES = {"kvb": "kv-blocks", "rr": "round-robin", "dynamo-kv": "dynamo", "dynamo:kv": "dynamo"}
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
    """Return the placement that a recording calls `policy`, weights after commas; None if the bench has no such rule.

    A recording that names weights was made when mode kv compared blocks.
    """
    name, *weights = policy.split(", ")
    if name == "kv" and weights:
        given = {key: float(value) for key, value in (each.split(" ") for each in weights)}
        return Placement(Policy(mode="kv-blocks", parameters=replace(CostParameters(), **given)))
    return PLACEMENTS.get("sglang" if name.startswith("sglang") else NAMES.get(policy, policy))


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
        placement = placement_of(policy)
        if placement is None:
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
