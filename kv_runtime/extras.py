"""Extras of the distribution: which packages a command needs beyond `pip install kv-router`.

The contents of an extra are read from the installation's metadata. Sources without metadata are not checked.
"""

import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module, metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

DISTRIBUTION = "kv-router"
_TOOLS = Path(__file__).parent / "tools"
"""In an installation, the folder that holds `dashboards` and, if kv-router-tools is installed, `bench`.

A checkout does not have this folder: it has both packages at its root.
"""
_OF_EXTRA = re.compile(r"""([\w.-]+).*;.*\bextra\s*==\s*["']([\w.-]+)["']""")
"""A requirement of an extra: the package, and the extra."""


def install_command(extra: str) -> str:
    """Return the command that installs the extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing(extra: str) -> list[str]:
    """Return which packages of the extra are not installed. The extra must not include another extra."""
    if not _is_installed(DISTRIBUTION):
        return []
    found = [match.groups() for match in map(_OF_EXTRA.match, metadata.requires(DISTRIBUTION) or ()) if match]
    return [name for name, of_extra in found if of_extra == extra and not _is_installed(name)]


def require(extra: str, program: str, what: str) -> None:
    """End the process with one sentence and exit status 1 if packages of the extra are missing.

    Args:
        extra: its name in pyproject.toml.
        program: the command that the user called; the sentence begins with it.
        what: the component that needs the extra, as the subject of the sentence.
    """
    if missing(extra):
        sys.exit(f"{program}: {what} needs {DISTRIBUTION}[{extra}]: {install_command(extra)}")


def require_built(program: str, *packages: str) -> None:
    """End the process with one sentence and exit status 1 if one of the packages cannot be imported.

    Such a package has a C++ extension, and raises `ImportError` if the extension cannot be loaded.
    """
    for package in packages:
        try:
            import_module(package)
        except ImportError as error:
            command = f"pip install --force-reinstall --no-deps --no-cache-dir {DISTRIBUTION}"
            sys.exit(f"{program}: {error}; with a C++17 compiler, build it anew: {command}")


def reach_tools() -> None:
    """Make `bench` and `dashboards` importable in this process and in those that it starts."""
    tools = str(_TOOLS)
    if not _TOOLS.is_dir() or tools in sys.path:
        return
    sys.path.insert(0, tools)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (tools, inherited)))


class LazyCommand(click.Command):
    """A command that is imported when called. `place` is `package.module:name`, `text` its one-line help."""

    def __init__(self, name: str, place: str, text: str) -> None:
        super().__init__(name, help=text)
        self._place = place

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 - click's
    ) -> click.Context:
        """Return the context of the imported command, which click then invokes."""
        return self.imported().make_context(info_name, args, parent, **extra)

    def imported(self) -> click.Command:
        """Return the command itself."""
        module, _, attribute = self._place.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


class InstalledCommands(click.Group):
    """A group that has its own commands, and one for each of the installation's entry points in `kv_router.<program>`.

    An entry point is imported when its command is called. `texts` maps the names of commands to their one-line help; a
    command that is not in `texts` is imported even to list it. An entry point names the extra that its command needs.
    """

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - click's
        program: str,
        texts: Mapping[str, str] = MappingProxyType({}),
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*arguments, **options)
        self._program, self._texts = program, texts

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in order."""
        return sorted({*super().list_commands(ctx), *self._entries()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name; if its extra is not installed, a command that says what to install."""
        command = super().get_command(ctx, cmd_name)
        entry = None if command else self._entries().get(cmd_name)
        if entry is None:
            return command
        extra = "".join(entry.extras)
        if missing(extra):
            return _install_hint(extra, self._program, cmd_name)
        reach_tools()
        command = LazyCommand(cmd_name, f"{entry.module}:{entry.attr}", self._texts.get(cmd_name, ""))
        return command if cmd_name in self._texts else command.imported()

    def _entries(self) -> dict[str, metadata.EntryPoint]:
        return {entry.name: entry for entry in metadata.entry_points(group=f"kv_router.{self._program}")}


def _install_hint(extra: str, program: str, name: str) -> click.Command:
    """Return a command in place of one that needs a missing extra: with any arguments, it says what to install."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    text = f"needs {DISTRIBUTION}[{extra}]"
    return click.Command(
        name, context_settings=anything, callback=lambda: require(extra, program, name), short_help=text
    )


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
