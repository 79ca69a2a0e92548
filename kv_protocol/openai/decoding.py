"""Decodes a client's request for the router, by its endpoint."""

import re
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai.errors import RequestInvalid, Verbatim, explained
from kv_protocol.openai.inbound import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ChatInbound,
    CompletionInbound,
    EmbeddingsInbound,
    Inbound,
    PassedInbound,
    ReadChat,
)
from kv_protocol.openai.responses import RESPONSES, ResponsesInbound

_decoders: dict[str, msgspec.json.Decoder[Inbound]] = {
    CHAT: msgspec.json.Decoder(ChatInbound),
    COMPLETIONS: msgspec.json.Decoder(CompletionInbound),
    RESPONSES: msgspec.json.Decoder(ResponsesInbound),
    EMBEDDINGS: msgspec.json.Decoder(EmbeddingsInbound),
}
_read_chats: msgspec.json.Decoder[Inbound] = msgspec.json.Decoder(ReadChat)
_Kind = TypeVar("_Kind", bound=Inbound)
_passed = msgspec.json.Decoder(PassedInbound)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHECKED_HERE = ("model", "nvext", "kv_prompt_ids", "kv_continue")
"""The router refuses a value of the wrong type for these keys; for other keys the worker decides."""
_KEY = re.compile(r" - at `\$\.(?P<key>\w+)[^`]*`$")
"""The end of msgspec's message about a value: its place, of which `key` is the body's key."""


def decode_inbound(path: str, body: bytes | bytearray, messages_bytes_max: int = 0) -> Inbound:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, if there is none.

    A chat of at most `messages_bytes_max` bytes is a `ReadChat`, if no value is of the wrong type.
    A path that is not an endpoint's (`/v1/route`) takes any kind: a body with `messages` is a chat, one with `input` a
    response, any other a completion. The whole body has to be UTF-8, including values that the router does not read.
    """
    if len(body) <= messages_bytes_max and path == CHAT:
        decoder = _read_chats
    else:
        decoder = _decoders.get(path) or _decoders[_endpoint_of(body)]
    if not body.isascii():
        check_utf8(body)
    try:
        return decoder.decode(body)
    except UNDECODABLE:
        return _without_wrong(_decoders[CHAT] if decoder is _read_chats else decoder, body)


def decode_passed(path: str, body: bytes | bytearray) -> PassedInbound:
    """Return the request in `body` to a `path` that is passed on; raise `RequestInvalid` as `decode_inbound` does."""
    if not body.isascii():
        check_utf8(body)
    read = _without_wrong(_passed, body)
    return replace(read, model=read.model or "", endpoint=path, path=path)


def _without_wrong(decoder: msgspec.json.Decoder[_Kind], body: bytes | bytearray) -> _Kind:
    """Return the request without its values of the wrong type: the worker refuses them, or takes them."""
    fields, rest = None, body
    while True:
        try:
            return decoder.decode(rest)
        except msgspec.ValidationError as error:
            found = _KEY.search(str(error))
            if found is None or found["key"] in _CHECKED_HERE:
                raise explained(error, body, decoder.type) from error
        except UNDECODABLE as error:
            raise explained(error, body, Inbound) from error
        fields = _fields_of(body) if fields is None else fields
        del fields[found["key"]]
        rest = msgspec.json.encode(fields)


def check_utf8(body: bytes | bytearray) -> None:
    """Check that all of the body is UTF-8; raise `RequestInvalid` otherwise."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        found = Verbatim(f"byte 0x{body[error.start]:02x} at {error.start}")
        raise RequestInvalid("body", found, f"UTF-8 ({error.reason})") from error


def _fields_of(body: bytes | bytearray) -> dict[str, msgspec.Raw]:
    try:
        return _fields.decode(body)
    except UNDECODABLE as error:
        raise explained(error, body, Inbound) from error


def _endpoint_of(body: bytes | bytearray) -> str:
    fields = _fields_of(body)
    return CHAT if "messages" in fields else RESPONSES if "input" in fields else COMPLETIONS
