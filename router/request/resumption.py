"""How an attached engine is asked for token ids, and how it continues a stream from them. Pure.

    asked          `"return_token_ids": true` as the first key of the client's body
    continues      `POST /v1/completions`: prompt = the prompt's ids and the answer's; max_tokens and min_tokens are
                   reduced by the answer's ids; if the client sent a chat, the router rewrites the completion's events
                   as a chat's

The engine also reports the ids of text that it still holds back: half a character, or, with stop strings, the last
characters, one less than the longest stop string has. So the router decodes the last ids, and finds the place in them
where the stream continues:

    ids     i0 i1 .. ik | ik+1 ..        the text of i0..ik is whole, and does not end in the beginning of a stop string
    text    shown    | held |            `shown` is what the client has; it gets `held` with the next text
                                         the client has no text of ik+1 and later ids: they are generated again

The router does not resume an answer with parts that a parser of the engine takes out of the text (tool calls,
reasoning), an answer with log probabilities, `echo`, several choices or guided decoding, an answer to a prompt with
media, or a stream that has no such ik. `may_be_asked` and `resumed_body` exclude further options.

Source: vllm-project/vllm 0.24.0, `vllm/v1/engine/detokenizer.py` (`stop_buffer_length`, `DecodeStream(ids=..)` primed
with the prompt: after half a character it would repeat the prompt's text), `vllm/entrypoints/openai/completion/
protocol.py` and `serving.py` (`max_tokens` is 16 if not given), `chat_completion/protocol.py`.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kv_protocol.body_limits import Bytes
from kv_protocol.continuation import Progress
from kv_protocol.hashing import unpack_tokens
from kv_protocol.openai.inbound import CHAT, SHAPING_KEYS
from kv_protocol.openai.option_table import KEPT, LEFT_OUT
from kv_protocol.openai.parts import ABSENT
from kv_protocol.openai.requests import MARKS, ChatInbound, CompletionInbound, Inbound, RequestInvalid, is_given

ASKED = b'{"return_token_ids":true,'
_KEPT = frozenset(name for name, marks in MARKS.items() if KEPT in marks)
_LEFT_OUT = {"request_id", "rid"}.union(name for name, marks in MARKS.items() if LEFT_OUT in marks)
"""Keys that are not sent on: those so marked, and the two names of a request that only attached engines take."""
_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that states none."""
_WINDOW = 64
"""The router decodes this many of the answer's last ids, and one more for each character that the engine may hold back
for a stop string, to compare their text with what the client has."""
_PRIMED = 16
"""This many ids before the window are decoded first, so that the decoder knows whether a word begins."""
_TOKEN_BYTES = 4
_TEXT_PARTS = frozenset({"text", "input_text", "refusal"})
_shaping_of, _PLAIN = attrgetter(*SHAPING_KEYS), (ABSENT,) * len(SHAPING_KEYS)

_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_events = msgspec.json.Decoder(dict[str, Any])


class CannotResume(Exception):
    """The stream cannot be continued. `elsewhere`: this worker cannot, but another may."""

    def __init__(self, message: str, *, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.elsewhere = elsewhere


class ResumePoint(NamedTuple):
    """A stream continues after the answer's first `token_count` ids; the client lacks `held` of their text."""

    token_count: int
    held: str


def may_be_asked(inbound: Inbound) -> bool:
    """Return whether an attached engine is asked for the ids of this request's stream."""
    if inbound.return_token_ids is False or bytes(inbound.detokenize) == b"false":
        return False
    if not isinstance(inbound, ChatInbound | CompletionInbound):
        return False
    if (shaping := _shaping_of(inbound)) != _PLAIN and any(map(_is_set, shaping)):
        return False
    if inbound.stop and (_is_set(inbound.include_stop_str_in_output) or inbound.min_tokens):
        return False
    return not (isinstance(inbound, ChatInbound) and is_given(inbound.tools))


def _is_set(option: msgspec.Raw) -> bool:
    return is_given(option) and bytes(option) != b"false"


def asking(body: Bytes) -> tuple[bytes, memoryview]:
    """Return the JSON object `body` with the key that asks for token ids, in parts."""
    return ASKED, memoryview(body)[body.index(b"{") + 1 :]


def check_text_only(inbound: Inbound) -> None:
    """Raise `CannotResume` if the prompt may have media, which its token ids do not contain."""
    if not isinstance(inbound, ChatInbound):
        return
    try:
        contents = [message.get("content") for message in inbound.read_messages()]
    except RequestInvalid as error:
        raise CannotResume(str(error)) from error
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if not all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") in _TEXT_PARTS) for part in parts):
        raise CannotResume("the prompt has media")


def stops_of(inbound: Inbound) -> tuple[str, ...]:
    """Return the stop strings."""
    stop = inbound.stop
    given = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return tuple(each for each in given if each)


def resume_point(progress: Progress, push: Callable[[Sequence[int]], str], stops: Sequence[str]) -> ResumePoint:
    """Return where vLLM continues the stream; raise `CannotResume` if every place might lose or repeat text.

    `push` takes the next ids of the answer and returns the text that they complete; it holds half a character back.
    """
    if progress.is_parsed:
        raise CannotResume("the engine parses the answer")
    ids, prompt = unpack_tokens(progress.tokens), progress.prompt
    held_characters = max(map(len, stops), default=1) - 1
    first = max(0, len(ids) - _WINDOW - held_characters)
    primed = (unpack_tokens(prompt[-_PRIMED * _TOKEN_BYTES :]) + ids[max(0, first - _PRIMED) : first])[-_PRIMED:]
    push(primed)
    text, ends = "", [(first, 0)]
    for at in range(first, len(ids)):
        if piece := push((ids[at],)):
            text += piece
            ends.append((at + 1, len(text)))
    before = max(end for token_count, end in ends if token_count <= max(first, progress.start_tokens))
    # The last engine held back only text of ids that it generated itself: the client has all text before those.
    shown = max(before, len(text) - held_characters)
    is_known = progress.text == text[:shown] if first == 0 else shown > 0 and progress.text.endswith(text[:shown])
    if is_known:
        for token_count, end in reversed(ends):
            if end >= shown and not _may_stop(text[:end], stops):
                return ResumePoint(token_count, text[shown:end])
    elif not stops and progress.last_tokens == 1:
        # The texts differ, but the last event with text had one id: after that id the engine held no text back.
        return ResumePoint(progress.text_tokens, "")
    raise CannotResume("the text of the token ids is not what the client has")


def _may_stop(text: str, stops: Sequence[str]) -> bool:
    """Return whether the text ends in the beginning of a stop string."""
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def resumed_body(body: Bytes, inbound: Inbound, progress: Progress, *, max_seq_len: int) -> bytes:
    """Return the body of the completion that continues the answer to `body` after `progress`.

    `max_seq_len` bounds prompt and answer together; 0: unknown.

    Raises:
        CannotResume: no token is left to generate, the number of tokens that are left is unknown, or `body` has a key
            that may shape the answer.
    """
    prompt, done = unpack_tokens(progress.prompt), progress.token_count
    limit = inbound.limit_tokens
    if limit is None and isinstance(inbound, CompletionInbound):
        limit = _COMPLETION_TOKENS
    elif limit is None and max_seq_len:
        limit = max_seq_len - len(prompt)
    if limit is None or limit <= done:
        raise CannotResume(f"max_tokens: found {limit} with {done} tokens generated")
    request: dict[str, Any] = {}
    for key, value in _objects.decode(body).items():
        if key in _KEPT:
            request[key] = value
        elif key not in _LEFT_OUT and _is_set(value):
            raise CannotResume(f"{key} may shape the answer")
    request |= {"prompt": prompt + unpack_tokens(progress.tokens), "max_tokens": limit - done, "return_token_ids": True}
    if inbound.min_tokens:
        request["min_tokens"] = max(0, inbound.min_tokens - done)
    return msgspec.json.encode(request)


def behind(progress: Progress, point: ResumePoint) -> Progress:
    """Return the progress at `point`, as if the client had `point.held`."""
    count = point.token_count
    return replace(
        progress,
        tokens=progress.tokens[: count * _TOKEN_BYTES],
        text=progress.text + point.held,
        text_tokens=min(progress.text_tokens, count),
        last_tokens=0,
        start_tokens=count,
    )


class EventRewriter:
    """Rewrites the events of vLLM's completion, in their order, as events of the client's stream, with vLLM's keys."""

    def __init__(self, inbound: Inbound, progress: Progress, held: str) -> None:
        """`held` is put before the first text of the events."""
        self._is_chat, self._hides_ids = inbound.path == CHAT, not inbound.return_token_ids
        self._progress, self._held = progress, held

    def __call__(self, events: bytes) -> bytes:
        """Return the next events of the stream."""
        return b"\n\n".join([self._event(each) for each in events.split(b"\n\n")])

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event
        try:
            answer = _events.decode(event[len(b"data: ") :])
        except msgspec.DecodeError:
            return event
        if "choices" not in answer:
            return event
        answer |= {"id": self._progress.id, "created": self._progress.created}
        if self._is_chat:
            answer["object"] = "chat.completion.chunk"
        answer["choices"] = [self._choice(each) for each in answer["choices"]]
        if usage := answer.get("usage"):
            usage["prompt_tokens"] -= self._progress.token_count
            usage["completion_tokens"] += self._progress.token_count
        return b"data: " + msgspec.json.encode(answer)

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        text, self._held = self._held + choice["text"], ""
        ids = None if self._hides_ids else choice.get("token_ids")
        if not self._is_chat:
            return choice | {"text": text, "prompt_token_ids": None, "token_ids": ids}
        reason = choice.get("finish_reason")
        why = {} if reason is None else {"stop_reason": choice.get("stop_reason")}
        delta = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
        return delta | why | {"token_ids": ids}
