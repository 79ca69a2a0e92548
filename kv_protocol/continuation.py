"""The wire of a stream that resumes on another worker: token ids from the first worker, a continuation to the next.

    router -> worker    header `x-kv-continuable: 1`       the events of the response shall carry token ids
    worker -> router    `: tokens <base64>` before `data`  ids since the event before, as little-endian u32s; a comment,
                                                           which readers of event streams ignore. The client gets it
                                                           only if it sent the header itself
    router -> worker    body key `kv_continue`             {tokens, id, created}: all ids so far, in base64, and the id
                                                           and time of the response; the worker continues after them

An event's comment has all ids generated so far, including ids whose text is still held back: half a character, or the
beginning of a possible stop string. A worker that continues from these ids holds back the same text.

An attached vLLM writes ids in its events, if the request has `return_token_ids`, and continues a stream if it gets the
prompt's and the answer's ids as its prompt (`router/request/resumption.py`):

    a chat's first event          `prompt_token_ids` beside `choices`
    a completion's first event    `prompt_token_ids` in its choice
    each event with a choice      `token_ids` in the choice: the ids since the event before; null if not asked for

Source of comments: WHATWG HTML, "Server-sent events", 9.2.6; of vLLM's events: vllm-project/vllm 0.24.0,
`vllm/entrypoints/openai/chat_completion/serving.py` (`chat_completion_stream_generator`) and
`vllm/entrypoints/openai/completion/serving.py` (`completion_stream_generator`).
"""

import base64
import binascii
from typing import Any

import msgspec

from kv_protocol.hashing import pack_tokens, unpack_tokens
from kv_protocol.ids import TokenId

HEADER = "x-kv-continuable"
KEY = "kv_continue"
TOKENS_MAX = 1 << 20
COMMENT = b": tokens "
_COMMENT_LINE = b"\n" + COMMENT
_DATA = b"data: "
DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
_TOKEN_BYTES = 4


class Continuation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of `kv_continue`, for the next worker. `tokens` are base64 of little-endian u32s."""

    tokens: str
    id: str
    created: int

    def token_ids(self) -> list[int]:
        """Return the ids; raise ValueError unless there are 1 to `TOKENS_MAX`."""
        try:
            data = base64.b64decode(self.tokens, validate=True)
        except binascii.Error as error:
            raise ValueError(f"found no base64 ({error})") from error
        if not data or len(data) % _TOKEN_BYTES or len(data) > TOKENS_MAX * _TOKEN_BYTES:
            raise ValueError(f"found {len(data)} bytes, allowed 1..{TOKENS_MAX} little-endian u32s")
        return unpack_tokens(data)


class Progress(msgspec.Struct, kw_only=True):
    """The progress of a stream; nothing changes it once `progress_of` returned it.

    `tokens` are the ids' bytes; `finish_reason` and `has_usage` say what was sent already. `text` is the text sent so
    far, `prompt` the bytes of the prompt's ids (empty: the engine sent none). `text_tokens` counts the ids up to and
    with the last event that had text, `last_tokens` those in that event alone. The first `start_tokens` ids came from
    earlier engines. `is_parsed`: a parser of the engine took some of the answer out of the text, for reasoning or tool
    calls.
    """

    tokens: bytes
    id: str
    created: int
    finish_reason: str | None = None
    has_usage: bool = False
    prompt: bytes = b""
    text: str = ""
    text_tokens: int = 0
    last_tokens: int = 0
    start_tokens: int = 0
    is_parsed: bool = False

    @property
    def token_count(self) -> int:
        """The number of ids."""
        return len(self.tokens) // _TOKEN_BYTES

    def continuation(self) -> bytes:
        """Return the JSON of `kv_continue`."""
        tokens = base64.b64encode(self.tokens).decode()
        return msgspec.json.encode(Continuation(tokens=tokens, id=self.id, created=self.created))

    def ending(self, model: str, *, is_chat: bool, prompt_tokens: int | None) -> bytes:
        """Return the missing last events of a stream that has all of its tokens.

        The finish reason is `length` if none was sent. `prompt_tokens` is for the usage; None: no usage is wanted.
        """
        head: dict[str, Any] = {"id": self.id, "created": self.created, "model": model}
        head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
        events: list[dict[str, Any]] = []
        if self.finish_reason is None:
            empty: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
            events.append({"choices": [{"index": 0, **empty, "logprobs": None, "finish_reason": "length"}]})
        if prompt_tokens is not None and not self.has_usage:
            total = prompt_tokens + self.token_count
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self.token_count, "total_tokens": total}
            events.append({"choices": [], "usage": usage})
        return b"".join(b"data: %b\n\n" % msgspec.json.encode(head | event) for event in events) + DONE


class _Delta(msgspec.Struct, frozen=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def is_parsed(self) -> bool:
        """Whether a parser took text out: it has reasoning or tool calls, or neither role nor content."""
        return bool(self.reasoning or self.reasoning_content or self.tool_calls) or (
            self.role is None and self.content is None
        )


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None


class _Event(msgspec.Struct, frozen=True):
    id: str
    created: int
    choices: tuple[_Choice, ...] = ()
    usage: dict[str, msgspec.Raw] | None = None
    prompt_token_ids: list[TokenId] | None = None


_event = msgspec.json.Decoder(_Event)
_NO_CHOICE = _Choice()
_NO_PROGRESS = Progress(tokens=b"", id="", created=0)


def token_comment(token_ids: list[int]) -> bytes:
    """Return the comment line before an event's `data`; empty if there are no ids."""
    return b"%b%b\n" % (COMMENT, base64.b64encode(pack_tokens(token_ids))) if token_ids else b""


def without_tokens(events: bytes) -> tuple[bytes, int]:
    """Return complete events without token comments, and the number of ids in them.

    JSON has no line ends inside, so no text of a response looks like a comment.
    """
    count = 0
    at = 0 if events.startswith(COMMENT) else events.find(_COMMENT_LINE) + 1 or -1
    while at >= 0:
        end = events.find(b"\n", at) + 1 or len(events)
        count += (end - at - len(COMMENT)) * 3 // (4 * _TOKEN_BYTES)  # the padding is less than an id
        events = events[:at] + events[end:] if at else events[end:]
        at = at if events.startswith(COMMENT, at) else events.find(_COMMENT_LINE, at) + 1 or -1
    return events, count


def progress_of(events: bytes, before: Progress | None = None) -> Progress | None:
    """Return the progress of a stream after complete events, from its progress `before` (None: they are its first).

    None if it is unknown: the worker sent no ids, or the stream has several choices.
    """
    found = msgspec.structs.replace(before or _NO_PROGRESS, finish_reason=None, has_usage=False)
    tokens, texts = bytearray(found.tokens), [found.text]
    try:
        for line in events.split(b"\n"):
            if line.startswith(COMMENT):
                tokens += base64.b64decode(line[len(COMMENT) :].rstrip(b"\r"), validate=True)
            elif line.startswith(_DATA) and not line.startswith(DONE.rstrip()):
                event = _event.decode(line[len(_DATA) :])
                if before is None:
                    found.id, found.created = event.id, event.created
                _add(event, found, tokens, texts)
    except (msgspec.DecodeError, binascii.Error):
        return None
    found.tokens, found.text = bytes(tokens), "".join(texts)
    is_known = found.id and (tokens or found.prompt) and not len(tokens) % _TOKEN_BYTES
    return found if is_known else None


def _add(event: _Event, found: Progress, tokens: bytearray, texts: list[str]) -> None:
    choice = event.choices[0] if event.choices else _NO_CHOICE
    found.has_usage = found.has_usage or event.usage is not None
    found.finish_reason = choice.finish_reason or found.finish_reason
    found.prompt = found.prompt or pack_tokens(event.prompt_token_ids or choice.prompt_token_ids or ())
    tokens += pack_tokens(choice.token_ids or ())
    delta = choice.delta
    if delta is not None and delta.is_parsed and choice.finish_reason is None:
        found.is_parsed = True
    if text := choice.text if delta is None else delta.content:
        texts.append(text)
        found.text_tokens, found.last_tokens = len(tokens) // _TOKEN_BYTES, len(choice.token_ids or ())
