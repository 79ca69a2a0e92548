"""Keeps what a client has received of an event stream, so that another worker can resume it.

| the stream is | its token ids are in | the client gets |
|---|---|---|
| an agent's | comments (`kv_protocol/continuation.py`) | all but the comments, unless it asked for them |
| an attached engine's | `token_ids`, `prompt_token_ids` | null in their place, unless it asked for them |
| another worker's, which an attached engine continues | as above | what the buffer's `rewriter` makes of the events |
"""

from collections.abc import Callable
from functools import partial

import msgspec

from kv_protocol.body_limits import Bytes
from kv_protocol.continuation import COMMENT, HEADER, Progress, without_tokens
from router.native import built

CONTINUABLE_HEADER = HEADER.encode()
"""A client that sends it gets a stream's token comments."""
FAILURE = b'data: {"error":'
"""How an event of vLLM that reports an error begins. No answer's text has this: JSON escapes quotes."""
REPLAYED_BYTES_MAX = 1 << 20
"""A longer answer is not kept, and does not migrate: each stream in progress may take this much memory."""
_SERVER_ERROR = 500
_MESSAGE_CHARACTERS_MAX = 200
_IDS = b'token_ids":['
_EMPTY = b'"delta":{},'
_GOES_ON = b'"finish_reason":null'


class _Error(msgspec.Struct):
    code: int
    message: str = ""


class _ErrorEvent(msgspec.Struct):
    error: _Error


_error_events = msgspec.json.Decoder(_ErrorEvent)


def failure_in(events: Bytes) -> tuple[int, str]:
    """Return where the complete event begins that reports a failure of vLLM, and the failure; -1 if there is none.

    If its engine core dies, vLLM's server ends each stream that has begun with an error event and `[DONE]`. An error
    with a code below 500 is the request's, and no failure of vLLM.
    Source: vllm-project/vllm 0.24.0, `vllm/entrypoints/openai/chat_completion/serving.py` and `completion/serving.py`
    (`create_streaming_error_response`); seen when the engine core of a real one was killed.
    """
    at = events.find(FAILURE)
    end = events.find(b"\n\n", at)
    if at < 0 or end < 0:
        return -1, ""
    try:
        error = _error_events.decode(events[at + len(b"data: ") : end]).error
    except msgspec.DecodeError:
        return -1, ""
    if error.code < _SERVER_ERROR:
        return -1, ""
    return at, f"an error event, code {error.code}: {error.message[:_MESSAGE_CHARACTERS_MAX]}"


def without_ids(events: bytes) -> bytes:
    """Return complete events of vLLM as they would be if the request had not asked for token ids, byte for byte.

    The lists become null. Left out are events of a chat with an empty delta and no finish reason, which vLLM sends only
    for their ids. In JSON's strings each quote is escaped, so that no text of an answer looks like a key.
    Source: vllm-project/vllm 0.24.0, `vllm/entrypoints/openai/chat_completion/serving.py` (both keys are always set;
    "we still need to send a chunk with token_ids even if delta_message is None").
    """
    at = events.find(_IDS)
    if at < 0:
        return events
    if _EMPTY in events:
        kept = [each for each in events.split(b"\n\n") if _EMPTY not in each or _GOES_ON not in each]
        events = b"\n\n".join(kept)
        at = events.find(_IDS)
    parts: list[bytes] = []
    start = 0
    while at >= 0:
        opening = at + len(_IDS) - 1
        end = events.find(b"]", opening) + 1
        if not end:
            break
        parts.append(events[start:opening])
        start = end
        at = events.find(_IDS, start)
    parts.append(events[start:])
    return b"null".join(parts)


class StreamReplayBuffer(msgspec.Struct, kw_only=True, eq=False):
    """Keeps the complete events of a stream as the worker sent them, and says what the client gets of them."""

    kept: built.KeptEvents = msgspec.field(default_factory=partial(built.KeptEvents, REPLAYED_BYTES_MAX))
    """Has the stream's `events`. If they exceed the bytes it was made for, it drops all and sets `is_overfull`."""
    hides_tokens: bool = True
    """Whether the client gets no token comments."""
    is_engines: bool = False
    """Whether the worker is an attached engine that reports ids: an error event (`failure_in`) means its death."""
    rewriter: Callable[[bytes], bytes] | None = None
    """Translates an attached engine's events for the client; None: the client gets them unchanged."""
    before: Progress | None = None
    """The stream's progress from which an attached engine continues it; None: no such engine continues it here."""
    has_begun: bool = False
    """Whether the client has the first events."""
    later_tokens: int = 0
    """Tokens in comments, without those of the first call of `add`."""

    @property
    def alarms(self) -> tuple[bytes, ...]:
        """`add` must see each event that contains one of these texts (an empty one is in all); others are only kept."""
        if self.rewriter is not None:
            return (b"",)
        return (COMMENT, FAILURE) if self.is_engines else (COMMENT,)

    def add(self, events: bytes) -> bytes:
        """Keep the next events, or the first part of one too long to wait for; return what the client gets of them."""
        is_first, self.has_begun = not self.has_begun, True
        self.kept.add(events)
        if self.rewriter is not None:
            return self.rewriter(events)
        if COMMENT not in events:
            return events
        shown, tokens = without_tokens(events)
        if not is_first:
            self.later_tokens += tokens
        return shown if self.hides_tokens else events
