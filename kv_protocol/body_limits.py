r"""Bounds on a large request body, checked before a decoder reads it.

A decoder builds every value that a body has, in one call that holds the interpreter. 45 MB of `[],` are 15 million
values and seconds. So a body of more than `SCANNED_BYTES` is scanned first, in slices of at most `_SLICE` bytes, and
the scan stops at the first bound that is exceeded:

    prompt text       `prompt_bytes_max`       messages, prompt, input, instructions, documents, kv_prompt_ids,
                                               kv_continue, as JSON
    token ids         `prompt_bytes_max` / 4   prompt, input, prompt_token_ids, nvext.token_data; their JSON may
                                               have twice the bytes of prompt text
    everything else   `options_bytes_max`      all other values, keys, white space
    values            `values_max`             members of objects and items of lists, at any depth; not token ids
    depth             `DEPTH_MAX`              lists and objects in one another
    images            the whole body           the base64 of `data:` URLs in messages and input, under a URL's key

Images are cut out (`cut`): decoders read a body without them. The scan follows strings and brackets alone. A decoder
still has to refuse what is no JSON.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import msgspec

from kv_protocol.errors import UNDECODABLE, shortened
from kv_protocol.openai.errors import BodyTooLarge, RequestInvalid, Verbatim

SCANNED_BYTES = 64 << 10
"""Smaller bodies are not scanned: a decoder is done with them within a few milliseconds."""
DEPTH_MAX = 64
_SLICE = 256 << 10
_SHORT_STRING = 1024
_IMAGE_BYTES_MIN = 4 << 10
_URL_HEAD_BYTES_MAX = 128
_ID_BYTES = 4
_ID_JSON = 2
"""Token ids' JSON may be this many times as long as prompt text."""

_TEXT_KEYS = frozenset({"messages", "prompt", "input", "instructions", "documents", "kv_prompt_ids", "kv_continue"})
_ID_KEYS = frozenset({"prompt", "input", "prompt_token_ids", "nvext.token_data"})
_CHAT_KEYS = frozenset({"messages", "input"})
"""Keys that may have images: of chats and responses."""
_LISTS_KEY = "input"
"""The key that may have several lists of ids (embeddings)."""
_EXTENSION = "nvext"
_QUOTE, _COLON, _COMMA, _BACKSLASH = b'":,\\'
_ESCAPE, _ESCAPED_SLASH = b"\\", rb"\/"
_OBJECT, _LIST = b"{["
_TOKEN = re.compile(rb'"(?:[^"\\]{0,%d}+")?|[\[\]{}]' % _SHORT_STRING)
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]*+")
_IDS = re.compile(rb"[0-9, \t\r\n]*+")
_NEXT_LIST = re.compile(rb"\][ \t\r\n]*+,[ \t\r\n]*+\[")
_URL_KEY = re.compile(rb'"(?:url|(?:image|audio|video)_url|file_data)"[ \t\r\n]*+:[ \t\r\n]*+')
"""The key, up to its string, of an image, audio, video or file. Source: the OpenAI API reference,
"Create chat completion" and "Create a model response"; vLLM `chat_utils.py` (`MM_PARSER_MAP`)."""
_PLACEHOLDER = re.compile(rb"kv-cut-[0-9a-z-]+")

Bytes = bytes | bytearray


class BodyLimits(NamedTuple):
    """Bounds; `section` is the section of the configuration that has `prompt_bytes_max`, named in errors."""

    prompt_bytes_max: int = 8 << 20
    options_bytes_max: int = 1 << 20
    """Schemas and tools of LLM agents take a tenth of it."""
    values_max: int = 1 << 16
    """A decoder makes so many objects in some 5 ms."""
    section: str = "data"


class ImageSpan(NamedTuple):
    """The position of an image's base64, and whether its slashes are escaped."""

    begin: int
    end: int
    is_escaped: bool = False


class Body(msgspec.Struct, frozen=True):
    r"""A body as decoders read it: `text` is JSON, with a key of `images` in place of each image's base64.

    `escaped` names the images that are written with `\/` for each slash.
    """

    text: Bytes
    images: Mapping[str, memoryview] = {}
    escaped: frozenset[str] = frozenset()

    def base64_of(self, url: str) -> memoryview | None:
        """Return the base64 that was cut out of a `data:` URL; None if the URL still has it.

        For an image with escaped slashes this makes a copy: call it on a thread.
        """
        name = url.rpartition(",")[2] if self.images else ""
        image = self.images.get(name)
        return _unescaped(image) if image is not None and name in self.escaped else image

    def with_images(self, text: Bytes | memoryview) -> tuple[Bytes | memoryview, ...]:
        """Return `text`, derived from this body's text, in parts, with the images in place of their names."""
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
    return cut(data, _Scan(data, limits).images(), mark)


def cut(data: Bytes, spans: Sequence[ImageSpan], mark: str) -> Body:
    """Return the body without the spans."""
    if not spans:
        return Body(data)
    parts: list[bytes | memoryview] = []
    view, images, at = memoryview(data), dict[str, memoryview](), 0
    names = [f"kv-cut-{mark}-{number}" for number in range(len(spans))]
    for name, span in zip(names, spans, strict=True):
        images[name] = view[span.begin : span.end]
        parts += view[at : span.begin], name.encode()
        at = span.end
    escaped = frozenset(name for name, span in zip(names, spans, strict=True) if span.is_escaped)
    return Body(b"".join((*parts, view[at:])), images, escaped)


def _unescaped(image: memoryview) -> memoryview:
    r"""Return base64 without its backslashes, each of which precedes a slash."""
    pieces = (bytes(image[at : at + _SLICE]) for at in range(0, len(image), _SLICE))
    return memoryview(b"".join([piece.replace(_ESCAPE, b"") for piece in pieces]))


class _Scan:
    """One pass over a body. `_stop`: the offset up to which values of the current kind may reach."""

    def __init__(self, body: Bytes, limits: BodyLimits) -> None:
        self._body, self._limits = body, limits
        self._end = len(body)
        self._at = 0
        self._field = ""
        """The field whose values are scanned; empty: between fields."""
        self._values = self._ids = 0
        self._stop = limits.options_bytes_max
        self._setting, self._allowed = "", limits.options_bytes_max
        self._text_left = limits.prompt_bytes_max
        self._id_bytes_left = _ID_JSON * limits.prompt_bytes_max
        self._found: list[ImageSpan] = []

    def images(self) -> list[ImageSpan]:
        """Return the positions of images' base64; raise if a bound is exceeded."""
        self._space()
        if self._byte() == _OBJECT:
            self._members("")
            self._space()
        return self._found

    # ------------------------------------------------------------ fields

    def _members(self, prefix: str) -> None:
        """Pass an object whose members are fields."""
        self._at += 1
        self._space()
        while self._byte() != b"}"[0]:
            begin = self._at
            if self._byte() != _QUOTE:
                self._malformed()
            self._string()
            path = prefix + _key(self._body[begin : self._at])
            self._space()
            self._expect(_COLON)
            self._space()
            self._count(1)
            if path == _EXTENSION and self._byte() == _OBJECT:
                self._members(f"{_EXTENSION}.")
            else:
                self._member(path)
            self._space()
            if self._byte() == _COMMA:
                self._at += 1
                self._space()
        self._at += 1

    def _member(self, path: str) -> None:
        """Pass the value of a field; its bytes count by its kind."""
        self._field = shortened(path)
        is_ids = path in _ID_KEYS and self._byte() == _LIST
        if not is_ids and path not in _TEXT_KEYS:
            self._value(is_chat=False)
        else:
            begin, stop = self._at, self._stop
            depth = self._id_list() if is_ids else 0
            self._setting, self._allowed = "prompt_bytes_max", self._limits.prompt_bytes_max
            self._stop = self._at + self._text_left
            if is_ids:
                self._container(depth, is_chat=path in _CHAT_KEYS)
            else:
                self._value(is_chat=path in _CHAT_KEYS)
            self._text_left = self._stop - self._at
            self._stop = stop + self._at - begin
            self._setting, self._allowed = "", self._limits.options_bytes_max
        self._field = ""

    def _id_list(self) -> int:
        """Pass the ids that begin a list, or a list of lists; return how many lists are open then."""
        self._stop = self._at + self._id_bytes_left
        self._setting, self._allowed = f"prompt_bytes_max x {_ID_JSON}", _ID_JSON * self._limits.prompt_bytes_max
        self._at += 1
        self._ids += 1
        self._space()
        depth = 1
        if self._byte() == _LIST:
            self._at += 1
            depth = 2
        allowed = self._limits.prompt_bytes_max // _ID_BYTES
        passed = _SLICE
        while passed == _SLICE or (depth > 1 and self._next_list()):
            at = self._at
            passed = self._match(_IDS)
            self._ids += self._body.count(_COMMA, at, self._at)
            if self._ids > allowed:
                self._refuse(f"more than {allowed} token ids", f"at most {allowed}", "prompt_bytes_max / 4")
        self._count(depth)
        self._id_bytes_left = self._stop - self._at
        return depth

    def _next_list(self) -> bool:
        """Pass the end of a list of ids and the beginning of the next; return whether there is a next."""
        if self._field != _LISTS_KEY or not self._match(_NEXT_LIST):
            return False
        self._ids += 1
        self._count(1)
        return True

    # ------------------------------------------------------------ values

    def _value(self, *, is_chat: bool) -> None:
        first = self._byte()
        if first == _QUOTE:
            self._string()
        elif first in (_LIST, _OBJECT):
            self._container(0, is_chat=is_chat)
        else:
            begin = self._at
            while self._match(_SCALAR) == _SLICE:
                pass
            if self._at == begin:
                self._malformed()

    def _container(self, depth: int, *, is_chat: bool) -> None:
        """Pass lists and objects until `depth`, how many are open, is 0 again."""
        body, key = self._body, 0
        while True:
            window = min(self._at + _SLICE, self._end)
            at = self._at
            for token in _TOKEN.finditer(body, at, window):
                begin = token.start()
                self._values += body.count(_COMMA, at, begin)
                at = token.end()
                first = body[begin]
                if first == _QUOTE:
                    if at - begin == 1:  # a long string, or one with escapes, or cut by the window
                        self._at = begin
                        self._string(key if is_chat else 0)
                        break
                    key = begin
                elif first in (_LIST, _OBJECT):
                    depth += 1
                    if depth > DEPTH_MAX:
                        raise RequestInvalid(
                            self._field or "body", Verbatim(f"more than {DEPTH_MAX} levels"), f"at most {DEPTH_MAX}"
                        )
                    self._values += 1
                    if self._values > self._limits.values_max:
                        break
                else:
                    depth -= 1
                    if not depth:
                        self._at = at
                        self._count(0)
                        return
            else:
                self._values += body.count(_COMMA, at, window)
                self._at = window
                if window == self._end:
                    self._malformed()
            self._count(0)

    def _string(self, key: int = 0) -> None:
        """Pass a string; one that is an image's URL is free. `key`: the offset of the string before; 0: none."""
        body, begin = self._body, self._at
        if key and body.startswith(b"data:", begin + 1) and _URL_KEY.fullmatch(body, key, begin) and self._image():
            return
        self._at = begin + 1
        while True:
            passed = self._match(_STRING)
            if self._at < self._end and self._body[self._at] == _QUOTE:
                break
            if not passed:
                self._malformed()
        self._at += 1

    def _image(self) -> bool:
        r"""Pass a `data:` URL that is long, ASCII, and has no escapes but `\/`; return whether it is one."""
        body, begin = self._body, self._at + 1
        comma = body.find(_COMMA, begin, begin + _URL_HEAD_BYTES_MAX)
        if comma < 0 or not bytes(body[begin:comma]).lower().endswith(b";base64"):
            return False
        at, is_escaped = comma + 1, False
        while at < self._end:
            window = min(at + _SLICE, self._end)
            quote = body.find(_QUOTE, at, window)
            piece = body[at : window if quote < 0 else quote]
            if quote < 0 and piece.endswith(_ESCAPE):
                piece = piece[:-1]
            if (not piece and quote < 0) or not piece.isascii() or piece.count(_ESCAPE) != piece.count(_ESCAPED_SLASH):
                return False
            is_escaped = is_escaped or _BACKSLASH in piece
            if quote >= 0:
                return self._cut_out(ImageSpan(comma + 1, quote, is_escaped))
            at += len(piece)
        return False

    def _cut_out(self, span: ImageSpan) -> bool:
        length = span.end - span.begin
        if length < _IMAGE_BYTES_MIN:
            return False
        self._found.append(span)
        self._at = span.end + 1
        self._stop += length
        self._count(1)
        return True

    # ------------------------------------------------------------ bytes

    def _byte(self) -> int:
        return self._body[self._at] if self._at < self._end else 0

    def _expect(self, byte: int) -> None:
        if self._byte() != byte:
            self._malformed()
        self._at += 1

    def _space(self) -> None:
        while self._match(_SPACE) == _SLICE:
            pass

    def _match(self, pattern: re.Pattern[bytes]) -> int:
        """Pass what matches, at most a slice; return the number of bytes."""
        begin = self._at
        found = pattern.match(self._body, begin, min(begin + _SLICE, self._end))
        self._at = begin if found is None else found.end()
        self._count(0)
        return self._at - begin

    def _count(self, values: int) -> None:
        """Count passed values; raise if there are too many values or bytes."""
        self._values += values
        if self._values > self._limits.values_max:
            allowed = self._limits.values_max
            self._refuse(f"more than {allowed} values in the body", f"at most {allowed}")
        if self._at > self._stop:
            what = "bytes of prompts, images not counted" if self._setting else "bytes outside the prompts"
            self._refuse(f"more than {self._allowed} {what}", f"at most {self._allowed}", self._setting)

    def _refuse(self, found: str, allowed: str, setting: str = "") -> NoReturn:
        allowed += f" ({self._limits.section}.{setting})" if setting else ""
        raise BodyTooLarge(self._field or "body", Verbatim(found), allowed)

    def _malformed(self) -> NoReturn:
        found = bytes(self._body[self._at : self._at + 16]).decode("utf-8", "replace")
        raise RequestInvalid(self._field or "body", found, f"JSON (malformed at byte {self._at})")


def _key(quoted: Bytes) -> str:
    try:
        return msgspec.json.decode(quoted, type=str)
    except UNDECODABLE:
        return ""
