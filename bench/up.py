"""`router up`: a fleet of processes on this machine, in one command, until it is stopped.

    router up --workers 4                                  a router with its nats-server, four simulated workers
    router up --prefill 1 --decode 2                       both phases on workers of their own
    router up --nats-servers 3 --routers 2 --workers 8     any one process may die: no new request is lost

Each process writes to a file of its own. A process that ends is reported, and started again with `--restart`. Without
`--restart` all end if no router is left. The exit status is 1 then, and if the fleet did not become ready.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from bench.processes import FleetProcesses, FleetShape, ProcessFailed
from kv_runtime.process import run_process
from kv_runtime.supervise import until

_RESTART_S = 1.0


@click.command(context_settings={"auto_envvar_prefix": "KVROUTER_UP", "show_default": True})
@click.option(
    "--workers", type=click.IntRange(0, 64), help="simulated workers; 4 if there are no others", show_default=False
)
@click.option("--prefill", type=click.IntRange(0, 64), default=0, help="simulated workers that compute prompts")
@click.option("--decode", type=click.IntRange(0, 64), default=0, help="simulated workers that decode")
@click.option("--text", default="byte", help="tokenizer and template: `byte`, or the model's directory")
@click.option("--mode", default="kv", help="how a worker is chosen")
@click.option("--model", default="sim-8b", help="the simulated workers' model")
@click.option("--nats-servers", type=click.IntRange(0, 5), default=0, help="servers of the log; 0: one in the router")
@click.option("--routers", type=click.IntRange(1, 16), default=1, help="several need --nats-servers")
@click.option("--port", type=int, default=8000, help="port of the OpenAI endpoint; 0: any free one")
@click.option("--control-port", type=int, default=8001, help="port of the control plane; 0: any free one")
@click.option("--nats-port", type=int, help="nats-server's port, 4222; 0: any free one", show_default=False)
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="set any field of the router")
@click.option(
    "--worker-set", "worker_settings", multiple=True, metavar="SECTION.KEY=VALUE", help="set any field of the workers"
)
@click.option(
    "--logs", type=click.Path(path_type=Path, file_okay=False), help="directory; without it a new one in /tmp"
)
@click.option("--restart", "is_restarted", is_flag=True, help="restart a process that ends by itself")
def up(
    *,
    workers: int | None,
    prefill: int,
    decode: int,
    text: str,
    logs: Path | None,
    settings: tuple[str, ...],
    is_restarted: bool,
    **shape: Any,  # noqa: ANN401
) -> None:
    """Start a fleet on this machine, with readiness checks and logs; Ctrl-C ends it in order.

    \b
    Examples:  router up --workers 4
               router up --prefill 1 --decode 2
    """  # noqa: D301
    if workers is None:
        workers = 0 if prefill or decode else 4
    if bool(prefill) != bool(decode):
        raise click.UsageError("found one of --prefill and --decode, allowed both or none")
    if shape["routers"] > 1 and not shape["nats_servers"]:
        raise click.UsageError("found --routers without --nats-servers, allowed 1 router, or 1 to 5 servers")
    if shape["nats_port"] is not None and shape["nats_servers"]:
        raise click.UsageError("found --nats-port with --nats-servers, allowed one of them: several have free ports")
    if shape["nats_port"] is None:
        shape["nats_port"] = 4222
    if not workers and not prefill:
        raise click.UsageError("found no worker, allowed --workers, or --prefill with --decode")
    shape["worker_settings"] = (f"engine.text={text}", *shape["worker_settings"])
    directory = logs or Path(tempfile.mkdtemp(prefix="kv-router-up-"))
    directory.mkdir(parents=True, exist_ok=True)
    fleet = FleetShape(
        workers=workers,
        prefill=prefill,
        decode=decode,
        router_settings=(f"tokens.text={text}", *settings),
        log_directory=directory,
        **shape,
    )
    try:
        run_process(lambda stop: _run(FleetProcesses(fleet), directory, stop, is_restarted=is_restarted))
    except* ProcessFailed as failed:
        sys.exit(f"router up: {failed.exceptions[0]}")


async def _run(fleet: FleetProcesses, logs: Path, stop: asyncio.Event, *, is_restarted: bool) -> None:
    """Return once `stop` is set and all processes are gone; raise `ProcessFailed` if all routers end before."""
    await until(stop, _be_up(fleet, logs, is_restarted=is_restarted))
    killed = [name for name, each in fleet.all.items() if each.was_killed]
    click.echo(f"stopped{': did not end in time and were killed: ' + ', '.join(killed) if killed else ''}")


async def _be_up(fleet: FleetProcesses, logs: Path, *, is_restarted: bool) -> None:
    """Start the fleet, and report processes that end, until no router is left."""
    began_s = time.perf_counter()
    click.echo(f"logs           {logs}")
    async with fleet:
        for name, (data_url, control_url) in fleet.router_urls.items():
            at = f"{data_url}  (control plane {control_url}, pid {fleet.routers[name].pid})"
            click.echo(f"{f'{name} on':<15}{at}")
        click.echo(f"event log      {fleet.nats_url}")
        for name, each in fleet.nats_servers.items():
            click.echo(f"{name:<15}nats-server, pid {each.pid}")
        for name, each in fleet.workers.items():
            click.echo(f"{name:<15}simulated, {fleet.shape.roles[name]}, pid {each.pid}")
        click.echo(f"ready          after {time.perf_counter() - began_s:.1f} s; Ctrl-C ends it")
        async with asyncio.TaskGroup() as group:
            watching = {
                name: group.create_task(_watch(fleet, name, logs, is_restarted=is_restarted)) for name in fleet.all
            }
            await asyncio.gather(*(watching[name] for name in fleet.routers))
            for task in watching.values():
                task.cancel()
        raise ProcessFailed(f"no router runs; the last lines of the first:\n{fleet.router.output}")


async def _watch(fleet: FleetProcesses, name: str, logs: Path, *, is_restarted: bool) -> None:
    while True:
        code = await fleet.all[name].until_ended()
        click.echo(f"{name} ended with {code}: {logs}/{name}.log", err=True)
        if not is_restarted:
            return
        await asyncio.sleep(_RESTART_S)
        try:
            await fleet.start_again(name)
        except ProcessFailed as error:
            click.echo(f"{error}", err=True)
        else:
            click.echo(f"{name} runs again, pid {fleet.all[name].pid}", err=True)
