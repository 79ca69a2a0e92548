"""`router what-if`: a journal's requests played through simulated engines under other policies."""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from bench.fidelity.timings import fit, load_capture
from bench.report import machine_line
from bench.what_if.play import Cell, Stage, play_all, staged
from bench.what_if.recorded import REQUESTS_MAX, JournalOfOne, JournalUnfit
from bench.what_if.report import IN_FORCE, Result, as_object, lines, result_of, write_plot
from kv_protocol.errors import UNDECODABLE
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.process import print_json, print_lines
from router.cli.options import NothingRead, moment, run_on_log, swept, with_settings
from router.config import RouterSettings
from router.decision.policies import MODES
from router.decision.policy import Policy
from router.decision.policy_store import swapped
from router.journal.log import read_journal
from worker_agent.engines.simulated.timing import H200_8B, EngineTiming

REQUESTS = 2000
_MODES = ("kv", "predicted-ttft", "least-loaded", "round-robin")
"""The modes that are played if no policy is named."""


class Asked(NamedTuple):
    """The options of a simulation; at most `requests` requests are played."""

    router_name: str
    from_ns: int | None
    requests: int
    calibration: Path | None
    kv_blocks: int
    jobs: int


def simulation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a simulation to a command, and pass them to it as `asked`."""

    @click.option(
        "--from", "from_ns", type=moment, metavar="ISO", help="start at the first checkpoint from this time on"
    )
    @click.option(
        "--requests",
        type=click.IntRange(10, REQUESTS_MAX),
        default=REQUESTS,
        show_default=True,
        help="how many requests, from the first on",
    )
    @click.option(
        "--calibration",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="times measured on an engine (JSON), from which the fit starts; without it those of an H200 with 8B",
    )
    @click.option("--kv-blocks", type=click.IntRange(0), default=0, help="KV blocks of ranks that state none")
    @click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="policies played side by side")
    @wraps(command)
    def run(**options: Any) -> None:  # noqa: ANN401 - one value an option
        asked = Asked(**{name: options.pop(name) for name in Asked._fields})
        command(asked=asked, **options)

    return run


@click.command("what-if")
@with_settings
@simulation_options
@click.option("--modes", help="modes to play, between commas; without a policy to play: " + ", ".join(_MODES))
@click.option("--sweep", multiple=True, metavar="FIELD=A,B,...", help="policies to play: this field with each value")
@click.option("--loads", default="1", show_default=True, help="factors on the rate of arrivals, between commas")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="write the Pareto front here: .svg, .png")
@click.option("--json", "as_json", is_flag=True, help="print all figures as one JSON object")
def what_if(
    *,
    settings: RouterSettings,
    asked: Asked,
    modes: str | None,
    sweep: tuple[str, ...],
    loads: str,
    plot: Path | None,
    as_json: bool,
    **_: object,
) -> None:
    """Play a journal's requests through simulated engines, in a closed loop, under this policy and others.

    In a closed loop a policy meets the caches and queues that its own choices made. The engines are as fast as the
    fleet that wrote the journal: their times are fitted to its outcomes. Policies differ from the policy in force at
    the first request in the fields that are named.

    \b
    Example:  router what-if --nats-url nats://127.0.0.1:4222 --modes least-loaded --sweep policy.ttft_weight=1,16
    """  # noqa: D301
    found_loads = _loads(loads)
    others = named_policies(modes, sweep) or {mode: {"mode": mode} for mode in _MODES}
    journal = read(settings, asked, JournalOfOne(others, asked.requests))
    result = simulated(journal, asked, journal.policies, found_loads)
    if plot is not None:
        write_plot(result, plot)
    if as_json:
        print_json(msgspec.json.encode(as_object(result)))
    else:
        print_lines(machine_line(), *lines(result))


def named_policies(modes: str | None, sweep: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the fields of each policy that is named, by its name; raise `ConfigurationError`.

    Each policy is checked with the defaults of the fields that it leaves out, before a long journal is read.
    """
    found = dict[str, dict[str, Any]]()
    for mode in (modes or "").split(",") if modes else ():
        if mode not in MODES:
            raise ConfigurationError([f"--modes: found {mode!r}, allowed {', '.join(MODES)}"])
        found[mode] = {"mode": mode}
    for each in sweep:
        found |= swept(each)
    for fields in found.values():
        swapped(Policy(), fields, MODES, replace_all=False)
    return found


def read(settings: RouterSettings, asked: Asked, journal: JournalOfOne) -> JournalOfOne:
    """Return the journal, read to the end of the log; raise `NothingRead`, `BrokerUnavailable`."""
    try:
        run_on_log(
            settings,
            lambda log, stop: read_journal(log, asked.router_name, journal.take, stop, from_ns=asked.from_ns),
        )
    except JournalUnfit as error:
        raise NothingRead(str(error)) from error
    return journal


def simulated(
    journal: JournalOfOne, asked: Asked, policies: Mapping[str, Policy], loads: tuple[float, ...] = (1.0,)
) -> Result:
    """Return what the policy in force and the others do with the journal's requests; raise `NothingRead`."""
    try:
        stage: Stage = staged(journal.recorded, prior(asked.calibration), asked.kv_blocks)
    except JournalUnfit as error:
        raise NothingRead(str(error)) from error
    fleet = journal.recorded.fleet
    assert fleet is not None, "a journal with requests has a fleet"
    every = {IN_FORCE: fleet.policy, **policies}
    cells = [Cell(name, policy, load) for load in loads for name, policy in every.items()]
    return result_of(journal.recorded, stage, play_all(stage, cells, asked.jobs))


def prior(calibration: Path | None) -> EngineTiming:
    """Return the timing from which the fit starts; raise `ConfigurationError` if the file has none."""
    if calibration is None:
        return H200_8B
    try:
        return fit(load_capture(calibration).rows)
    except (*UNDECODABLE, ValueError) as error:
        raise ConfigurationError([f"--calibration: {calibration.name}: {error}"]) from error


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(dict.fromkeys(float(each) for each in text.split(",")))
    except ValueError as error:
        raise ConfigurationError([f"--loads: found {text!r}, allowed numbers between commas"]) from error
    if not all(0.01 <= each <= 100 for each in loads):  # noqa: PLR2004 - NaN is neither
        raise ConfigurationError([f"--loads: found {text!r}, allowed 0.01..100"])
    return loads
