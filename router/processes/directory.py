"""The directory that the processes of one router share; what a router leaves that was killed, the next one removes."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "kv-router-processes-"


def own_directory(within: Path) -> Path:
    """Return a new directory of mode 0700, locked until this process and its last fork have ended.

    Directories of earlier ones that are not locked any more are removed.
    """
    for left in within.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=within))  # renamed once it is locked
    with suppress(OSError):  # a file system without locks: it is not removed by others either
        _locked(made)
    return made.rename(made.with_name(made.name[1:]))


def _locked(directory: Path) -> int:
    """Lock the directory; return the descriptor that has the lock. Raise `OSError` if another process has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
