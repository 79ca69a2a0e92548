"""A command that takes settings: it loads and checks them, prints them on demand, and reports expected errors."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click

from kv_runtime.config.loading import load_settings
from kv_runtime.config.options import config_options
from kv_runtime.config.rendering import render
from kv_runtime.config.sections import Settings
from kv_runtime.process import print_lines
from kv_runtime.telemetry import configure_logs

Command = Callable[..., None]
Errors = tuple[type[Exception], ...]


@contextmanager
def errors_printed(program: str, expected: Errors, exit_code: int = 1) -> Iterator[None]:
    """End the process with `exit_code` if the block raises an expected error.

    The program's name and the error's message are printed to stderr.
    """
    try:
        yield
    except expected as error:
        print_lines(*f"{program}: {error}".split("\n"), err=True)
        sys.exit(exit_code)


def takes_settings(
    kind: type[Settings], program: str, expected: Errors, *, log_level: str = "", exit_code: int = 1
) -> Callable[[Command], Command]:
    """Return a decorator that adds the flags of every process to a click command.

    The command is called with the effective `settings`, the `assignments` of `--set`, and the values of its own
    options. An option sets a setting if its parameter has the setting's path as its name, with `__` for each dot:
    `nats__url`. With `--print-config` the settings are printed, and the command is not called.

    Args:
        kind: the tree of settings; it has a section `telemetry`.
        program: the command's name, printed before the message of an error.
        expected: errors that end the process with their message, as `errors_printed` does.
        log_level: the lowest level that is logged; empty: `telemetry.log_level`.
        exit_code: the process's exit code after an expected error.
    """

    def decorated(command: Command) -> Command:
        @config_options
        @wraps(command)
        def run(*, file: Path | None, assignments: tuple[str, ...], print_config: bool, **options: object) -> None:
            flags = {
                name.replace("__", "."): value
                for name, value in options.items()
                if name.partition("__")[0] in kind.model_fields and value != ()
            }
            with errors_printed(program, expected, exit_code):
                settings: Any = load_settings(kind, file=file, assignments=assignments, flags=flags)
                if print_config:
                    click.echo(render(settings), nl=False)
                    return
                configure_logs(log_level or settings.telemetry.log_level)
                command(settings=settings, assignments=assignments, **options)

        return run

    return decorated
