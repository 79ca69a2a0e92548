"""The bytes of a client's request become what the router reads of it, by the endpoint that it is for."""

from collections.abc import Callable

import msgspec

from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai_embeddings import EMBEDDINGS, decode_embeddings
from kv_protocol.openai_errors import RequestInvalid, Verbatim, explained
from kv_protocol.openai_inbound import CHAT, COMPLETIONS, ChatInbound, CompletionInbound, Inbound
from kv_protocol.openai_responses import RESPONSES, decode_responses

_decoders: dict[str, Callable[[bytes | bytearray], Inbound]] = {
    CHAT: msgspec.json.Decoder(ChatInbound).decode,
    COMPLETIONS: msgspec.json.Decoder(CompletionInbound).decode,
    RESPONSES: decode_responses,
    EMBEDDINGS: decode_embeddings,
}


def decode_inbound(path: str, body: bytes | bytearray) -> Inbound:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else.

    `path` is that of an endpoint; of any other path (`/v1/route`) the body itself says for which it is: a chat has
    `messages`, a response `input`, a completion neither. All of the body has to be UTF-8, also the values that the
    router does not read.
    """
    if not body.isascii():
        _check_utf8(body)
    try:
        return (_decoders.get(path) or _decoders[_endpoint_of(body)])(body)
    except RequestInvalid:
        raise
    except UNDECODABLE as error:
        raise explained(error, body) from error


def _check_utf8(body: bytes | bytearray) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        found = Verbatim(f"byte 0x{body[error.start]:02x} at {error.start}")
        raise RequestInvalid("body", found, f"UTF-8 ({error.reason})") from error


def _endpoint_of(body: bytes | bytearray) -> str:
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return CHAT if "messages" in fields else RESPONSES if "input" in fields else COMPLETIONS
