"""Decodes a client's request for the router, by its endpoint."""

from collections.abc import Callable

import msgspec

from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai.combinations import check_chat, check_min_tokens
from kv_protocol.openai.embeddings import EMBEDDINGS, EmbeddingsInbound, decode_embeddings
from kv_protocol.openai.errors import RequestInvalid, Verbatim, explained
from kv_protocol.openai.inbound import CHAT, COMPLETIONS, ChatInbound, CompletionInbound, Inbound
from kv_protocol.openai.responses import RESPONSES, ResponsesInbound, decode_responses

_chat_decoder = msgspec.json.Decoder(ChatInbound)
_completion_decoder = msgspec.json.Decoder(CompletionInbound)


def _decode_chat(body: bytes | bytearray) -> ChatInbound:
    chat = _chat_decoder.decode(body)
    if chat.min_tokens is not None or chat.tool_choice is not None or chat.top_logprobs is not None:
        check_chat(chat, chat.tools)
    return chat


def _decode_completion(body: bytes | bytearray) -> CompletionInbound:
    completion = _completion_decoder.decode(body)
    if completion.min_tokens is not None:
        check_min_tokens(completion)
    return completion


_decoders: dict[str, tuple[type[Inbound], Callable[[bytes | bytearray], Inbound]]] = {
    CHAT: (ChatInbound, _decode_chat),
    COMPLETIONS: (CompletionInbound, _decode_completion),
    RESPONSES: (ResponsesInbound, decode_responses),
    EMBEDDINGS: (EmbeddingsInbound, decode_embeddings),
}


def decode_inbound(path: str, body: bytes | bytearray) -> Inbound:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else.

    `path` is that of an endpoint; for any other path (`/v1/route`) the body decides: a chat has `messages`, a response
    `input`, a completion neither. All of the body has to be UTF-8, also the values that the router does not read.
    """
    if not body.isascii():
        check_utf8(body)
    kind: type[Inbound] = Inbound
    try:
        kind, decode = _decoders.get(path) or _decoders[_endpoint_of(body)]
        return decode(body)
    except RequestInvalid:
        raise
    except UNDECODABLE as error:
        raise explained(error, body, kind) from error


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
