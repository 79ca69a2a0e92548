"""Reads files of the allowed directories; no file outside of them is opened, whatever the path is.

    path        as parsed by `urls.py`: absolute, no `..`
    resolved    links are followed; the result must be in one of the directories
    opened      from that directory on, name by name, without following links: a link created meanwhile is refused
    read        a regular file only, and at most one byte more than allowed

The answer does not reveal whether a file outside exists.
"""

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from worker_agent.media.refusals import MediaRefused, shown_url

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a writer does not block


class MediaFiles:
    """The directories, resolved once."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = tuple(Path(os.path.realpath(directory)) for directory in directories)

    def read(self, path: str, field: str, bytes_max: int) -> bytes:
        """Return the file's bytes, 1 to `bytes_max`; raise `MediaRefused`. Blocks the thread."""
        try:
            real = Path(os.path.realpath(path))
        except (OSError, ValueError) as error:
            raise MediaRefused("path_form", field, shown_url(path), "a path") from error
        directory = next((each for each in self._directories if real != each and real.is_relative_to(each)), None)
        if directory is None:
            allowed = "files of media.directories" if self._directories else "none: media.directories is empty"
            raise MediaRefused("path_outside", field, shown_url(path), allowed)
        try:
            data = _read(directory, real.relative_to(directory).parts, bytes_max)
        except OSError as error:
            allowed = f"a file that can be read ({error.strerror})"
            raise MediaRefused("path_missing", field, shown_url(path), allowed) from error
        if not 0 < len(data) <= bytes_max:
            found = f"more than {bytes_max} bytes" if data else "0 bytes"
            raise MediaRefused("too_large" if data else "content", field, found, f"1..{bytes_max} bytes")
        return data


def _read(directory: Path, names: tuple[str, ...], bytes_max: int) -> bytes:
    with ExitStack() as opened:
        at = os.open(directory, _DIRECTORY)
        opened.callback(os.close, at)
        for name in names[:-1]:
            at = os.open(name, _DIRECTORY, dir_fd=at)
            opened.callback(os.close, at)
        with os.fdopen(os.open(names[-1], _FILE, dir_fd=at), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(None, "no regular file")
            return file.read(bytes_max + 1)
