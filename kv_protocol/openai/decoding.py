"""Decodes a client's request for the router, by its endpoint."""

import re
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai.embeddings import EMBEDDINGS, EmbeddingsInbound
from kv_protocol.openai.errors import RequestInvalid, Verbatim, explained
from kv_protocol.openai.inbound import CHAT, COMPLETIONS, ChatInbound, CompletionInbound, Inbound, ReadChat
from kv_protocol.openai.passed import PassedInbound
from kv_protocol.openai.responses import RESPONSES, ResponsesInbound

_decoders: dict[str, msgspec.json.Decoder[Inbound]] = {
    CHAT: msgspec.json.Decoder(ChatInbound),
    COMPLETIONS: msgspec.json.Decoder(CompletionInbound),
    RESPONSES: msgspec.json.Decoder(ResponsesInbound),
    EMBEDDINGS: msgspec.json.Decoder(EmbeddingsInbound),
}
_read_chats = msgspec.json.Decoder(ReadChat)
_Kind = TypeVar("_Kind", bound=Inbound)
_passed = msgspec.json.Decoder(PassedInbound)
_REFUSED = ("model", "nvext", "kv_prompt_ids", "kv_continue")
"""A value of these keys that is not of its type is refused here, and not by the worker."""
_KEY = re.compile(r" - at `\$\.(?P<key>\w+)[^`]*`$")


def decode_inbound(path: str, body: bytes | bytearray) -> Inbound:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else.

    `path` is that of an endpoint; for any other path (`/v1/route`) the body decides: a chat has `messages`, a response
    `input`, a completion neither. All of the body has to be UTF-8, also the values that the router does not read.
    """
    try:
        decoder = _decoders.get(path) or _decoders[_endpoint_of(body)]
    except UNDECODABLE as error:
        raise explained(error, body, Inbound) from error
    return _decoded(decoder, body)


def decode_with_messages(path: str, body: bytes | bytearray) -> Inbound:
    """Return what `decode_inbound` does; of a chat whose values all have their types, a `ReadChat`."""
    if path == CHAT:
        if not body.isascii():
            check_utf8(body)
        try:
            return _read_chats.decode(body)
        except UNDECODABLE:
            pass  # what is wrong is found below, or left to the worker
    return decode_inbound(path, body)


def decode_passed(path: str, body: bytes | bytearray) -> PassedInbound:
    """Return the request to another `path` in `body`; raise `RequestInvalid` as `decode_inbound` does."""
    read = _decoded(_passed, body)
    return replace(read, model=read.model or "", endpoint=path, path=path)


def _decoded(decoder: msgspec.json.Decoder[_Kind], body: bytes | bytearray) -> _Kind:
    """Return the request without the values that are not of their type: the worker refuses them, or takes them."""
    if not body.isascii():
        check_utf8(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        return _without_unfit(decoder, body, error)
    except UNDECODABLE as error:
        raise explained(error, body, Inbound) from error


def _without_unfit(decoder: msgspec.json.Decoder[_Kind], body: bytes | bytearray, error: Exception) -> _Kind:
    kind, fields = decoder.type, None
    while True:
        found = _KEY.search(str(error))
        if found is None or found["key"] in _REFUSED:
            raise explained(error, body, kind) from error
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if fields is None else fields
        del fields[found["key"]]
        try:
            return decoder.decode(msgspec.json.encode(fields))
        except msgspec.ValidationError as another:
            error = another


def check_utf8(body: bytes | bytearray) -> None:
    """Check that all of the body is UTF-8; raise `RequestInvalid` otherwise."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        found = Verbatim(f"byte 0x{body[error.start]:02x} at {error.start}")
        raise RequestInvalid("body", found, f"UTF-8 ({error.reason})") from error


def _endpoint_of(body: bytes | bytearray) -> str:
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return CHAT if "messages" in fields else RESPONSES if "input" in fields else COMPLETIONS
