"""`router --processes N`: N routers on one port; in this process the control plane of all, and the nats-server if any.

Each is a router as others of a fleet are: it follows the log with an index of its own, and tells the others its leases.
Its control plane is on loopback, for this process alone: with a token that is made at the start.
"""

import asyncio
import os
import secrets
import sys
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection

import click
from pydantic import SecretStr

from kv_runtime.clock import SystemClock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.rendering import without_user
from kv_runtime.http.acceptor import listening_sockets, port_of
from kv_runtime.http.hosts import url_of
from kv_runtime.nats_server import nats_server_families
from kv_runtime.process import run_process
from kv_runtime.supervise import Part, run_parts
from kv_runtime.telemetry import LoopLag, Projection, configure_logs, new_registry
from router.cli.router_parts import Place
from router.cli.serve import EXPECTED, embedded_nats, opened
from router.config import RouterSettings
from router.processes.front import Front
from router.processes.links import Links
from router.processes.supervisor import ProcessesFailed, Supervisor, Work
from router.queue.tenants import SECRET_BYTES

_LATE_S = 2.0
"""How long after its own time to stop a process is killed."""
_REST_S = 10.0
"""For the control plane and the nats-server to stop."""
_TOKEN_BYTES = 32


def run_processes(settings: RouterSettings, given: frozenset[str]) -> None:
    """Serve in `data.processes` processes until a signal comes; raises what `EXPECTED` names."""
    if not settings.ledger.replicas:
        raise ConfigurationError(["ledger.replicas: found false, allowed true: several processes share one ledger"])
    try:
        run_process(lambda stop: _serve(settings, given, stop))
    except ProcessesFailed as error:
        sys.exit(f"router: {error}")


async def _serve(settings: RouterSettings, given: frozenset[str], stop: asyncio.Event) -> None:
    names = [f"serving-{number}" for number in range(settings.data.processes)]
    token, secret, clock = secrets.token_hex(_TOKEN_BYTES), os.urandom(SECRET_BYTES), SystemClock()
    data, control, registry = settings.data, settings.control, new_registry()
    stop_s = data.drain_s + 2 * data.limits().linger_s + 1 + _LATE_S
    async with AsyncExitStack() as cleanup:
        port = _free_port(settings)
        if nats := embedded_nats(settings):
            await cleanup.enter_async_context(nats)
        url = nats.url if nats else settings.nats.url
        links = await cleanup.enter_async_context(Links(names, clock, token=token))

        def work_of(name: str) -> Work:
            number = names.index(name)
            place = Place(number, secret, front.policy, front.shadows)
            of_start = frozenset[str]() if front.policy else given  # what was changed since wins over the command line
            return partial(_run_one, _of_one(settings, number, port, url, token), of_start, place)

        def on_started() -> None:
            click.echo(f"router on      {url_of(data.host, port)}")
            click.echo(f"control plane  {url_of(control.host, server.port)}")
            click.echo(f"event log      {without_user(url)}")
            click.echo(f"processes      {len(names)}")

        supervisor = Supervisor(names, work_of, links, clock, stop_s=stop_s, on_started=on_started)
        front = Front(links, supervisor.states, registry)
        Projection(registry, front.families)
        Projection(registry, lambda: nats_server_families(nats))
        server = control.server(front.app(token=control.token.get_secret_value()))
        await server.start()
        parts = [
            Part("processes", supervisor.run, 0),
            Part("control-plane", server.run, 1),
            Part("loop-lag", LoopLag(registry, clock).run, 2),
            *([Part("nats-server", nats.run, 4)] if nats else []),
        ]
        await run_parts(parts, stop=stop, drain_s=stop_s + _REST_S)


def _free_port(settings: RouterSettings) -> int:
    """Return the port that the processes are to share; raise `PortUsed` where another router has it."""
    listening = listening_sockets(settings.data.host, settings.data.port, reuse_port=settings.data.reuse_port)
    port = port_of(listening)
    for each in listening:
        each.close()
    return port


def _of_one(settings: RouterSettings, number: int, port: int, url: str, token: str) -> RouterSettings:
    """Return the settings of one process. It hands over its share of a draining worker's tokens."""
    data, journal = settings.data, settings.journal
    changed = {
        "data": data.model_copy(update={"processes": 1, "port": port, "reuse_port": True}),
        "control": settings.control.model_copy(
            update={"host": "127.0.0.1", "port": 0, "token": SecretStr(token), "hosts": ()}
        ),
        "nats": settings.nats.model_copy(update={"url": url}),
        "handover": settings.handover.model_copy(update={"tokens": -(-settings.handover.tokens // data.processes)}),
        "journal": journal.model_copy(update={"router": f"{journal.router}-{number}" if journal.router else ""}),
    }
    return settings.model_copy(update=changed)


def _run_one(settings: RouterSettings, given: frozenset[str], place: Place, say: Connection) -> None:
    """Run one process until it is asked to stop, or the supervisor is gone."""
    configure_logs(settings.telemetry.log_level)

    async def main(stop: asyncio.Event) -> None:
        loop, supervisor = asyncio.get_running_loop(), parent_process()
        assert supervisor is not None

        def on_supervisor_gone() -> None:
            loop.remove_reader(supervisor.sentinel)
            stop.set()

        loop.add_reader(supervisor.sentinel, on_supervisor_gone)
        async with AsyncExitStack() as cleanup:
            router = await opened(settings, stop, cleanup, given, place)
            say.send(router.control_url)
            await run_parts(router.parts, stop=stop, drain_s=router.drain_s)

    try:
        run_process(main)
    except EXPECTED as error:
        sys.exit(f"router: {error}")
