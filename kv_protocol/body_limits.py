r"""Bounds on a large request body, checked before a decoder reads it.

A decoder builds every value that a body has, in one call that holds the interpreter: 45 MB of `[],` are 15 million
values, and take seconds. So a body of more than `SCANNED_BYTES` is scanned first: images are cut out of it, and its
values and bytes are counted. Each kind has a bound:

    images            none of its own          the base64 of `data:` URLs under a URL's key; decoders read a body
                                               without them
    values            `values_max`             members of objects and items of lists, at any depth; not token ids
    token ids         `prompt_bytes_max` / 4   whole numbers at the beginning of a list. As JSON the lists in prompt,
                                               input, prompt_token_ids and nvext.token_data may have twice the bytes
                                               of prompt text
    prompt text       `prompt_bytes_max`       messages, prompt, input, instructions, documents, kv_prompt_ids,
                                               kv_continue, as JSON
    everything else   `options_bytes_max`      all other values, keys, white space

Values are counted by brackets and commas outside of strings. A decoder still has to refuse what is no JSON.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kv_protocol.errors import UNDECODABLE, shortened
from kv_protocol.openai.errors import BodyTooLarge, Verbatim, explained

SCANNED_BYTES = 64 << 10
"""Smaller bodies are not checked: a decoder is done with them within a few milliseconds."""
_SLICE = 64 << 10
_IMAGE_BYTES_MIN = 4 << 10
_ID_BYTES = 4
_ID_JSON = 2
"""Token ids' JSON may be this many times as long as prompt text."""

_TEXT_KEYS = frozenset({"messages", "prompt", "input", "instructions", "documents", "kv_prompt_ids", "kv_continue"})
_ID_KEYS = frozenset({"prompt", "input", "prompt_token_ids", "nvext.token_data"})
_EXTENSION = "nvext"
_QUOTE, _BACKSLASH = b'"', b"\\"
_IMAGE = re.compile(
    rb'"(?<!\\")(?:url|(?:image|audio|video)_url|file_data)"[ \t\r\n]{0,99}+:[ \t\r\n]{0,99}+'
    rb'"data:(?:[^",\\]|\\/){0,120}(?i:;base64),'
)
"""An image, audio, video or file: its key, and its string up to the base64. Nothing in a string matches: there a
backslash precedes each quote. Source: the OpenAI API reference, "Create chat completion" and "Create a model response";
vLLM `chat_utils.py` (`MM_PARSER_MAP`)."""
_IMAGE_HEAD_BYTES_MAX = 400  # searched slices overlap by as much, so that a head is found whole
_ESCAPED = re.compile(rb"(?:[^\\]++|\\/)*+")
_PLACEHOLDER = re.compile(rb"kv-cut-[0-9a-z-]+")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_NUMBERS = b"0123456789 \t\r\n"
_ID_COMMAS = re.compile(rb"(?:\[|\A),++")
"""A list of ids without its numbers, or only the commas if the list began in an earlier slice."""
_ID_LIST = re.compile(rb"\[[ \t\r\n]*+\[?[ \t\r\n]*+[0-9]")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

Bytes = bytes | bytearray


class BodyLimits(NamedTuple):
    """The bounds of a body; errors name `section`, the section of the configuration that has `prompt_bytes_max`."""

    prompt_bytes_max: int = 8 << 20
    options_bytes_max: int = 1 << 20
    """Schemas and tools of LLM agents take a tenth of it."""
    values_max: int = 1 << 16
    """A decoder makes this many objects in some 5 ms."""
    section: str = "data"


class Body(msgspec.Struct, frozen=True):
    """A body as decoders read it: `text` is JSON, with a key of `images` in place of each image's base64."""

    text: Bytes
    images: Mapping[str, memoryview] = {}

    def base64_of(self, url: str) -> memoryview | None:
        r"""Return the base64 that was cut out of a `data:` URL; None if none was.

        A client may have written `\/` for each slash. This reads the whole image: call it on a thread.
        """
        image = self.images.get(url.rpartition(",")[2])
        return None if image is None else _unescaped(image)

    def with_images(self, text: Bytes | memoryview) -> tuple[Bytes | memoryview, ...]:
        """Return the parts of `text`, made from this body's text, in order, with each image in place of its name."""
        if not self.images:
            return (text,)
        parts: list[Bytes | memoryview] = []
        view, at = memoryview(text), 0
        for found in _PLACEHOLDER.finditer(text):
            image = self.images.get(found[0].decode())
            if image is not None:
                parts += view[at : found.start()], image
                at = found.end()
        return (*parts, view[at:])


def read_body(data: Bytes, limits: BodyLimits, mark: str) -> Body:
    """Return the body without its images; raise `BodyTooLarge`, `RequestInvalid`.

    `mark` is a name that no client can know, of lower-case letters and digits. For 64 MiB of text this takes tenths of
    a second, and each call into C at most a few milliseconds: call it on a thread.
    """
    body = _without_images(data, mark)
    _check_values(body.text, limits)
    _check_bytes(body.text, limits)
    return body


def _without_images(data: Bytes, mark: str) -> Body:
    images: dict[str, memoryview] = {}
    parts: list[bytes | memoryview] = []
    view, at = memoryview(data), 0
    for begin, end in _images(data):
        name = f"kv-cut-{mark}-{len(images)}"
        images[name] = view[begin:end]
        parts += view[at:begin], name.encode()
        at = end
    return Body(b"".join((*parts, view[at:])), images) if images else Body(data)


def _unescaped(image: memoryview) -> memoryview:
    """Return base64 without its backslashes, each of which precedes a slash."""
    pieces = [bytes(image[at : at + _SLICE]) for at in range(0, len(image), _SLICE)]
    if not any(_BACKSLASH in piece for piece in pieces):
        return image
    return memoryview(b"".join([piece.replace(_BACKSLASH, b"") for piece in pieces]))


def _images(data: Bytes) -> Iterator[tuple[int, int]]:
    """Yield where the base64 of each image begins and ends."""
    at = 0
    while at < len(data):
        head = _IMAGE.search(data, at, at + _SLICE)
        if head is None:
            at += _SLICE - _IMAGE_HEAD_BYTES_MAX
            continue
        at = head.end()
        end = data.find(_QUOTE, at)
        if end - at >= _IMAGE_BYTES_MIN and _is_base64(data, at, end):
            yield at, end
            at = end


def _is_base64(data: Bytes, at: int, end: int) -> bool:
    r"""Return whether `data[at:end]` is ASCII, and has no escapes but `\/`."""
    if not all(data[begin : min(begin + _SLICE, end)].isascii() for begin in range(at, end, _SLICE)):
        return False
    at = data.find(_BACKSLASH, at, end)
    while 0 <= at < end:
        found = _ESCAPED.match(data, at, min(at + _SLICE, end))
        assert found is not None, "the pattern matches nothing at all, too"
        if found.end() == at:
            return False
        at = found.end()
    return True


def _check_values(text: Bytes, limits: BodyLimits) -> None:
    """Check that there are not too many values and token ids; raise `BodyTooLarge` otherwise."""
    values = ids = 0
    is_in_string, half = False, b""
    for at in range(0, len(text), _SLICE):
        piece = _ESCAPE.sub(b"", half + text[at : at + _SLICE])
        half = piece[-1:] if piece.endswith(_BACKSLASH) else b""
        parts = piece.split(_QUOTE)
        bare = _QUOTE.join(parts[is_in_string::2]).translate(None, _NUMBERS)
        is_in_string ^= len(parts) % 2 == 0
        lists = _ID_COMMAS.findall(bare)
        of_lists = sum(map(len, lists))
        ids += of_lists
        values += sum(map(bare.count, (b",", b"[", b"{"))) - of_lists + len(lists)
        if values > limits.values_max:
            most = limits.values_max
            raise BodyTooLarge("body", Verbatim(f"more than {most} values in the body"), f"at most {most}")
        if ids > (most := limits.prompt_bytes_max // _ID_BYTES):
            allowed = f"at most {most} ({limits.section}.prompt_bytes_max / {_ID_BYTES})"
            raise BodyTooLarge("body", Verbatim(f"more than {most} token ids"), allowed)


def _check_bytes(text: Bytes, limits: BodyLimits) -> None:
    """Raise `BodyTooLarge` if a kind of field has too many bytes, `RequestInvalid` if the text is no object."""
    prompts, section = limits.prompt_bytes_max, limits.section
    bounds = {
        "text": (prompts, "bytes of prompts, images not counted", f" ({section}.prompt_bytes_max)"),
        "ids": (_ID_JSON * prompts, "bytes of token ids", f" ({section}.prompt_bytes_max x {_ID_JSON})"),
        "other": (limits.options_bytes_max, "bytes outside the prompts", ""),
    }
    most = sum(bound for bound, _, _ in bounds.values())
    if len(text) > most:
        found, allowed = f"more than {most} bytes, images not counted", f"at most {most} ({section}.prompt_bytes_max)"
        raise BodyTooLarge("body", Verbatim(found), allowed)
    fields = _values_of_fields(text)
    sizes = dict.fromkeys(bounds, 0)
    sizes["other"] = len(text) - sum(map(len, fields.values()))
    for path, value in {"body": msgspec.Raw(), **fields}.items():
        is_ids = path in _ID_KEYS and _ID_LIST.match(value)
        kind = "ids" if is_ids else "text" if path in _TEXT_KEYS else "other"
        sizes[kind] += len(value)
        bound, what, setting = bounds[kind]
        if sizes[kind] > bound:
            raise BodyTooLarge(shortened(path), Verbatim(f"more than {bound} {what}"), f"at most {bound}{setting}")


def _values_of_fields(text: Bytes) -> dict[str, msgspec.Raw]:
    """Return the JSON of each field, by its path; raise `RequestInvalid` if the text is not an object."""
    try:
        fields = _fields.decode(text)
        if _EXTENSION in fields and bytes(memoryview(fields[_EXTENSION])[:1]) == b"{":
            fields |= {f"{_EXTENSION}.{key}": value for key, value in _fields.decode(fields.pop(_EXTENSION)).items()}
    except UNDECODABLE as error:
        raise explained(error, text, dict[str, Any]) from error
    return fields
