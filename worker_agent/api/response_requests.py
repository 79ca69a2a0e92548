"""Turns a request to `/v1/responses` into an equivalent chat.

    of the response                      of the chat
    ----------------------------------   ----------------------------------------------------------------------
    instructions, input, tools           messages, tools (`kv_protocol/openai/responses.py`)
    max_output_tokens                    max_completion_tokens
    reasoning.effort                     reasoning_effort
    text.format, text.verbosity          response_format, verbosity
    tool_choice of a function            the same in a chat's form
    truncation, include, top_logprobs    refused, unless they have their neutral values
    options that need a store            refused (`kv_protocol/openai/responses.py`)
    any other key                        the same

The fields of the request that the answer repeats are in `kv_response`.
Source: the OpenAI API reference, "Create a model response" and "Migrate to the Responses API".
"""

from typing import Any

import msgspec

from kv_protocol.body_limits import Bytes
from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai.decoding import check_utf8
from kv_protocol.openai.errors import ALLOWED, explained
from kv_protocol.openai.option_table import Count
from kv_protocol.openai.requests import ChatRequest, RequestInvalid, check_chat
from kv_protocol.openai.responses import STATEFUL_KEYS, chat_messages, chat_tools, check_stateless, read_input

_NOT_OF_RESPONSES = frozenset(
    {
        "add_generation_prompt", "best_of", "continue_final_message", "disaggregated_params", "documents", "functions",
        "kv_continue", "kv_response", "max_completion_tokens", "max_tokens", "messages", "modalities", "n",
        "prediction", "prompt_logprobs", "prompt_token_ids", "reasoning_effort", "response_format", "verbosity",
    }
)  # fmt: skip
"""Keys of chats that this endpoint does not have, or names differently."""
_NOTHING_INCLUDED = ("reasoning.encrypted_content",)
"""Reasoning is not encrypted here: it stands in the answer."""


class ResponseChat(ChatRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The chat of a response; `kv_response` has the fields that the answer repeats."""

    kv_response: dict[str, Any]


class _Own(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that a chat has not, or has by another name."""

    input: msgspec.Raw
    instructions: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None


_OWN_KEYS = (*_Own.__struct_fields__, *STATEFUL_KEYS)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_own = msgspec.json.Decoder(_Own)
_chat = msgspec.json.Decoder(ResponseChat)


def decode_response(body: Bytes) -> ResponseChat:
    """Return the request in `body`; raise `RequestInvalid`, which names the field, for anything else."""
    if not body.isascii():
        check_utf8(body)
    try:
        fields, own = _fields.decode(body), _own.decode(body)
    except UNDECODABLE as error:
        raise explained(error, body, _Own) from error
    for key in fields:
        if key in _NOT_OF_RESPONSES:
            raise RequestInvalid(key, key, ALLOWED)
    check_stateless(fields)
    _check(own)
    others = {key: value for key, value in fields.items() if key not in _OWN_KEYS}
    chat = msgspec.json.encode(others | _chat_of(own) | {"kv_response": _repeated(own, others)})
    try:
        request = _chat.decode(chat)
    except UNDECODABLE as error:
        raise explained(error, chat, ResponseChat) from error
    check_chat(request)
    return request


def _check(own: _Own) -> None:
    if own.truncation not in (None, "disabled"):
        raise RequestInvalid("truncation", own.truncation, "disabled")
    if own.top_logprobs:
        raise RequestInvalid("top_logprobs", own.top_logprobs, "0: a response tells no log probabilities here")
    for at, name in enumerate(own.include or ()):
        if name not in _NOTHING_INCLUDED:
            raise RequestInvalid(f"include[{at}]", name, ", ".join(_NOTHING_INCLUDED))
    for at, tool in enumerate(own.tools or ()):
        if tool.get("type") != "function":
            raise RequestInvalid(f"tools[{at}].type", tool.get("type"), "function")


def _chat_of(own: _Own) -> dict[str, Any]:
    text = own.text or {}
    chat = {
        "messages": chat_messages(own.instructions, read_input(own.input)),
        "tools": chat_tools(own.tools) if own.tools else None,
        "tool_choice": _tool_choice(own.tool_choice),
        "max_completion_tokens": own.max_output_tokens,
        "reasoning_effort": (own.reasoning or {}).get("effort"),
        "response_format": _response_format(text.get("format")),
        "verbosity": text.get("verbosity"),
    }
    return {key: value for key, value in chat.items() if value is not None}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise RequestInvalid("tool_choice.type", choice.get("type"), "function")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(text_format: object) -> dict[str, Any] | None:
    """Return the answer's format in a chat's form; None if it is text."""
    if text_format is None:
        return None
    kind = text_format.get("type") if isinstance(text_format, dict) else None
    if not isinstance(text_format, dict) or kind not in ("text", "json_object", "json_schema"):
        raise RequestInvalid("text.format.type", kind, "text, json_object, json_schema")
    if kind == "json_schema":
        return {"type": kind, kind: {key: value for key, value in text_format.items() if key != "type"}}
    return None if kind == "text" else {"type": kind}


def _repeated(own: _Own, others: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """Return the request's fields that the answer repeats. Source: the OpenAI API reference, "The response object"."""

    def other(key: str, default: object) -> object:
        value = msgspec.json.decode(others[key]) if key in others else None
        return default if value is None else value

    reasoning = own.reasoning or {}
    return {
        "instructions": own.instructions,
        "max_output_tokens": own.max_output_tokens,
        "max_tool_calls": own.max_tool_calls,
        "metadata": other("metadata", {}),
        "parallel_tool_calls": other("parallel_tool_calls", default=True),
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": False,
        "temperature": other("temperature", None),
        "text": {"format": {"type": "text"}, **(own.text or {})},
        "tool_choice": own.tool_choice or "auto",
        "tools": own.tools or [],
        "top_logprobs": 0,
        "top_p": other("top_p", None),
        "truncation": "disabled",
        "user": other("user", None),
    }
