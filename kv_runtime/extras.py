"""Extras of the distribution: which packages a command needs beyond `pip install kv-router`.

The contents of an extra are read from the installation's metadata. A source tree without metadata is not checked.
"""

import os
import re
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import click

DISTRIBUTION = "kv-router"
_TOOLS = Path(__file__).parent / "tools"
"""In an installation, the folder that holds `dashboards` and, if kv-router-tools is installed, `bench`.

A checkout does not have this folder: it has both packages at its root.
"""
_OF_TOOLS = ("bench.", "dashboards.")
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
    """A command that is imported when called. `place` is `package.module:name`, `text` its one-line help.

    If packages of its `extra` are not installed, it says what to install, in the name of `program`.
    """

    def __init__(self, name: str, place: str, text: str, *, program: str = "", extra: str = "") -> None:
        super().__init__(name, help=text)
        self._place, self._program, self._extra = place, program, extra

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 - click's
    ) -> click.Context:
        """Return the context of the imported command, which click then invokes."""
        if self._extra:
            require(self._extra, self._program, str(self.name))
        return self.imported().make_context(info_name, args, parent, **extra)

    def imported(self) -> click.Command:
        """Return the command itself."""
        module, _, attribute = self._place.partition(":")
        if module.startswith(_OF_TOOLS):
            reach_tools()
        command: click.Command = getattr(import_module(module), attribute)
        return command


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
