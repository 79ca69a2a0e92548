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


def build(libraries: Path, scratch: Path) -> None:
    """Compile `MODULES` of the sources in the current directory into `libraries`."""
    from mypyc.build import mypycify
    from setuptools import Distribution  # type: ignore[import-untyped]
    from setuptools.command.build_ext import build_ext  # type: ignore[import-untyped]

    sources = [str(Path(*name.split(".")).with_suffix(".py")) for name in MODULES]
    extensions = mypycify(
        [*_MYPY_OPTIONS, *sources],
        opt_level="2",  # 3 takes twice as long to compile, and was not faster
        debug_level="0",
        target_dir=str(scratch),
        group_name="kv_router",
        strip_asserts=False,
    )
    command = build_ext(Distribution({"name": "kv-router", "ext_modules": extensions}))
    command.build_lib, command.build_temp = str(libraries), str(scratch)
    command.parallel = os.cpu_count()  # the one large C file beside the small ones, one for each module
    command.ensure_finalized()
    command.run()


match sys.argv[1:]:
    case [libraries, scratch]:
        build(Path(libraries), Path(scratch))
    case wanted:
        found = hot_path()
        print(f"hot path: {found}")
        sys.exit(wanted not in ([], [found]))
