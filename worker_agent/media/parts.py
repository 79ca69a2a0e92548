"""Splits OpenAI content parts into text and media, and checks the media's bytes.

    part                                   becomes
    {"type": "text", "text": ...}          itself
    {"type": "image_url", "image_url":
        {"url": ..., "detail": ...}}       a text part, the placeholder, and an image
    any other type, any other key          refused: only attached engines may take video and audio

`detail` is read and has no effect: an engine's processor chooses the resolution. A text with the placeholder is
refused: it would be counted as an image, and the next image's features would replace it.

The bytes must be an image of an allowed type (`kv_protocol/image_headers.py`), and of the declared type if that is
known, with not too many pixels. Only encode workers send embeddings, which `safetensors.py` checks.

Source of the part's shape: OpenAI API reference, "Create chat completion", image input.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from kv_protocol.image_headers import IMAGE_TYPES, image_pixels, image_type
from kv_runtime.text.chat_messages import TEXT_KEYS
from worker_agent.media.config import MediaSection
from worker_agent.media.refusals import MediaReason, MediaRefused, shown_url
from worker_agent.media.safetensors import read_tensor
from worker_agent.port.types import Media

EMBEDDINGS_TYPE = "application/octet-stream"
_UNKNOWN_TYPES = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""Content types of servers that do not know the type."""
_TYPE_OF_ALIAS = {"image/jpg": "image/jpeg"}
"""Common content types that are not registered."""
_DETAILS = (None, "auto", "low", "high")
PARTS_MAX = 16
"""How many media a request may have."""
REQUEST_BYTES_MAX = 128 << 20
"""The most bytes of all media of a request, unless one item may have more."""
_PIXELS_MAX = 1 << 26


class MediaPart(msgspec.Struct, frozen=True, kw_only=True):
    """An image that a request names: `field` is where its URL is in the request. Show the URL only by `shown_url`.

    `base64` is the data of a `data:` URL, if it was cut out of the URL (`kv_protocol/body_limits.py`).
    """

    field: str
    url: str
    base64: memoryview | None = None

    @property
    def full_url(self) -> str:
        """The URL as the client sent it."""
        return self.url if self.base64 is None else self.url[: self.url.rfind(",") + 1] + str(self.base64, "ascii")

    def __repr__(self) -> str:
        return f"MediaPart({self.field}, {shown_url(self.url)})"


class MediaChat(NamedTuple):
    """A chat with only text, with a placeholder in place of each of the `parts`, in their order."""

    messages: list[dict[str, Any]]
    parts: tuple[MediaPart, ...]


def content_digest(data: bytes) -> str:
    """Return the BLAKE3 of `data` in 64 hex digits, the same for equal media from any source."""
    return blake3(data).hexdigest()


def names_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message has a part that is not text."""
    return any(
        isinstance(part, Mapping) and part.get("type") not in [*TEXT_KEYS]
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def split_chat(messages: Sequence[Mapping[str, Any]], placeholder: str) -> MediaChat:
    """Return the chat as text, and its media; raise `MediaRefused`, which names the field.

    Only `content` is read here: rendering checks the rest of a message.
    """
    parts: list[MediaPart] = []
    split: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        where, content = f"messages[{at}].content", message.get("content")
        if isinstance(content, list):
            content = [_split_part(f"{where}[{i}]", part, parts, placeholder) for i, part in enumerate(content)]
        elif isinstance(content, str):
            _check_text(where, content, placeholder)
        split.append({**message, "content": content} if "content" in message else dict(message))
    return MediaChat(split, tuple(parts))


def checked_media(part: MediaPart, data: bytes, declared_type: str | None) -> Media:
    """Check the bytes and return the image; raise `MediaRefused`.

    `declared_type` is the content type from the server or URL; None: none was declared.
    """
    declared = (declared_type or "").partition(";")[0].strip().lower()
    declared = _TYPE_OF_ALIAS.get(declared, declared)
    allowed = f"one of {', '.join(IMAGE_TYPES)}"
    if declared not in _UNKNOWN_TYPES and declared not in IMAGE_TYPES:
        raise _refused("content_type", part, declared, allowed)
    found = image_type(data)
    if found is None or found not in IMAGE_TYPES:
        raise _refused("content", part, f"bytes that begin as {found or 'no image'}", allowed)
    if declared not in _UNKNOWN_TYPES and declared != found:
        raise _refused("content", part, f"bytes of {found}, said to be {declared}", "the type that the bytes are of")
    pixels = image_pixels(data, found)
    if pixels is None:
        raise _refused("content", part, f"{found} without a size", "a whole header")
    if pixels.width * pixels.height > _PIXELS_MAX:
        raise _refused("pixels", part, f"{pixels.width} x {pixels.height}", f"at most {_PIXELS_MAX} pixels")
    digest = content_digest(data)
    return Media(field=part.field, media_type=found, data=data, digest=digest, pixels=pixels)


def embeddings_media(field: str, data: bytes) -> Media:
    """Return the embeddings of a `.safetensors` file; raise `MediaRefused` if it is not one."""
    tensor, digest = read_tensor(data, field), content_digest(data)
    return Media(field=field, media_type=EMBEDDINGS_TYPE, data=data, digest=digest, tensor=tensor)


def check_total(media_bytes: int, field: str, rules: MediaSection) -> None:
    """Raise `MediaRefused` if a request's media have too many bytes together."""
    bytes_max = max(REQUEST_BYTES_MAX, rules.part_bytes_max)
    if media_bytes > bytes_max:
        raise MediaRefused("too_large", field, f"{media_bytes} bytes together", f"at most {bytes_max}")


def _split_part(where: str, part: object, parts: list[MediaPart], placeholder: str) -> Any:  # noqa: ANN401
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise MediaRefused("part_form", where, type(part).__name__, "an object with a type")
    if (key := TEXT_KEYS.get(kind)) is not None:
        if not isinstance(text := part.get(key), str):
            raise MediaRefused("part_form", f"{where}.{key}", type(text).__name__, "a string")
        _check_text(f"{where}.{key}", text, placeholder)
        return part
    if kind != "image_url":
        allowed = "text, image_url: this worker takes no video and no audio"
        raise MediaRefused("part_kind", f"{where}.type", kind, allowed)
    if len(parts) >= PARTS_MAX:
        raise MediaRefused("parts_count", where, f"more than {PARTS_MAX}", f"at most {PARTS_MAX} media")
    image, field = part.get("image_url"), f"{where}.image_url.url"
    if part.keys() != {"type", "image_url"} or not isinstance(image, Mapping) or not image.keys() <= {"url", "detail"}:
        raise MediaRefused("part_form", where, "other keys", "type, image_url {url, detail}")
    if image.get("detail") not in _DETAILS:
        raise MediaRefused("part_form", f"{where}.image_url.detail", "another value", "auto, low, high")
    url = image.get("url")
    if not isinstance(url, str) or not url:
        raise MediaRefused("part_form", field, type(url).__name__, "a URL")
    parts.append(MediaPart(field=field, url=url))
    return {"type": "text", "text": placeholder}


def _check_text(field: str, text: str, placeholder: str) -> None:
    if placeholder and placeholder in text:
        raise MediaRefused("placeholder", field, placeholder, "text without what stands for an image")


def _refused(reason: MediaReason, part: MediaPart, found: str, allowed: str) -> MediaRefused:
    return MediaRefused(reason, part.field, f"{found} ({shown_url(part.url)})", allowed)
