"""Files that a process keeps for itself: replaced as a whole, and read by its user alone."""

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file's content atomically, also with regard to a crash; its mode is 0600. `OSError` if that fails."""
    written = path.with_suffix(".new")
    with open(written, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)  # one that a killed process left has a mode of its own
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
