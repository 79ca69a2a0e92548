"""Keeps what a client has received of an event stream, so that another worker can resume it.

| the stream is | its token ids are in | the client gets |
|---|---|---|
| an agent's | comments (`kv_protocol/continuation.py`) | all but the comments, unless it asked for them |
| an attached engine's | `token_ids`, `prompt_token_ids` | null in their place, unless it asked for them |
| the rest of another worker's, by an attached engine | as before | what the call's `rewrite` makes of the events |
"""

from collections.abc import Callable

import msgspec

from kv_protocol.body_limits import Bytes
from kv_protocol.continuation import COMMENT, Progress, without_tokens
from router.http.framing import chunk, payload_of

FAILURE = b'data: {"error":'
"""How an event of vLLM begins that reports an error: in JSON's strings each quote is escaped."""
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
    """Return where a complete event begins by which vLLM reports its failure, and what it says; -1 if there is none.

    If its engine core dies, vLLM's server ends each stream that has begun with such an event and `[DONE]`. An error
    with a code below 500 is the request's, and none of these.
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
    for their ids. In JSON's strings each quote is escaped, so that no text of an answer looks like such a key.
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


class StreamReplayBuffer:
    """The complete events of a stream, at most `bytes_max`; of a longer stream nothing is kept."""

    __slots__ = (
        "_bytes_max",
        "_hides_ids",
        "_hides_tokens",
        "_parts",
        "_rewrite",
        "_size",
        "before",
        "is_engines",
        "is_overfull",
        "later_tokens",
    )

    def __init__(self, bytes_max: int, *, hides_tokens: bool = True) -> None:
        """Without `hides_tokens` the client gets the token comments."""
        self._bytes_max, self._hides_tokens = bytes_max, hides_tokens
        self._hides_ids = False
        self._rewrite: Callable[[bytes], bytes] | None = None
        self._parts: list[tuple[bytes, bool]] = []
        self._size = 0
        self.before: Progress | None = None
        """How far the stream had come where this worker continued it, if `rewrite` was called."""
        self.is_engines = False
        """The worker is an attached engine that tells ids: an error event (`failure_in`) is its death."""
        self.is_overfull = False
        self.later_tokens = 0
        """Tokens in comments, without those of the first call of `add`."""

    def hide_ids(self) -> None:
        """The worker is an attached engine that was asked for ids on behalf of the router: the client gets none."""
        self._hides_ids = True

    def rewrite(self, rewrite: Callable[[bytes], bytes], before: Progress) -> None:
        """The worker is an attached engine that continues from `before`; `rewrite` makes what the client gets."""
        self._rewrite, self.before = rewrite, before

    def add(self, data: bytes, *, framed: bool) -> bytes:
        """Keep the next bytes; return what the client gets of them. `framed`: both are complete HTTP chunks."""
        is_first = not self._size
        self._size += len(data)
        if self._size <= self._bytes_max:
            self._parts.append((data, framed))
        elif not self.is_overfull:
            self.is_overfull = True
            self._parts.clear()
        rewrite = self._rewrite
        if self._hides_ids or rewrite is not None:
            events = payload_of(data) if framed else data
            events = without_ids(events) if rewrite is None else rewrite(events)
            return chunk(events) if framed and events else events
        if COMMENT not in data:
            return data
        events, tokens = without_tokens(payload_of(data) if framed else data)
        if not is_first:
            self.later_tokens += tokens
        if not self._hides_tokens:
            return data
        return chunk(events) if framed and events else events

    def events(self) -> bytes:
        """Return the kept events."""
        return b"".join([payload_of(data) if framed else data for data, framed in self._parts])
