"""The command `router`: settings, what a router is opened with, and what it prints."""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click

from kv_runtime.clock import SystemClock
from kv_runtime.config.loading import ConfigurationError, given_paths, load_settings
from kv_runtime.config.rendering import render, without_user
from kv_runtime.event_log import BrokerUnavailable, EventLog, StreamUnfit
from kv_runtime.http.acceptor import PortUsed
from kv_runtime.http.hosts import url_of
from kv_runtime.nats_server import EmbeddedNats, NatsServerError
from kv_runtime.process import run_process
from kv_runtime.supervise import Part, run_parts
from kv_runtime.telemetry import configure_logs
from kv_runtime.text.byte_model import BYTE_MODEL
from kv_runtime.text.chat_template import TextError
from kv_runtime.text.loading import load_text
from router.cli.router_parts import Place, RouterParts
from router.config import RouterSettings
from router.decision.policy_loader import load_modes
from router.decision.policy_store import PolicyStore
from router.http.limits import TooFewFiles
from router.pools.process import OpenedRouter
from router.web.page import ROOT
from router.workers.service import stated_directory

_OTHER_STREAMS_BYTES = 256 << 20
"""Room in the embedded server's store for all streams but those of events, snapshots and the journal."""
EXPECTED = (ConfigurationError, BrokerUnavailable, StreamUnfit, NatsServerError, PortUsed, TextError, TooFewFiles)
"""Errors that end a process with one line."""


def run(flags: Mapping[str, Any], *, file: Path | None, assignments: tuple[str, ...], print_config: bool) -> None:
    """Serve until a signal comes, or print the settings; an expected error ends the process with one line."""
    try:
        settings = load_settings(RouterSettings, file=file, assignments=assignments, flags=flags)
        if print_config:
            click.echo(render(settings), nl=False)
            return
        configure_logs(settings.telemetry.log_level)
        given = given_paths(RouterSettings, assignments, flags)
        if settings.data.processes > 1:
            from router.cli.processes import run_processes  # noqa: PLC0415 - it imports this module

            run_processes(settings, given)
        else:
            run_process(lambda stop: _serve(settings, stop, given))
    except EXPECTED as error:
        sys.exit(f"router: {error}")


async def _serve(settings: RouterSettings, stop: asyncio.Event, given: frozenset[str]) -> None:
    async with AsyncExitStack() as cleanup:
        router = await opened(settings, stop, cleanup, given)
        click.echo(f"router on      {router.data_url}  (mode {router.mode})")
        click.echo(f"control plane  {router.control_url}")
        click.echo(f"web page       {router.control_url}{ROOT}")
        if router.picker_address:
            click.echo(f"picker on      {router.picker_address}")
        click.echo(f"event log      {without_user(router.log_url)}")
        await run_parts(router.parts, stop=stop, drain_s=router.drain_s)


async def opened(
    settings: RouterSettings,
    stop: asyncio.Event,
    cleanup: AsyncExitStack,
    given: frozenset[str] = frozenset(),
    place: Place | None = None,
) -> OpenedRouter:
    """Return a started router, to be run; raises what `EXPECTED` names.

    `given` are the paths of what the command line says: it wins over a policy that was stored.
    """
    directory = settings.tokens.text
    if not directory and settings.attaches:
        directory = await stated_directory(settings, SystemClock(), stop)
    tokens = settings.tokens
    text = load_text(directory or tokens.text or BYTE_MODEL, tokens.encoder, chat_template=tokens.chat_template)
    modes = load_modes(settings.policy.user_modes, settings.policy.mode)
    policies = PolicyStore(settings.state.dir, settings.policy.policy(), modes)
    policies.restore({path.removeprefix("policy.") for path in given if path.startswith("policy.")})
    embedded = embedded_nats(settings)
    if embedded:
        await cleanup.enter_async_context(embedded)
    url = embedded.url if embedded else settings.nats.url
    credentials = settings.nats.credentials.get_secret_value()
    log = await EventLog.connect(url, name="router", user=settings.nats.user, token=credentials)
    cleanup.push_async_callback(log.close)
    router = RouterParts(settings, text, policies, log, place, nats_server=embedded, directory=directory)
    await router.start(stop)
    return OpenedRouter(
        data_url=url_of(settings.data.host, router.data.port, router.data.scheme),
        control_url=url_of(settings.control.host, router.control.port),
        log_url=url,
        mode=policies.initial.mode,
        parts=[*router.parts(), *([Part("nats-server", embedded.run, 4)] if embedded else [])],
        drain_s=settings.data.drain_s + 2 * router.data.limits.linger_s + 1,
        picker_address=f"{settings.picker.host}:{router.picker.port}" if router.picker else "",
    )


def embedded_nats(settings: RouterSettings) -> EmbeddedNats | None:
    """Return the nats-server that is to be started; None: another one has the event log."""
    nats = settings.nats
    if nats.url:
        return None
    return EmbeddedNats(
        port=nats.port,
        store_dir=Path(nats.store_dir) if nats.store_dir else None,
        store_bytes_max=2 * nats.events_max_bytes
        + nats.snapshots_bytes_max
        + settings.journal.max_bytes
        + _OTHER_STREAMS_BYTES,
    )
