"""The command `router`: settings, what a router is opened with, and what it prints.

`router --processes N`: N routers on one port; this process has the control plane of all, and the nats-server if any.

Each of these processes is a router like any other of a fleet: it has an index of its own, and sends the others its
leases. Its control plane is on loopback: only this process calls it, with a token that it made at the start.
"""

import asyncio
import os
import secrets
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path

import click
from pydantic import SecretStr

from kv_runtime.clock import Clock
from kv_runtime.config.command import errors_printed, takes_settings
from kv_runtime.config.loading import ConfigurationError, given_paths
from kv_runtime.config.rendering import without_user
from kv_runtime.event_log import BrokerUnavailable, StreamUnfit, connected_log
from kv_runtime.http.acceptor import PortUsed, listening_sockets, port_of
from kv_runtime.http.hosts import url_of
from kv_runtime.nats_server import EmbeddedNats, NatsServerError, nats_server_families
from kv_runtime.process import run_process
from kv_runtime.supervise import Part, run_parts
from kv_runtime.telemetry import LoopLag, Projection, configure_logs, new_registry
from kv_runtime.text.byte_model import BYTE_MODEL
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.loading import load_text
from router.cli.router_parts import RouterParts, ServingProcess
from router.config import RouterSettings
from router.decision.policy_config import load_modes
from router.decision.policy_store import PolicyStore
from router.engine_attacher import stated_directory
from router.http.limits import TooFewFiles
from router.processes.front import Front
from router.processes.supervisor import Links, ProcessesFailed, Supervisor, Work
from router.queue.tenants import SECRET_BYTES
from router.web import ROOT

_OTHER_STREAMS_BYTES = 256 << 20
"""Room in the embedded server's store for all streams but those of events, snapshots and the journal."""
EXPECTED = (
    ConfigurationError, BrokerUnavailable, StreamUnfit, NatsServerError, PortUsed, TextError, TooFewFiles,
    ProcessesFailed,
)  # fmt: skip
"""Errors that end a process with one line."""
_LATE_S = 2.0
"""A process that takes this much longer to stop than its own limit is killed."""
_REST_S = 10.0
"""How long the control plane and the nats-server may take to stop, after the processes."""
_TOKEN_BYTES = 32


@takes_settings(RouterSettings, "router", EXPECTED)
def run(*, settings: RouterSettings, assignments: tuple[str, ...], policy__mode: str | None, **_: object) -> None:
    """Serve until a signal comes."""
    given = given_paths(RouterSettings, assignments, {"policy.mode": policy__mode})
    serve = _serve if settings.data.processes == 1 else _serve_processes
    run_process(lambda stop: serve(settings, stop, given))


async def _serve(settings: RouterSettings, stop: asyncio.Event, given: frozenset[str]) -> None:
    async with AsyncExitStack() as cleanup:
        router = await opened(settings, stop, cleanup, given)
        click.echo(f"router on      {router.data_url}  (mode {router.policies.initial.mode})")
        click.echo(f"control plane  {router.control_url}")
        click.echo(f"web page       {router.control_url}{ROOT}")
        if router.picker_address:
            click.echo(f"picker on      {router.picker_address}")
        click.echo(f"event log      {without_user(router.log_url)}")
        await run_parts(router.parts(), stop=stop, drain_s=router.drain_s)


async def opened(
    settings: RouterSettings,
    stop: asyncio.Event,
    cleanup: AsyncExitStack,
    given: frozenset[str] = frozenset(),
    process: ServingProcess | None = None,
) -> RouterParts:
    """Return a started router, to be run; raises what `EXPECTED` names.

    `given` are the paths of the settings on the command line: they win over a stored policy.
    """
    directory = settings.tokens.text
    if not directory and settings.attaches:
        directory = await stated_directory(settings, Clock(), stop)
    tokens = settings.tokens
    text = load_text(directory or BYTE_MODEL, tokens.encoder, chat_template=tokens.chat_template)
    modes = load_modes(settings.policy.user_modes)
    policies = PolicyStore(settings.state.dir, settings.policy.policy(), modes)
    policies.restore({path.removeprefix("policy.") for path in given if path.startswith("policy.")})
    nats, url = await _started_nats(settings, cleanup)
    log = await cleanup.enter_async_context(connected_log(settings.nats.model_copy(update={"url": url}), "router"))
    router = RouterParts(settings, text, policies, log, process, nats_server=nats, directory=directory)
    await router.start(stop)
    return router


async def _started_nats(settings: RouterSettings, cleanup: AsyncExitStack) -> tuple[EmbeddedNats | None, str]:
    """Start a nats-server unless another one has the event log; return it, and the URL of the log."""
    nats = settings.nats
    if nats.url:
        return None, nats.url
    streams = 2 * nats.events_max_bytes + nats.snapshots_bytes_max + settings.journal.max_bytes
    store_dir = Path(nats.store_dir) if nats.store_dir else None
    server = EmbeddedNats(port=nats.port, store_dir=store_dir, store_bytes_max=streams + _OTHER_STREAMS_BYTES)
    await cleanup.enter_async_context(server)
    return server, server.url


async def _serve_processes(settings: RouterSettings, stop: asyncio.Event, given: frozenset[str]) -> None:
    if not settings.ledger.replicas:
        raise ConfigurationError(["ledger.replicas: found false, allowed true: several processes share one ledger"])
    names = [f"serving-{number}" for number in range(settings.data.processes)]
    token, secret, clock = secrets.token_hex(_TOKEN_BYTES), os.urandom(SECRET_BYTES), Clock()
    data, control, registry = settings.data, settings.control, new_registry()
    stop_s = data.drain_s + 2 * data.limits().linger_s + 1 + _LATE_S
    async with AsyncExitStack() as cleanup:
        port = _free_port(settings)
        nats, url = await _started_nats(settings, cleanup)
        links = await cleanup.enter_async_context(Links(names, clock, token=token))

        def work_of(name: str) -> Work:
            number = names.index(name)
            process = ServingProcess(number, secret, front.policy, front.shadows)
            of_start = frozenset[str]() if front.policy else given  # what was changed since wins over the command line
            return partial(_run_one, _of_one(settings, number, port, url, token), of_start, process)

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
    """Return the port that the processes are to share; raise `PortUsed` if another router has it."""
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


def _run_one(settings: RouterSettings, given: frozenset[str], process: ServingProcess, say: Connection) -> None:
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
            router = await opened(settings, stop, cleanup, given, process)
            say.send(router.control_url)
            await run_parts(router.parts(), stop=stop, drain_s=router.drain_s)

    with errors_printed("router", EXPECTED):
        run_process(main)
