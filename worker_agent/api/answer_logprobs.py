r"""Log probabilities as OpenAI clients read them, in either interface's shape.

    chat         {content: [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}, ..]}, ..], refusal}
    completion   {tokens, token_logprobs, top_logprobs: [{token: logprob}, ..], text_offset}; offsets are characters
                 from the begin of the choice's text; the chosen token is always among the top
    prompt       [none, {"token id": {logprob, rank, decoded_token}}, ..], an entry for each of the prompt's tokens

    a token without log probabilities chat: logprob -9999 and no top; completion, prompt: null
    a logprob below -9999, or none    -9999
    a token with broken characters    token: U+FFFD for the broken part, and its bytes; completion: `bytes:\xe2\x80`

Each entry is encoded as JSON by itself (`msgspec.Raw`): the objects of one entry are freed before the next is built,
and a thread that renders a long answer lets other threads run between entries.

Source: the OpenAI interface (chat completion object: -9999.0 "signifies that the token is very unlikely"); `prompt`:
vLLM's interface.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from worker_agent.api.choice_text import TokenSpan
from worker_agent.port.sampling import UNLIKELY, TokenLogprob, TokenLogprobs, bounded_logprob

TokenBytes = Callable[[int], bytes | None]
"""Returns the bytes of a token; None if unknown."""


def chat_logprobs(spans: Sequence[TokenSpan], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the value of a chat choice's `logprobs`."""
    return {"content": [_encoded(_chat_entry(span, token_bytes)) for span in spans], "refusal": None}


def completion_logprobs(spans: Sequence[TokenSpan], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the value of a completion choice's `logprobs`."""
    return {
        "tokens": [_spelt(span.token_id, token_bytes) for span in spans],
        "token_logprobs": [span.logprobs and bounded_logprob(span.logprobs.chosen.logprob) for span in spans],
        "top_logprobs": [_encoded(_top(span.logprobs, token_bytes)) for span in spans],
        "text_offset": [span.start for span in spans],
    }


def prompt_logprobs(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprobs | None], token_bytes: TokenBytes
) -> list[msgspec.Raw | None]:
    """Return an entry for each token of the prompt; None for the first, which has no context."""
    padded = [*logprobs, *[None] * (len(prompt) - len(logprobs))]
    return [
        None if token is None or not at else _encoded(_prompt_entry(token, token_bytes))
        for at, token in enumerate(padded)
    ]


def _encoded(entry: dict[str, Any] | None) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(entry))


def _chat_entry(span: TokenSpan, token_bytes: TokenBytes) -> dict[str, Any]:
    logprobs = span.logprobs or TokenLogprobs(chosen=TokenLogprob(token_id=span.token_id, logprob=UNLIKELY))
    return {
        **_chat_token(logprobs.chosen, token_bytes),
        "top_logprobs": [_chat_token(each, token_bytes) for each in logprobs.top],
    }


def _chat_token(token: TokenLogprob, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(token.token_id)
    return {
        "token": _text(data),
        "logprob": bounded_logprob(token.logprob),
        "bytes": None if data is None else list(data),
    }


def _top(logprobs: TokenLogprobs | None, token_bytes: TokenBytes) -> dict[str, float] | None:
    if logprobs is None:
        return None
    return {_spelt(each.token_id, token_bytes): bounded_logprob(each.logprob) for each in _with_chosen(logprobs)}


def _prompt_entry(logprobs: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, Any]:
    return {
        str(each.token_id): {
            "logprob": bounded_logprob(each.logprob),
            "rank": each.rank,
            "decoded_token": _text(token_bytes(each.token_id)),
        }
        for each in _with_chosen(logprobs)
    }


def _with_chosen(logprobs: TokenLogprobs) -> Iterator[TokenLogprob]:
    yield from logprobs.top
    if all(each.token_id != logprobs.chosen.token_id for each in logprobs.top):
        yield logprobs.chosen


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode(errors="replace")


def _spelt(token_id: int, token_bytes: TokenBytes) -> str:
    data = token_bytes(token_id) or b""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
