"""An image's type and size, read from its first bytes, not from the client's media type.

    type          begins with                                     width and height
    image/png     89 P N G 0d 0a 1a 0a, then the IHDR chunk       two u32 at byte 16; a second IHDR is refused
    image/gif     GIF87a or GIF89a                                two le16 at byte 6; the first frame may enlarge it
    image/webp    RIFF <le32> WEBP, then VP8, VP8L or VP8X        by the first chunk
    image/jpeg    ff d8 ff                                        in the first frame header (SOF), after other segments

A few bytes may decode to any number of pixels: callers compare the size with their bound before they decode an image.
Why no library reads it: ADR 24.

Source: PNG (W3C, third edition) 5.2 and 11.2.1; GIF89a specification 17 and 18; RFC 9649 (WebP) 2.5 to 2.7, RFC 6386
(VP8) 9.1; ITU-T T.81 (JPEG) B.1 and B.2.2. A type that is added needs a line here, and a function in `_SIZE_OF`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

ImageType = Literal["image/jpeg", "image/png", "image/webp", "image/gif"]
IMAGE_TYPES: tuple[ImageType, ...] = get_args(ImageType)
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""SOF markers: 0xC0 to 0xCF without DHT, JPG and DAC."""
_STEPS_MAX = 4096
"""Chunks, blocks, segments and fill bytes before the pixels; for an image with more no size is returned."""
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a length: TEM, RST0 to RST7, SOI."""
_JPEG_SIZELESS = frozenset({0x00, 0xD9, 0xDA})
"""Reading ends here without a size: at a zero (no marker, and without a length), at EOI and at SOS."""
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
    at = 8
    for _ in range(_STEPS_MAX):
        kind = data[at + 4 : at + 8]
        if kind == b"IHDR" and at > 8:  # noqa: PLR2004 - decoders take the last one
            return None
        if kind == b"IDAT" or len(kind) < 4:  # noqa: PLR2004 - the pixels, or the end
            return Pixels(_big(data, 16, 4), _big(data, 20, 4)) if len(data) >= 24 else None  # noqa: PLR2004
        at += 12 + _big(data, at, 4)
    return None


def _gif(data: bytes) -> Pixels | None:
    """Return the screen's size, enlarged to the first frame as decoders do; bytes between blocks are skipped."""
    if len(data) < 13:  # noqa: PLR2004 - the screen's descriptor
        return None
    width, height, flags = _little(data, 6, 2), _little(data, 8, 2), data[10]
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    in_extension = False
    for _ in range(_STEPS_MAX):
        if at + 9 > len(data):
            return Pixels(width, height)
        byte = data[at]
        if in_extension:
            at, in_extension = at + 1 + byte, byte > 0
        elif byte == ord("!"):
            at, in_extension = at + 2, True
        elif byte == ord(","):
            right = _little(data, at + 1, 2) + _little(data, at + 5, 2)
            return Pixels(max(width, right), max(height, _little(data, at + 3, 2) + _little(data, at + 7, 2)))
        else:
            at += 1
    return None


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
    for _ in range(_STEPS_MAX):
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
