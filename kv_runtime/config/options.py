"""The flags of every process, as options of click; they load nothing of what reads the configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

EXPLAIN = "kv_runtime.config.explain"
"""The key of click's `meta` under which `--explain` is noted."""


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of every process to a click command: `--config`, `--set`, `--print-config`, `--explain`."""
    for option in (
        _explain_option(),
        click.option("--print-config", is_flag=True, help="print the effective configuration and end"),
        click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="set any field"),
        click.option("--config", "file", type=click.Path(path_type=Path), help="YAML file with the sections"),
    ):
        command = option(command)
    return command


def _explain_option() -> Any:  # noqa: ANN401 - a decorator of click
    def wanted(context: click.Context, _option: click.Parameter, is_wanted: bool) -> None:  # noqa: FBT001 - click's
        context.meta[EXPLAIN] = is_wanted

    text = "with --print-config: say of each setting what it means and what is allowed"
    return click.option("--explain", is_flag=True, expose_value=False, callback=wanted, help=text)
