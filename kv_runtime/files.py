"""Files that are replaced as a whole."""

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file's content atomically, also with regard to a crash; raise `OSError` if that fails."""
    written = path.with_suffix(".new")
    with written.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
