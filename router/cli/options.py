"""What commands share: options, settings, exit codes, the connection to the log, requests to a control plane.

0    done; of `replay`: every decision that could be taken again is equal
1    of `replay`: a decision differs, or a record cannot be folded
2    it could not be done: the arguments are invalid, the data is not available, or nothing answers
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import aiohttp
import click
import msgspec

from kv_protocol.fleet import is_base_url
from kv_runtime.config.command import Command, takes_settings
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import BrokerUnavailable, EventLog, connected_log
from kv_runtime.http.hosts import url_of
from kv_runtime.process import Stopped, run_process, run_to_end
from kv_runtime.supervise import Part, run_parts
from router.config import RouterSettings
from router.doctor.pages import CannotLook, ControlPages, HttpAsker, PageUnreadable

DIFFERENT, NOT_DONE = 1, 2
_DRAIN_S = 5.0
_URLS_MAX = 64
_TIMEOUT_S = 10.0
_UNAUTHORIZED = 401
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - a router that binds one is asked at 127.0.0.1


_T = TypeVar("_T")


class NothingRead(Exception):
    """A command has nothing to print: no journal was found, no replay can start, or a router does not answer."""


_EXPECTED = (BrokerUnavailable, CannotLook, ConfigurationError, NothingRead, Stopped)


def settings_of(
    *options: Callable[[Command], Command], log_level: str = "warning", not_done: int = NOT_DONE
) -> Callable[[Command], Command]:
    """Return a decorator that adds these options to a command that takes a router's settings (`takes_settings`).

    An expected error ends the command with the exit code `not_done`, and a line with the reason.
    """
    taking = takes_settings(RouterSettings, "router", _EXPECTED, log_level=log_level, exit_code=not_done)

    def decorated(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return taking(command)

    return decorated


nats_option = click.option(
    "--nats-url", "nats__url", help="the event log: nats://host:port; its token is nats.credentials"
)
token_option = click.option(
    "--token", "control__token", help="the control plane's bearer token; better by KVROUTER_CONTROL__TOKEN"
)
with_settings = settings_of(
    nats_option,
    click.option("--router", "router_name", default="", help="the router of the journal; without it all routers"),
)
"""Decorates a command that reads journals on the log."""
with_source = settings_of(
    click.option("--router", "url", default="", help="the router's control plane, http://host:port"),
    token_option,
    nats_option,
)
"""Decorates a command that asks a running router, or reads journals on the log."""


def run_on_log(settings: RouterSettings, work: Callable[[EventLog, asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `work(log, stop)` on a connection to the log, to its end or until a signal comes.

    Raises:
        ConfigurationError: the settings name no log.
        BrokerUnavailable: it does not answer.
    """
    if not settings.nats.url:
        raise ConfigurationError(["nats.url: found none, allowed the log of a running router: --nats-url"])

    async def main(stop: asyncio.Event) -> None:
        async with connected_log(settings.nats, "router") as log:

            async def working(part_stop: asyncio.Event) -> None:
                await work(log, part_stop)
                stop.set()
                await part_stop.wait()

            await run_parts([Part("event-log", log.run, 1), Part("journal", working)], stop=stop, drain_s=_DRAIN_S)

    run_process(main)


def moment(value: str) -> int:
    """Return the time in nanoseconds since 1970; without a time zone it is UTC.

    Raises:
        ValueError: it is no time.
    """
    try:
        found = datetime.fromisoformat(value)
    except ValueError as error:
        raise ValueError(f"found {value!r}, allowed a time as 2026-11-21T22:10:00Z") from error
    return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1e9)


def swept(sweep: str) -> dict[str, dict[str, Any]]:
    """Return the fields of each policy of `--sweep FIELD=A,B`, by the policy's name; raise `ConfigurationError`."""
    key, _, values = sweep.partition("=")
    if not key or not all(values.split(",")):
        raise ConfigurationError([f"--sweep: found {sweep!r}, allowed a policy's field and values: ttft_weight=1,4"])
    field = key.removeprefix("policy.")
    return {f"{field}={value}": {field: _value(value)} for value in values.split(",")}


def _value(text: str) -> Any:  # noqa: ANN401 - any JSON
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def plane_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a server that listens at `host` and `port`."""
    return url_of("127.0.0.1" if host in _ANY_ADDRESS else host, port)


def checked_urls(flag: str, urls: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs without a slash at the end, each once; raise `ConfigurationError`, which names what is no URL."""
    shown = {url: "an address with a user" if "@" in url else repr(url) for url in urls if not is_base_url(url)}
    problems = [f"{flag}: found {found}, allowed http(s)://host:port" for found in shown.values()]
    if len(urls) > _URLS_MAX:
        problems.append(f"{flag}: found {len(urls)}, allowed {_URLS_MAX} at most")
    if problems:
        raise ConfigurationError(problems)
    return tuple(dict.fromkeys(url.rstrip("/") for url in urls))


def asked(
    settings: RouterSettings,
    url: str,
    work: Callable[[ControlPages], Coroutine[Any, Any, _T]],
    *,
    flag: str = "--router",
) -> _T:
    """Return what `work` returns for the control plane at `url`, given by `flag`; empty: at the settings' address.

    Raises:
        NothingRead: nothing answers there, or not as a control plane does.
        Stopped: a signal came.
        ConfigurationError: the URL is not valid.
    """
    (address,) = checked_urls(flag, [url or plane_url(settings.control.host, settings.control.port)])
    token = settings.control.token.get_secret_value()

    async def asking() -> _T:
        async with aiohttp.ClientSession() as session:
            return await work(ControlPages(HttpAsker(session, _TIMEOUT_S), address, token))

    try:
        return run_to_end(asking)
    except PageUnreadable as error:
        hint = ", with its --token" if error.status == _UNAUTHORIZED else ""
        words = f"found {error} at {address}, allowed the control plane of a running router{hint}"
        raise NothingRead(f"{flag}: {words}") from error
