"""An image's type and size, read from its first bytes, not from the client's media type.

    type          begins with                                     width and height
    image/png     89 P N G 0d 0a 1a 0a, then the IHDR chunk       two u32 at byte 16
    image/gif     GIF87a or GIF89a                                two le16 at byte 6
    image/webp    RIFF <le32> WEBP, then VP8, VP8L or VP8X        by the first chunk
    image/jpeg    ff d8 ff                                        in the first frame header (SOF), after other segments

The size in pixels is read because a few bytes may decode to any number of them, and bounded before a decoder sees them.
Why no library reads it: ADR 24.

Source: PNG (W3C, third edition) 5.2 and 11.2.1; GIF89a specification 17 and 18; RFC 9649 (WebP) 2.5 to 2.7, RFC 6386
(VP8) 9.1; ITU-T T.81 (JPEG) B.1 and B.2.2. A type that is added needs a line here, and how its size is read.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

ImageType = Literal["image/jpeg", "image/png", "image/webp", "image/gif"]
IMAGE_TYPES: tuple[ImageType, ...] = get_args(ImageType)
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""SOF markers, which are 0xC0 to 0xCF but for DHT, JPG and DAC."""
_JPEG_STEPS_MAX = 4096
"""Segments and fill bytes before the frame header; reading stops there, however long the image is."""
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a length: TEM, RST0 to RST7, SOI."""
_JPEG_SIZELESS = frozenset({0x00, 0xD9, 0xDA})
"""No frame header follows: a zero is no marker, and decoders skip it alone, not a segment; EOI; SOS."""
_VP8L_SIGNATURE = 0x2F


class Pixels(NamedTuple):
    """The size of an image."""

    width: int
    height: int


def image_type(data: bytes) -> ImageType | None:
    """Return the media type by the first bytes of `data`; None for anything else."""
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        return "image/png"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def image_pixels(data: bytes, media_type: ImageType) -> Pixels | None:
    """Return the size in the image's header; None if it has none, or the header is cut."""
    found = _SIZE_OF[media_type](data)
    return found if found is not None and found.width > 0 and found.height > 0 else None


def _png(data: bytes) -> Pixels | None:
    return Pixels(_big(data, 16, 4), _big(data, 20, 4)) if len(data) >= 24 else None  # noqa: PLR2004 - see the table


def _gif(data: bytes) -> Pixels | None:
    return Pixels(_little(data, 6, 2), _little(data, 8, 2)) if len(data) >= 10 else None  # noqa: PLR2004


def _webp(data: bytes) -> Pixels | None:
    chunk, at = data[12:16], 20
    if chunk == b"VP8X" and len(data) >= at + 10:
        return Pixels(1 + _little(data, at + 4, 3), 1 + _little(data, at + 7, 3))
    if chunk == b"VP8L" and len(data) >= at + 5 and data[at] == _VP8L_SIGNATURE:
        bits = _little(data, at + 1, 4)
        return Pixels(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if chunk == b"VP8 " and len(data) >= at + 10 and data[at + 3 : at + 6] == b"\x9d\x01\x2a":
        return Pixels(_little(data, at + 6, 2) & 0x3FFF, _little(data, at + 8, 2) & 0x3FFF)
    return None


def _jpeg(data: bytes) -> Pixels | None:
    """Read from segment to segment; a marker may be preceded by further 0xff."""
    at = 2
    for _ in range(_JPEG_STEPS_MAX):
        if at + 9 > len(data) or data[at] != 0xFF:  # noqa: PLR2004 - every marker begins so
            return None
        marker = data[at + 1]
        if marker in _JPEG_FRAMES:
            return Pixels(width=_big(data, at + 7, 2), height=_big(data, at + 5, 2))
        if marker in _JPEG_SIZELESS:
            return None
        if marker == 0xFF:  # noqa: PLR2004 - a fill byte
            at += 1
        else:
            at += 2 if marker in _JPEG_BARE else 2 + _big(data, at + 2, 2)
    return None


def _big(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "big")


def _little(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


_SIZE_OF: dict[ImageType, Callable[[bytes], Pixels | None]] = {
    "image/png": _png,
    "image/gif": _gif,
    "image/webp": _webp,
    "image/jpeg": _jpeg,
}
