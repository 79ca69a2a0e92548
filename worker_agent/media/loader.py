"""Loads the media that a request names: from `data:` URLs, files and URLs, a bounded number at a time.

    scheme            read by
    data              `urls.py`
    file, or a path   `MediaFiles`
    any other         `fetch.py`, which refuses what is not allowed

A request's media are loaded concurrently; if one is refused, the others are given up. Decoding and hashing run on
threads: the event loop streams tokens of other requests meanwhile.

Files are read from the allowed directories; no file outside of them is opened, whatever the path is.

    path        as parsed by `urls.py`: absolute, no `..`
    resolved    links are followed; the result must be in one of the directories
    opened      from that directory on, name by name, without following links: a link created meanwhile is refused
    read        a regular file only, and at most one byte more than allowed

The answer does not reveal whether a file outside exists.
"""

import asyncio
import os
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from worker_agent.media.config import MediaSection
from worker_agent.media.fetch import FETCH_S, MediaFetch, Resolve
from worker_agent.media.parts import MediaPart, check_total, checked_media
from worker_agent.media.refusals import MediaRefused, shown_url
from worker_agent.media.urls import decoded_data, file_path, scheme_of
from worker_agent.port.types import Media

FETCHES_MAX = 8
"""How many media are loaded at a time, for all requests: each may have `part_bytes_max` in memory."""


class MediaLoader:
    """Loads media for all requests of an agent. The counters are for its metrics.

    `refused_total` counts, by reason, the requests that were refused because of their media. Callers have to count
    them, as they also refuse requests before anything is loaded.
    """

    def __init__(self, section: MediaSection, *, resolve: Resolve | None = None, fetch_s: float = FETCH_S) -> None:
        self.rules = section
        self._files = MediaFiles(section.directories)
        self._fetch = MediaFetch(section, fetch_s=fetch_s, resolve=resolve)
        self._slots = asyncio.Semaphore(FETCHES_MAX)
        self.loaded_total: Counter[str] = Counter()
        self.loaded_bytes_total = 0
        self.refused_total: Counter[str] = Counter()

    async def load(self, parts: Sequence[MediaPart]) -> tuple[Media, ...]:
        """Return the media of `parts`, in their order, all of them checked.

        Raises:
            MediaRefused: the first part that was refused; the others are given up.
        """
        sizes: list[int] = []

        async def load_one(part: MediaPart) -> Media:
            media = await self._load(part)
            sizes.append(len(media.data))
            check_total(sum(sizes), part.field, self.rules)
            return media

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(load_one(part)) for part in parts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        media = tuple(task.result() for task in tasks)
        self.loaded_total.update("image" if each.tensor is None else "embeddings" for each in media)
        self.loaded_bytes_total += sum(sizes)
        return media

    async def _load(self, part: MediaPart) -> Media:
        async with self._slots:
            data, declared_type = await self._bytes(part)
            return await asyncio.to_thread(checked_media, part, data, declared_type)

    async def _bytes(self, part: MediaPart) -> tuple[bytes, str | None]:
        bytes_max = self.rules.part_bytes_max
        scheme = scheme_of(part.url)
        if scheme == "data":
            declared_type, data = await asyncio.to_thread(decoded_data, part.url, part.field, bytes_max, part.base64)
            return data, declared_type
        if scheme == "file" or part.url.startswith("/"):
            path = file_path(part.url, part.field)
            return await asyncio.to_thread(self._files.read, path, part.field, bytes_max), None
        return await self._fetch.get(part.url, part.field, bytes_max)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a writer does not block


class MediaFiles:
    """The files of the allowed directories, which are resolved once."""

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
