"""A streamed answer that goes on at another worker without a seam: what the first tells, what the next is asked.

    router -> worker    header `x-kv-continuable: 1`       the answer's events are to carry their token ids
    worker -> router    `: tokens <base64>` before `data`  ids since the event before, as little-endian u32s; a comment,
                                                           which readers of event streams pass over. The client gets it
                                                           where it sent that header, too
    router -> worker    body key `kv_continue`             {tokens, id, created}: all ids so far, in base64, and what
                                                           the answer is called; the worker begins behind them

An event's comment has all ids that were generated when its text was made, whether their text is shown already or is
held back, as half a character or as what may be a stop string is. So whoever begins with these ids holds back the same.

Source of comments: WHATWG HTML, "Server-sent events", 9.2.6.
"""

import base64
import binascii
from typing import Any

import msgspec

from kv_protocol.hashing import pack_tokens, unpack_tokens

HEADER = "x-kv-continuable"
KEY = "kv_continue"
TOKENS_MAX = 1 << 20
COMMENT = b": tokens "
_COMMENT_LINE = b"\n" + COMMENT
_DATA = b"data: "
DONE = b"data: [DONE]\n\n"
"""What ends a stream."""
_TOKEN_BYTES = 4


class Continuation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the next worker is asked: the value of `kv_continue`. `tokens` are base64 of little-endian u32s."""

    tokens: str
    id: str
    created: int

    def token_ids(self) -> list[int]:
        """Return the ids; raise ValueError for anything else than 1 to `TOKENS_MAX` of them."""
        try:
            data = base64.b64decode(self.tokens, validate=True)
        except binascii.Error as error:
            raise ValueError(f"found no base64 ({error})") from error
        if not data or len(data) % _TOKEN_BYTES or len(data) > TOKENS_MAX * _TOKEN_BYTES:
            raise ValueError(f"found {len(data)} bytes, allowed 1..{TOKENS_MAX} little-endian u32s")
        return unpack_tokens(data)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a stream has come. `tokens` are the ids' bytes; `finish_reason` and `has_usage` are of what was sent."""

    tokens: bytes
    id: str
    created: int
    finish_reason: str | None = None
    has_usage: bool = False

    @property
    def token_count(self) -> int:
        """How many ids."""
        return len(self.tokens) // _TOKEN_BYTES

    def continuation(self) -> bytes:
        """Return the JSON of `kv_continue`."""
        told = Continuation(tokens=base64.b64encode(self.tokens).decode(), id=self.id, created=self.created)
        return msgspec.json.encode(told)

    def ending(self, model: str, *, is_chat: bool, prompt_tokens: int | None) -> bytes:
        """Return the events that are missing of a stream that has all of its tokens; `prompt_tokens`: for its usage.

        Where it has not said so, it ended for its length. Without `prompt_tokens` no usage is wanted.
        """
        head: dict[str, Any] = {"id": self.id, "created": self.created, "model": model}
        head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
        events: list[dict[str, Any]] = []
        if self.finish_reason is None:
            said: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
            events.append({"choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "length"}]})
        if prompt_tokens is not None and not self.has_usage:
            total = prompt_tokens + self.token_count
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self.token_count, "total_tokens": total}
            events.append({"choices": [], "usage": usage})
        return b"".join(b"data: %b\n\n" % msgspec.json.encode(head | event) for event in events) + DONE


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _Event(msgspec.Struct, frozen=True):
    id: str
    created: int
    choices: tuple[_Choice, ...] = ()
    usage: msgspec.Raw | None = None


_event = msgspec.json.Decoder(_Event)


def token_comment(token_ids: list[int]) -> bytes:
    """Return the line that goes before an event's `data`; nothing where there are no ids."""
    return b"%b%b\n" % (COMMENT, base64.b64encode(pack_tokens(token_ids))) if token_ids else b""


def without_tokens(events: bytes) -> tuple[bytes, int]:
    """Return whole events without such lines, and how many ids those had.

    JSON has no line ends of its own, so that no text of an answer looks like such a line.
    """
    count = 0
    at = 0 if events.startswith(COMMENT) else events.find(_COMMENT_LINE) + 1 or -1
    while at >= 0:
        end = events.find(b"\n", at) + 1 or len(events)
        count += (end - at - len(COMMENT)) * 3 // (4 * _TOKEN_BYTES)  # what pads it is less than an id
        events = events[:at] + events[end:] if at else events[end:]
        at = at if events.startswith(COMMENT, at) else events.find(_COMMENT_LINE, at) + 1 or -1
    return events, count


def progress_of(events: bytes, before: Progress | None = None) -> Progress | None:
    """Return how far whole events bring a stream that had come as far as `before`.

    None where they do not tell: the worker knows nothing of continuations, or the stream has several choices.
    """
    tokens, first = [b"" if before is None else before.tokens], before
    last: _Event | None = None
    finish_reason, has_usage = None, False
    for line in events.split(b"\n"):
        try:
            if line.startswith(COMMENT):
                tokens.append(base64.b64decode(line[len(COMMENT) :].rstrip(b"\r"), validate=True))
            elif line.startswith(_DATA) and not line.startswith(DONE.rstrip()):
                last = _event.decode(line[len(_DATA) :])
                has_usage = has_usage or last.usage is not None
                finish_reason = next((each.finish_reason for each in last.choices), None) or finish_reason
        except (msgspec.DecodeError, binascii.Error):
            return None
    told = first or last
    joined = b"".join(tokens)
    if told is None or not joined or len(joined) % _TOKEN_BYTES:
        return None
    return Progress(tokens=joined, id=told.id, created=told.created, finish_reason=finish_reason, has_usage=has_usage)
