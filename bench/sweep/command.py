"""`router bench sweep`: many loads, modes and layouts, one file a run; an interrupted sweep continues where it was."""

import math
import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import click
from yarl import URL

from bench.child import BenchFailed, finished
from bench.processes import ProcessFailed
from bench.sweep.results import ResultInvalid, RunInputs
from bench.sweep.run import Sweep, workers_of
from router.decision.policies import MODES

_RUNS_MAX = 10_000
_FLEET = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CONCURRENCY_MAX, _TOKENS_MAX = 4096, 1 << 20


def _listed(kind: Callable[[str], Any], allowed: str, is_allowed: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return the callback of an option that takes values between commas; it returns each value once."""

    def callback(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[Any, ...]:
        found = []
        for each in [] if text is None else text.split(","):
            try:
                found.append(kind(each))
            except ValueError:
                found.append(None)
            if found[-1] is None or not is_allowed(found[-1]):
                raise click.BadParameter(f"found {each!r}, allowed {allowed}, between commas")
        return tuple(dict.fromkeys(found))

    return callback


def _url(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    if text and (URL(text).scheme not in ("http", "https") or not URL(text).host):
        raise click.BadParameter(f"found {text!r}, allowed http://host:port")
    return text.rstrip("/")


def _fleet(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    if not _FLEET.fullmatch(text):
        raise click.BadParameter(f"found {text!r}, allowed {_FLEET.pattern}: it begins the names of files")
    return text


_tokens = _listed(int, f"tokens, whole numbers of 1..{_TOKENS_MAX}", lambda each: 1 <= each <= _TOKENS_MAX)
_users = _listed(int, f"users, whole numbers of 1..{_CONCURRENCY_MAX}", lambda each: 1 <= each <= _CONCURRENCY_MAX)
_rates = _listed(float, "requests a second, above 0", lambda each: 0 < each < math.inf)
_shares = _listed(float, "shares of 0..1", lambda each: 0 <= each <= 1)
_layouts = _listed(lambda each: (each, sum(workers_of(each))), "4a or 1p3d with 1..99 of each", bool)
_modes = _listed(str, "a mode: " + ", ".join(MODES), lambda each: each in MODES)


@click.command("sweep", context_settings={"show_default": True, "auto_envvar_prefix": "KVROUTER_SWEEP"})
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="directory of the runs")
@click.option("--url", callback=_url, default="", help="an OpenAI endpoint; without it a fleet is started for each run")
@click.option("--model", default="sim-8b", help="the model that is asked for")
@click.option("--fleet", callback=_fleet, default="url", help="the endpoint's name in files, tables and plots")
@click.option("--gpus", type=click.IntRange(1, 4096), default=1, help="the endpoint's GPUs: throughput is per GPU")
@click.option("--modes", callback=_modes, default="kv,round-robin", help="the router's, between commas")
@click.option("--layouts", callback=_layouts, default="4a", help="simulated workers: 4a aggregated, 1p3d by phase")
@click.option("--concurrency", callback=_users, help="users with one request at a time; without --rate 1,4,16,64")
@click.option("--rate", callback=_rates, help="requests a second instead of users")
@click.option("--isl", callback=_tokens, default="1024", help="tokens of a prompt")
@click.option("--osl", callback=_tokens, default="64", help="tokens of an answer")
@click.option("--prefix-share", callback=_shares, default="0.5", help="share of a prompt that other prompts have")
@click.option("--prefixes", type=click.IntRange(1, 100_000), default=32, help="different shared beginnings")
@click.option("--requests", type=click.IntRange(1, 1_000_000), default=200, help="requests of each run")
@click.option("--warmup", type=click.IntRange(0, 100_000), default=16, help="requests before each run, not measured")
@click.option("--seed", type=int, default=1, help="seed of prompts and arrivals")
@click.option("--set", "router_settings", multiple=True, metavar="SECTION.KEY=VALUE", help="routers' fields")
@click.option("--worker-set", "worker_settings", multiple=True, metavar="SECTION.KEY=VALUE", help="workers' fields")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(0), default=120.0, help="seconds for the endpoint and its model"
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=300.0, help="seconds for one answer")
@click.pass_context
def sweep(context: click.Context, /, **flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure every combination of modes, layouts, loads and lengths, each into one JSON file.

    Runs whose files are in the directory, with equal inputs, are not measured again: the same command goes on after an
    interruption. Prompts are token ids on /v1/completions. `router bench report` makes tables and plots of the files.

    Exit status 1 if not all runs were measured.
    """
    if flags["concurrency"] and flags["rate"]:
        raise click.UsageError("found --concurrency and --rate, allowed one of them")
    of_fleets = ("modes", "layouts", "router_settings", "worker_settings")
    given = [
        each.opts[0] for each in context.command.params if each.name in of_fleets and _is_given(context, each.name)
    ]
    if flags["url"] and given:
        raise click.UsageError(f"found --url with {given[0]}, allowed without: the endpoint has its own")
    alone = [f"--{name}" for name in ("fleet", "gpus") if _is_given(context, name)]
    if not flags["url"] and alone:
        raise click.UsageError(f"found {alone[0]} without --url, allowed with it: a fleet has its layout's")
    runs = _runs(flags)
    if len(runs) > _RUNS_MAX:
        raise click.UsageError(f"found {len(runs)} runs, allowed {_RUNS_MAX}")
    if len({each.name for each in runs}) < len(runs):
        raise click.UsageError(
            "found two runs of one name, allowed rates and shares that differ in their first six digits"
        )
    flags["out"].mkdir(parents=True, exist_ok=True)
    work = Sweep(runs, flags["out"], say=_say, wait_s=flags["wait_s"], timeout_s=flags["timeout_s"])
    try:
        finished(work.go(), (BenchFailed, ProcessFailed, ResultInvalid))
    except click.ClickException as error:
        sys.exit(f"router bench sweep: {error}")
    except click.Abort:
        sys.exit("router bench sweep: interrupted; the same command goes on with the runs that are left")


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _say(line: str) -> None:
    click.echo(line)
    sys.stdout.flush()  # a batch system's log shows it now


def _runs(flags: dict[str, Any]) -> tuple[RunInputs, ...]:
    """Return every combination; loads vary fastest."""
    fleets = [(mode, *layout) for mode in flags["modes"] for layout in flags["layouts"]]
    if flags["url"]:
        fleets = [("", flags["fleet"], flags["gpus"])]
    loads = [(0, rate) for rate in flags["rate"]] or [(users, 0.0) for users in flags["concurrency"] or (1, 4, 16, 64)]
    names = ("url", "model", "prefixes", "requests", "warmup", "seed", "router_settings", "worker_settings")
    same = {name: flags[name] for name in names}
    return tuple(
        RunInputs(
            mode=mode,
            layout=layout,
            workers=workers,
            concurrency=concurrency,
            rate=rate,
            isl_tokens=isl_tokens,
            osl_tokens=osl_tokens,
            prefix_share=share,
            **same,
        )
        for (mode, layout, workers), isl_tokens, osl_tokens, share, (concurrency, rate) in product(
            fleets, flags["isl"], flags["osl"], flags["prefix_share"], loads
        )
    )
