"""Extras of the distribution: which packages a command needs beyond `pip install kv-router`.

The metadata of the installation says what an extra contains. Sources without metadata are not checked.
"""

import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "kv-router"
_TOOLS = Path(__file__).parent / "tools"
"""Where a wheel has `bench` and `dashboards`; a checkout has them beside this package, and no such directory."""
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w.-]+)["']""")


def install_command(extra: str) -> str:
    """Return the command that installs the extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing(extra: str) -> list[str]:
    """Return the packages of the extra, and of extras that it includes, that are not installed."""
    return [name for name in _packages(extra) if not _is_installed(name)]


def require(extra: str, program: str, what: str) -> None:
    """End the process with one sentence and exit status 1 if packages of the extra are missing.

    Args:
        extra: its name in pyproject.toml.
        program: the command that the user called; the sentence begins with it.
        what: the component that needs the extra, as the subject of the sentence.
    """
    if missing(extra):
        sys.exit(f"{program}: {what} needs {DISTRIBUTION}[{extra}]: {install_command(extra)}")


def reach_tools() -> None:
    """Make `bench` and `dashboards` importable in this process and in those that it starts."""
    tools = str(_TOOLS)
    if not _TOOLS.is_dir() or tools in sys.path:
        return
    sys.path.insert(0, tools)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (tools, inherited)))


def _packages(extra: str) -> Iterator[str]:
    for line in _requirements():
        requirement, _, marker = line.partition(";")
        if extra not in _EXTRA.findall(marker):
            continue
        if (found := _REQUIREMENT.match(requirement)) is None:
            continue
        name, included = found.groups(default="")
        if name != DISTRIBUTION:
            yield name
        else:
            for each in included.split(","):
                yield from _packages(each.strip())


def _requirements() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
