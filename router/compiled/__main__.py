"""Print whether the hot path is machine code, or compile it.

    python -m router.compiled [compiled | interpreted]    print it; exit status 1 if it is not the one named
    python -m router.compiled LIBRARIES SCRATCH           compile the sources in the current directory

The second command is run when a wheel is built. It writes to LIBRARIES the compiled files that are installed beside the
sources, and to SCRATCH the intermediate files.
"""

import os
import sys
from pathlib import Path

from router.compiled import MODULES, hot_path

_MYPY_OPTIONS = (
    "--ignore-missing-imports",
    "--allow-subclassing-any",
    "--no-warn-unused-ignores",
    "--no-warn-return-any",
)
"""Less strict than `make types`: the build reads the newest libraries; their types may differ or be missing."""
_OF_DECISIONS = tuple(
    f"router.{package}."
    for package in ("admin", "attribution", "decision", "drain", "fleet", "journal", "live", "planner", "replicas")
)
"""Packages that are one C file, half of the code; the other modules are another, so that two cores can compile."""


def build(libraries: Path, scratch: Path) -> None:
    """Compile `MODULES` of the sources in the current directory into `libraries`."""
    from mypyc.build import mypycify
    from setuptools import Distribution  # type: ignore[import-untyped]
    from setuptools.command.build_ext import build_ext  # type: ignore[import-untyped]

    sources = {name: str(Path(*name.split(".")).with_suffix(".py")) for name in MODULES}
    decisions = [source for name, source in sources.items() if name.startswith(_OF_DECISIONS)]
    requests = [source for source in sources.values() if source not in decisions]
    extensions = mypycify(
        [*_MYPY_OPTIONS, *sources.values()],
        opt_level=os.environ.get("MYPYC_OPT_LEVEL", "2"),  # 3 takes twice as long to compile, and was not faster
        debug_level="0",
        target_dir=str(scratch),
        separate=[(requests, "kv_router_requests"), (decisions, "kv_router_decisions")],
        strip_asserts=False,
    )
    command = build_ext(Distribution({"name": "kv-router", "ext_modules": extensions}))
    command.build_lib, command.build_temp = str(libraries), str(scratch)
    command.parallel = os.cpu_count()
    command.ensure_finalized()
    command.run()


match sys.argv[1:]:
    case [libraries, scratch]:
        build(Path(libraries), Path(scratch))
    case wanted:
        found = hot_path()
        print(f"hot path: {found}")
        sys.exit(wanted not in ([], [found]))
