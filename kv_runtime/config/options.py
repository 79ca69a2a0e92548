"""The flags of every process, as options of click. This module must import none that reads the configuration."""

from collections.abc import Callable
from pathlib import Path

import click

EXPLAIN = "kv_runtime.config.explain"
"""The key of click's `meta` under which `--explain` is noted."""


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of every process to a click command: `--config`, `--set`, `--print-config`, `--explain`."""
    explained = "with --print-config: say of each setting what it means and what is allowed"
    for option in (
        click.option("--explain", is_flag=True, expose_value=False, callback=_note_explain, help=explained),
        click.option("--print-config", is_flag=True, help="print the effective configuration and end"),
        click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="set any field"),
        click.option("--config", "file", type=click.Path(path_type=Path), help="YAML file with the sections"),
    ):
        command = option(command)
    return command


def _note_explain(context: click.Context, _option: click.Parameter, is_wanted: bool) -> None:  # noqa: FBT001 - click's
    context.meta[EXPLAIN] = is_wanted
