"""`router pools`: one address in front of several pools, each a router with its workers.

Flags and variables that Dynamo's global router has, too, have its names. `--set` and `KVROUTER_*` set fields in
`data`, `control`, `failures`, `queue`, `tokens` and `telemetry` of a router's settings. Source: `docs/SOURCES.md` D5.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace as replace_part
from pathlib import Path
from typing import Any

import click
import msgspec
import structlog
from msgspec.structs import replace

from kv_protocol.fleet import is_base_url
from kv_runtime.config.command import errors_printed
from kv_runtime.config.loading import ConfigurationError, load_settings
from kv_runtime.config.rendering import without_user
from kv_runtime.http.hosts import url_of
from kv_runtime.process import run_process
from kv_runtime.supervise import run_parts
from kv_runtime.telemetry import configure_logs
from router.cli.options import NOT_DONE
from router.cli.router_parts import RouterParts
from router.cli.serve import EXPECTED, opened
from router.config import RouterSettings
from router.pools.config import PoolsConfig, PoolSettings, RouterAddress, read_config
from router.pools.process import PoolsProcess
from router.pools.selection import Targets
from router.pools.served import Identity

_ENVIRONMENT = "DYN_GLOBAL_ROUTER_"
_ACCEPT_PARAMS = "disaggregation.accept_params"
"""Setting without which a router refuses requests of one phase."""
_OWN_STAGES = 2
"""How many stages the process itself has: routers in it stop after these."""
_MILLISECONDS = click.FloatRange(0, 3.6e6)
_log = structlog.get_logger("pools")


def _target_option(target: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option of a default target, which has Dynamo's older name as well."""
    flag, variable = f"--default-{target}-target", f"{_ENVIRONMENT}DEFAULT_{target.upper()}_TARGET"
    names, variables = (f"{flag}-ms", flag, f"{target}_ms"), [f"{variable}_MS", variable]
    return click.option(*names, type=_MILLISECONDS, envvar=variables, help="for requests without a target")


@click.command("pools")
@click.option(
    "--config",
    "file",
    required=True,
    envvar=f"{_ENVIRONMENT}CONFIG",
    type=click.Path(path_type=Path),
    help="the pools, as JSON",
)
@click.option(
    "--model-name",
    required=True,
    multiple=True,
    envvar=f"{_ENVIRONMENT}MODEL_NAME",
    help="model that the pools serve; repeat the flag for further names",
)
@click.option("--namespace", default="dynamo", envvar="DYN_NAMESPACE", help="shown in /v1/pools")
@click.option(
    "--component-name", default="global_router", envvar=f"{_ENVIRONMENT}COMPONENT_NAME", help="shown in /v1/pools"
)
@_target_option("ttft")
@_target_option("itl")
@click.option(
    "--pool",
    "places",
    multiple=True,
    metavar="NAMESPACE=URL[,CONTROL_URL]|FILE",
    help="a pool's router: its address, or the file of one in this process; replaces pools.namespaces",
)
@click.option("--text", default="", help="tokenizer: `byte`, or a local model directory; without it ISL is estimated")
@click.option("--port", type=int, help="data plane port; 0: any free one")
@click.option("--control-port", type=int, help="control plane port; 0: any free one")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="set any field")
@click.option("--check", is_flag=True, help="check the configuration, print what is wrong, and end")
def pools(*, file: Path, places: tuple[str, ...], check: bool, **flags: Any) -> None:  # noqa: ANN401 - see the flags
    """Choose a pool of workers for each request, by its length, its targets and the state of the pools.

    \b
    Example:  router pools --config pools.json --model-name m --pool fast=http://127.0.0.1:8000
    """  # noqa: D301
    with errors_printed("router", EXPECTED, NOT_DONE):
        given = {"data.port": flags["port"], "control.port": flags["control_port"]}
        settings = load_settings(RouterSettings, assignments=flags["assignments"], flags=given)
        configure_logs(settings.telemetry.log_level)
        config = _configuration(file, places)
        identity = Identity(
            models=flags["model_name"],
            namespace=flags["namespace"],
            component_name=flags["component_name"],
            defaults=Targets(flags["ttft_ms"], flags["itl_ms"]),
        )
        if check:
            click.echo(f"{file}: {config.mode}, {', '.join(config.pools)}")
        else:
            run_process(lambda stop: _serve(config, identity, settings, flags["text"], stop))


def _configuration(file: Path, given_pools: tuple[str, ...]) -> PoolsConfig:
    """Return the configuration of file and flags, and warn; raise `ConfigurationError`."""
    try:
        data = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError([f"{file}: {error}"]) from error
    config = read_config(data, dict(_pool(each) for each in given_pools))
    for warning in config.warnings:
        _log.warning("pools_configuration", warning=warning)
    unplaced = [name for name, pool in config.pools.items() if not pool.routers and not pool.config]
    if unplaced:
        allowed = "routers or config, or a flag --pool"
        raise ConfigurationError([f"pools.namespaces.{name}: found none, allowed {allowed}" for name in unplaced])
    return config


def _pool(given: str) -> tuple[str, PoolSettings]:
    name, _, where = given.partition("=")
    urls = where.split(",")
    if name and where and "://" not in where:
        return name, PoolSettings(config=where)
    if not name or len(urls) > 2 or not all(map(is_base_url, urls)):  # noqa: PLR2004 - data and control plane
        allowed = "NAMESPACE=URL, NAMESPACE=URL,CONTROL_URL or NAMESPACE=FILE"
        raise ConfigurationError([f"--pool: found {without_user(repr(given))}, allowed {allowed}"])
    return name, PoolSettings(routers=(RouterAddress(url=urls[0], control_url="".join(urls[1:])),))


async def _serve(
    config: PoolsConfig, identity: Identity, settings: RouterSettings, text: str, stop: asyncio.Event
) -> None:
    async with AsyncExitStack() as cleanup:
        config, own_routers = await _open_own_routers(config, stop, cleanup)
        process = PoolsProcess(config, identity, settings, text)
        await process.start()
        for file, router in own_routers.items():
            click.echo(f"router of {file}  {router.data_url}  {router.control_url}  {router.log_url}")
        click.echo(f"pools on       {url_of(settings.data.host, process.data.port)}  ({config.mode})")
        click.echo(f"control plane  {url_of(settings.control.host, process.control.port)}")
        own = [
            replace_part(part, name=f"{part.name} of {file}", stage=part.stage + _OWN_STAGES)
            for file, router in own_routers.items()
            for part in router.parts()
        ]
        drain_s = process.drain_s + max((router.drain_s for router in own_routers.values()), default=0.0)
        await run_parts([*process.parts(), *own], stop=stop, drain_s=drain_s)


async def _open_own_routers(
    config: PoolsConfig, stop: asyncio.Event, cleanup: AsyncExitStack
) -> tuple[PoolsConfig, dict[str, RouterParts]]:
    """Start the router of each configured file once; return the configuration with their addresses, and the routers.

    Routers of a disagg configuration accept requests of one phase.

    Raises:
        ConfigurationError: a file is invalid. Also what `opened` raises.
    """
    found: dict[str, RouterParts] = {}
    pools = dict(config.pools)
    flags = {_ACCEPT_PARAMS: True} if config.mode == "disagg" else {}
    for name, pool in config.pools.items():
        if not pool.config:
            continue
        if pool.config not in found:
            settings = load_settings(RouterSettings, file=Path(pool.config), flags=flags)
            found[pool.config] = await opened(settings, stop, cleanup)
        router = found[pool.config]
        pools[name] = pool.model_copy(
            update={"routers": (RouterAddress(url=router.data_url, control_url=router.control_url),)}
        )
    return replace(config, pools=pools), found
