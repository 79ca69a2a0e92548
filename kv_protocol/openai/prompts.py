"""Prompts of completions as JSON: a text, its token ids, or a list of one of either.

    "text"    [1, 2]    ["text"]    [[1, 2]]

A list of several prompts, which means several responses, is refused. Ids are read in slices: a million of them, decoded
in one call, hold the interpreter for tens of milliseconds.
"""

import re
from typing import Annotated

import msgspec

from kv_protocol.hashing import pack_tokens
from kv_protocol.ids import TokenId
from kv_protocol.openai.errors import RequestInvalid, Verbatim
from kv_protocol.openai.parts import RawPart

_SLICE = 128 << 10
_LIST_OF_PROMPTS = re.compile(rb"\[\s*[\[\"]")
_LOOKED_AT = 64
_INDEX = re.compile(r"\[(\d+)\]")

_TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
_prompt = RawPart[str | list[int]](Annotated[str, msgspec.Meta(min_length=1)] | _TokenIds)
_ids = RawPart[list[int]](_TokenIds)
_several = msgspec.json.Decoder(list[msgspec.Raw])


def read_prompt(raw: msgspec.Raw) -> str | bytes:
    """Return the text, or its ids as little-endian u32s; raise `RequestInvalid`, which names the place."""
    key = "prompt"
    if _LIST_OF_PROMPTS.match(bytes(memoryview(raw)[:_LOOKED_AT])):
        prompts = _several.decode(raw)
        if len(prompts) > 1:
            found = Verbatim(f"{len(prompts)} prompts")
            raise RequestInvalid(key, found, "one text, or one list of token ids: a request for each prompt")
        raw, key = prompts[0], "prompt[0]"
    if bytes(memoryview(raw)[:1]) == b"[":
        return read_ids(raw, key)
    text = _prompt.read(raw, key)
    assert isinstance(text, str), "what does not begin as a list is none"
    return text


def read_ids(raw: msgspec.Raw, key: str) -> bytes:
    """Return a list of token ids as little-endian u32s; raise `RequestInvalid`, which names the place."""
    end = len(raw) - 1
    if end <= _SLICE or bytes(memoryview(raw)[:1]) != b"[":
        return pack_tokens(_ids.read(raw, key))
    view, at, parts, count = memoryview(raw), 1, [], 0
    while at < end:
        piece = bytes(view[at : min(at + _SLICE, end)])
        if at + len(piece) < end:
            piece = piece[: max(0, piece.rfind(b","))]
        ids = _decoded(piece, key, count)
        parts.append(pack_tokens(ids))
        count += len(ids)
        at += len(piece) + 1
    return b"".join(parts)


def _decoded(piece: bytes, key: str, before: int) -> list[int]:
    try:
        return _ids.read(msgspec.Raw(b"[%b]" % piece), "")
    except RequestInvalid as error:
        at = _INDEX.fullmatch(error.field)
        param = f"{key}[{before + int(at[1])}]" if at else key
        raise RequestInvalid(param, error.found, error.allowed if at else "token ids") from error
