"""A simulated fleet beside a recording of a real one: same workload, same placements, and how far apart they are.

    figure        within where              best
    hit rate      2 points                  highest
    requests/s    25 % of the real one      highest
    TTFT p50      25 %                      lowest
    TTFT p90      25 %                      lowest
    ITL p50       25 %                      lowest

The engines' timing is fitted to the calibration; what decoding beside a context costs, which it does not show, is that
of `H200_8B_MIXED`. The recording gives the workload and what to compare with. What is not within its bound is printed
as such. Ends with 0 whatever the figures are, with 2 where an input is malformed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.fidelity.closed_loop import DRAWN, PLACEMENTS, AsDrawn, ClosedLoop, EngineModel, Placer
from bench.fidelity.fit_timing import START, fit, load_capture
from bench.fidelity.priors import variants
from bench.fidelity.recording import FleetFigures, Recorded, Recording, RecordingInvalid, load_recording
from bench.report import machine_line
from worker_agent.engines.simulated.timing import H200_8B_MIXED
from worker_agent.port.types import RequestRefused

MALFORMED = 2
MIXED_S = H200_8B_MIXED.mixed_sequence_s


class Figure(NamedTuple):
    """One compared figure: its name in `FleetFigures` and in tables, its bound and its unit in tables."""

    name: str
    title: str
    bound: float
    is_relative: bool
    is_best_highest: bool
    unit: str
    units_per_one: float

    def difference(self, real: float, simulated: float) -> float:
        """Return simulated less real, as a share of real where the bound is relative."""
        return (simulated - real) / (real if self.is_relative else 1.0)

    def shown(self, value: float) -> str:
        """Return the value with its unit."""
        return f"{value * self.units_per_one:.1f} {self.unit}".rstrip()

    def shown_share(self, share: float, sign: str = "") -> str:
        """Return a difference or a bound with its unit."""
        return f"{share * 100:{sign}.1f} {'%' if self.is_relative else 'points'}"


FIGURES = (
    Figure("hit_ratio", "hit rate", 0.02, is_relative=False, is_best_highest=True, unit="%", units_per_one=100),
    Figure("requests_per_s", "requests/s", 0.25, is_relative=True, is_best_highest=True, unit="", units_per_one=1),
    Figure("ttft_p50_s", "TTFT p50", 0.25, is_relative=True, is_best_highest=False, unit="ms", units_per_one=1000),
    Figure("ttft_p90_s", "TTFT p90", 0.25, is_relative=True, is_best_highest=False, unit="ms", units_per_one=1000),
    Figure("itl_p50_s", "ITL p50", 0.25, is_relative=True, is_best_highest=False, unit="ms", units_per_one=1000),
)


class FigureComparison(msgspec.Struct, frozen=True):
    """One figure of one placement."""

    placement: str
    figure: str
    real: float
    simulated: float
    difference: float
    bound: float
    is_within: bool


class Ranking(msgspec.Struct, frozen=True):
    """The placements by one figure, best first."""

    figure: str
    real: tuple[str, ...]
    simulated: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """Whether both are in the same order."""
        return self.real == self.simulated


class Fidelity(NamedTuple):
    """The comparison of every figure of every placement, and the rankings of the placements by each figure."""

    compared: tuple[FigureComparison, ...]
    rankings: tuple[Ranking, ...]

    def of(self, placement: str) -> tuple[FigureComparison, ...]:
        """Return the comparisons of one placement, in the order of `FIGURES`."""
        return tuple(each for each in self.compared if each.placement == placement)

    @property
    def verdict(self) -> str:
        """One line: how many figures are within their bounds, and how many rankings are the same."""
        within, same = sum(each.is_within for each in self.compared), sum(each.is_same for each in self.rankings)
        return (
            f"{within} of {len(self.compared)} figures within their bounds, "
            f"{same} of {len(self.rankings)} rankings of the placements the same"
        )


def compare(real: dict[str, FleetFigures], simulated: dict[str, FleetFigures]) -> Fidelity:
    """Return the comparison of two fleets' figures by placement; both have the same placements."""
    compared = tuple(
        _compared(placement, figure, getattr(real[placement], figure.name), getattr(simulated[placement], figure.name))
        for placement in real
        for figure in FIGURES
    )
    rankings = tuple(Ranking(each.title, _ranked(real, each), _ranked(simulated, each)) for each in FIGURES)
    return Fidelity(compared, rankings)


def _compared(placement: str, figure: Figure, real: float, simulated: float) -> FigureComparison:
    difference = figure.difference(real, simulated)
    is_within = abs(difference) <= figure.bound
    return FigureComparison(placement, figure.title, real, simulated, difference, figure.bound, is_within)


def _ranked(figures: dict[str, FleetFigures], figure: Figure) -> tuple[str, ...]:
    values = {placement: getattr(each, figure.name) for placement, each in figures.items()}
    return tuple(sorted(values, key=values.__getitem__, reverse=figure.is_best_highest))


def simulate(
    recording: Recording, runs: Sequence[Recorded], model: EngineModel, seed: int | None
) -> dict[str, FleetFigures]:
    """Return the simulated fleet's figures by placement; shows its progress on a terminal's standard error."""
    found: dict[str, FleetFigures] = {}
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for run in runs:
            task = progress.add_task(run.policy, total=recording.requests)
            loop = ClosedLoop(recording, model, _placement(recording, run, seed), workers=run.workers)
            played = loop.play(lambda task=task: progress.advance(task))  # type: ignore[misc]
            found[run.policy] = FleetFigures.of(played.answered, len(played.answered) / played.makespan_s)
    return found


def _placement(recording: Recording, run: Recorded, seed: int | None) -> Placer:
    if run.policy == DRAWN and seed is None:
        return AsDrawn(recording, run.answered)
    return PLACEMENTS[run.policy](seed or 0)


def table(fidelity: Fidelity) -> str:
    """Return one line for each figure of each placement, then one for each ranking."""
    figure_of = {figure.title: figure for figure in FIGURES}
    lines = ["placement  figure            real   simulated    difference         bound"]
    for each in fidelity.compared:
        figure = figure_of[each.figure]
        lines.append(
            f"{each.placement:9}  {each.figure:10} {figure.shown(each.real):>11} {figure.shown(each.simulated):>11}"
            f" {figure.shown_share(each.difference, '+'):>13} {figure.shown_share(each.bound):>13}"
            f"  {'within' if each.is_within else 'NOT WITHIN'}"
        )
    for ranking in fidelity.rankings:
        real, simulated = " > ".join(ranking.real), " > ".join(ranking.simulated)
        lines.append(
            f"best {ranking.figure:10}  real {real}; simulated {simulated if not ranking.is_same else 'the same'}"
        )
    return "\n".join(lines)


def priors_table(real: dict[str, FleetFigures], simulated: dict[str, dict[str, FleetFigures]]) -> str:
    """Return one line for each model and placement: how far each figure is from the real one."""
    lines = [f"{'assumption':22} placement  " + " ".join(f"{figure.title:>13}" for figure in FIGURES)]
    for name, figures in simulated.items():
        fidelity = compare(real, figures)
        for placement in real:
            shown = (
                f"{figure.shown_share(each.difference, '+'):>13}"
                for figure, each in zip(FIGURES, fidelity.of(placement), strict=True)
            )
            lines.append(f"{name:22} {placement:9}  {' '.join(shown)}")
    return "\n".join(lines)


def notes(recording: Recording) -> list[str]:
    """Return what a reader must know of the recording: its shape, and where it does not say what its rows say."""
    shape = (
        f"{recording.engine}, {recording.gpu}, {recording.model}; {recording.requests} requests of "
        f"{len(recording.sessions)} sessions, {recording.concurrency} at a time; "
        f"{recording.blocks_per_worker} blocks of {recording.block_size} tokens a worker"
    )
    lines = [shape]
    for run in recording.runs:
        if run.policy not in PLACEMENTS:
            lines.append(f"{run.policy}: not simulated, known are {', '.join(PLACEMENTS)}")
        if run.unanswered:
            lines.append(f"{run.policy}: {run.unanswered} requests of the sessions have no row")
        if run.unplanned:
            lines.append(f"{run.policy}: {run.unplanned} rows are of no session's length and turn")
        lines += [f"{run.policy}: the recording's summary differs: {each}" for each in run.summary_differences]
    return lines


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fidelity.command",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fleet", type=Path, required=True, help="recording of a real fleet, JSON")
    parser.add_argument("--calibration", type=Path, required=True, help="calibration that timing is fitted to, JSON")
    parser.add_argument("--seed", type=int, help="draw the random placement anew (default: the recorded draws)")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=EngineModel._field_defaults["max_num_batched_tokens"],
        help="token budget of an iteration, which recordings do not name (default %(default)s)",
    )
    parser.add_argument(
        "--priors", action="store_true", help="also print what it would be with one assumption changed at a time"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; return the process's exit code."""
    arguments = _arguments(argv)
    try:
        recording = load_recording(arguments.fleet)
        timing = fit(load_capture(arguments.calibration).rows, start=replace(START, mixed_sequence_s=MIXED_S))
        runs = [run for run in recording.runs if run.policy in PLACEMENTS]
        model = EngineModel(timing, max_num_batched_tokens=arguments.max_num_batched_tokens)
        simulated = simulate(recording, runs, model, arguments.seed)
    except (RecordingInvalid, RequestRefused, msgspec.DecodeError, OSError) as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return MALFORMED
    real = {run.policy: run.figures for run in runs}
    fidelity = compare(real, simulated)
    if arguments.json:
        print(msgspec.json.encode(_json(recording, model, fidelity)).decode())
    else:
        print("\n".join([*notes(recording), machine_line(), "", table(fidelity), "", fidelity.verdict]))
        if arguments.priors:
            others = {name: simulate(recording, runs, each, arguments.seed) for name, each in variants(model).items()}
            print("\n" + priors_table(real, {"as above": simulated, **others}))
    return 0


def _json(recording: Recording, model: EngineModel, fidelity: Fidelity) -> dict[str, Any]:
    return {
        "machine": machine_line(),
        "notes": notes(recording),
        "model": model._asdict(),
        "compared": fidelity.compared,
        "rankings": fidelity.rankings,
        "verdict": fidelity.verdict,
    }


if __name__ == "__main__":
    sys.exit(main())
