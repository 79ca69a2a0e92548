r"""Renders answers of the OpenAI HTTP interface: unstreamed ones, chunks of a stream, usage.

    a choice of          has, besides `index`, `logprobs`, `finish_reason`
    chat, unstreamed     message {role, content, refusal}
    chat, chunk          delta
    completion           text
    a prefill worker     disaggregated_params, in the chunk with the finish reason; the answer, or that chunk, also has
                         prompt_token_ids if the engine computed another prompt than the request's

If the worker has parsers, their events become

    delta      {content, reasoning_content, tool_calls: [{index, id, type, function: {name, arguments}}]}: only keys
               with a value. Only a call's first delta has `id`, `type` and `name`
    message    {role, content, refusal, reasoning_content, tool_calls: [{id, type, function: {name, arguments}}]}: the
               last two only with a value; empty content beside them is null

`reasoning_content` is TensorRT-LLM's and SGLang's name; vLLM had it too, and now has `reasoning`.

Log probabilities:

    chat         {content: [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}, ..]}, ..], refusal}
    completion   {tokens, token_logprobs, top_logprobs: [{token: logprob}, ..], text_offset}; offsets are characters
                 from the beginning of the choice's text; the chosen token is always among the top
    prompt       [null, {"token id": {logprob, rank, decoded_token}}, ..], an entry for each of the prompt's tokens

    no log probabilities of a token   chat: logprob -9999 and no top; completion, prompt: null
    a logprob below -9999, or NaN     -9999
    a token with broken characters    token: U+FFFD for the broken part, and its bytes; completion: `bytes:\xe2\x80`

Each entry is encoded as JSON by itself (`msgspec.Raw`): the objects of one entry are freed before the next is built,
and a thread that renders a long answer lets other threads run between entries.

A stream of n choices opens with the role of each, and closes each with its reason; all carry their index. An answer
that another worker began keeps its id, and does not open again.
Source: the OpenAI interface (chat completion object: -9999.0 "signifies that the token is very unlikely");
`disaggregated_params`, `prompt_token_ids`: NVIDIA/TensorRT-LLM,
`tensorrt_llm/serve/openai_protocol.py`; `prompt_logprobs`: vLLM's interface; `reasoning`: vllm-project/vllm,
`docs/features/reasoning_outputs.md`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from kv_protocol.openai.requests import ChatRequest, Request
from worker_agent.api.choice_text import Piece, TokenSpan
from worker_agent.api.parsers.calls import ContentDelta, Event, ReasoningDelta, ToolCallStarted
from worker_agent.port.handoff import handoff_keys, without_media
from worker_agent.port.sampling import UNLIKELY, TokenLogprob, TokenLogprobs, bounded_logprob

TokenBytes = Callable[[int], bytes | None]
"""Returns the bytes of a token; None if unknown."""
_DONE = b"data: [DONE]\n\n"


class CompletionAnswer:
    """Renders the answer to a request of one or more prompts.

    `created` is in seconds since 1970; `token_bytes` is as in `kv_runtime.text.Text`.
    """

    def __init__(
        self, request: Request, request_id: str, created: int, token_bytes: TokenBytes, prompts: int = 1
    ) -> None:
        self._is_chat, self._choices = isinstance(request, ChatRequest), (request.n or 1) * prompts
        self._token_bytes = token_bytes
        before = request.kv_continue
        self._goes_on = before is not None
        self.can_go_on = self._choices == 1
        """Whether another worker can resume its stream."""
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request_id}" if before is None else before.id
        self._head = {"id": self.id, "created": created if before is None else before.created, "model": request.model}

    def opening(self) -> bytes:
        """Return the stream's first events: each choice's role in a chat; empty for others and resumed ones."""
        if not self._is_chat or self._goes_on:
            return b""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(Piece(choice=choice), role) for choice in range(self._choices))

    def events(self, piece: Piece, *, always: bool = False) -> bytes:
        """Return the stream's events of a piece: one if it has text or tokens, and one if it has a finish reason.

        With `always` there is a first event in any case.
        """
        delta = b""
        if always or piece.events or piece.spans:
            part = replace(piece, finish_reason=None, handoff=None, prompt=())
            delta = self._chunk(part, _delta_of(piece.events) if self._is_chat else piece.content)
        if piece.finish_reason is None:
            return delta
        return delta + self._chunk(replace(piece, spans=()), {} if self._is_chat else "")

    def ending(self, usage: dict[str, Any], *, include_usage: bool) -> bytes:
        """Return the stream's end; with `include_usage` an event with the usage and no choice comes before it."""
        if not include_usage:
            return _DONE
        return _sse({**self._head, "object": self._object(chunk=True), "choices": [], "usage": usage}) + _DONE

    def failed(self, _message: str, error: bytes) -> bytes:
        """Return the last event of a stream that the engine fails: the OpenAI error body `error`."""
        return b"data: %b\n\n" % error

    def full_body(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> bytes:
        """Return the body of an unstreamed answer, with a piece for each choice."""
        choices = [self._full_choice(piece) for piece in pieces]
        body = {**self._head, "object": self._object(chunk=False), "choices": choices, "usage": usage}
        if (told := pieces[0].prompt_logprobs) is not None:
            logprobs = prompt_logprobs(told, self._token_bytes)
            for each in [body] if self._is_chat else choices:
                each["prompt_logprobs"] = logprobs
        return msgspec.json.encode(body | _prompt_part(pieces[0]))

    def _full_choice(self, piece: Piece) -> dict[str, Any]:
        if not self._is_chat:
            return self._choice(piece, {"text": piece.content})
        return self._choice(piece, {"message": _message_of(piece.events)})

    def _chunk(self, piece: Piece, content: dict[str, Any] | str) -> bytes:
        part = {"delta": content} if self._is_chat else {"text": content}
        body = {**self._head, "object": self._object(chunk=True), "choices": [self._choice(piece, part)]}
        return _sse(body | _prompt_part(piece))

    def _choice(self, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        shape = chat_logprobs if self._is_chat else completion_logprobs
        logprobs = shape(piece.spans, self._token_bytes) if piece.spans else None
        choice = {"index": piece.choice, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        if piece.handoff is None:
            return choice
        return choice | {"disaggregated_params": handoff_keys(without_media(piece.handoff))}

    def _object(self, *, chunk: bool) -> str:
        if not self._is_chat:
            return "text_completion"
        return "chat.completion.chunk" if chunk else "chat.completion"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the usage of a request, with the number of reused prompt tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _delta_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return a chunk's delta; without events it has an empty content."""
    content, reasoning = _texts(events)
    calls = [{"index": index, **call} for index, call in _calls(events).items()]
    parts = {"content": content, "reasoning_content": reasoning, "tool_calls": calls}
    return {name: part for name, part in parts.items() if part} or {"content": ""}


def _message_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return an unstreamed answer's message."""
    content, reasoning = _texts(events)
    parts = {"reasoning_content": reasoning, "tool_calls": list(_calls(events).values())}
    others = {name: part for name, part in parts.items() if part}
    return {"role": "assistant", "content": content or (None if others else ""), "refusal": None, **others}


def _texts(events: Sequence[Event]) -> tuple[str, str]:
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    return content, "".join(event.text for event in events if isinstance(event, ReasoningDelta))


def _calls(events: Sequence[Event]) -> dict[int, dict[str, Any]]:
    """Return the delta of each call, by its index."""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, ToolCallStarted):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {"id": event.id, "type": "function", "function": function}
        elif not isinstance(event, ContentDelta | ReasoningDelta):
            call = calls.setdefault(event.index, {"function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
    return calls


def _prompt_part(piece: Piece) -> dict[str, Any]:
    return {"prompt_token_ids": piece.prompt} if piece.prompt else {}


def _sse(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# ---------------------------------------------------------------- log probabilities
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


def prompt_logprobs(logprobs: Sequence[TokenLogprobs | None], token_bytes: TokenBytes) -> list[msgspec.Raw | None]:
    """Return an entry for each token of the prompt; None for the first, which has no context."""
    return [
        None if token is None or not at else _encoded(_prompt_entry(token, token_bytes))
        for at, token in enumerate(logprobs)
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
