"""`python -m indexer.native`: say whether the extension is there, and how built; exit status 1 where it is not."""

import sys

from indexer.native import extension

_MISSING = """\
**********************************************************************
*  The C++ extension is not there. The router does not start.        *
*  To see why: .venv/bin/pip install -v --no-deps -e .               *
**********************************************************************"""

try:
    core = extension()
except ImportError as error:
    sys.exit(f"{_MISSING}\n{error}")
print(f"C++ extension: built, {'with' if core.HAS_XXHASH else 'without'} xxhash")
