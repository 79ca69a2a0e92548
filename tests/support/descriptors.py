"""A process without file descriptors."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """This process can open nothing while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(each.name) for each in Path("/dev/fd").iterdir()) + 1, hard))
    taken: list[int] = []
    with suppress(OSError):
        while True:  # the numbers below the limit that are free
            taken.append(os.dup(0))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)
