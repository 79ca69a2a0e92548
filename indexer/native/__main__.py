"""`python -m indexer.native`: say whether the extension was built, and how; exit status 1 where it was not."""

import sys

from indexer.native import load

_MISSING = """\
**********************************************************************
*  The C++ extension did not build. Everything runs, in Python.      *
*  To see why: .venv/bin/pip install -v --no-deps -e .               *
**********************************************************************"""

core = load()
if core is None:
    sys.exit(_MISSING)
print(f"C++ extension: built, {'with' if core.HAS_XXHASH else 'without'} xxhash")
