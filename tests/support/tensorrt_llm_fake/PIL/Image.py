"""`Image.open` of PNG, JPEG, GIF and WebP by their first bytes; pixels are made up, and differ where the bytes differ.

A file that ends before `END_BYTES` cannot be decoded, as a cut one cannot: OSError, when it is decoded and not before.
"""

# ruff: noqa: N999  the real name

import hashlib
from types import TracebackType
from typing import IO, Self

_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
END_BYTES = 24


class UnidentifiedImageError(OSError):
    """The bytes are no image."""


class DecompressionBombError(Exception):
    """The image has too many pixels."""


class Image:
    """An image; `data` is its file. Its size is a PNG's by the last IHDR, one pixel of others."""

    def __init__(self, mode: str, data: bytes) -> None:
        self.mode, self._data = mode, data
        at = data.rfind(b"IHDR") + 4
        self.size = (1, 1) if at < END_BYTES // 2 else tuple(int.from_bytes(data[n : n + 4]) for n in (at, at + 4))

    def convert(self, mode: str) -> "Image":
        """Return the decoded image in another mode."""
        if len(self._data) < END_BYTES:
            raise OSError("image file is truncated")
        return Image(mode, self._data)

    def tobytes(self) -> bytes:
        """Return pixels."""
        return hashlib.sha256(self._data).digest()

    def close(self) -> None:
        """There is nothing to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open(fp: IO[bytes]) -> Image:  # noqa: A001  as the real one
    """Return the image of a file; UnidentifiedImageError for anything else."""
    data = fp.read()
    if not data.startswith(_BEGINNINGS):
        raise UnidentifiedImageError("cannot identify image file")
    return Image("P", data)
