"""A request to `/v1/responses` as the router reads it.

| key | here |
|---|---|
| `input`, `instructions`, `tools`, `reasoning.effort` | the prompt, as a chat (below) |
| `previous_response_id`, `conversation`, `prompt` | the prompt is known to the engine only (`changed_by`) |
| every other key of the interface, and engines' own | bytes, for the worker |

Source: the OpenAI API reference, "Create a model response"; engines' own keys: vLLM
`vllm/entrypoints/openai/responses/protocol.py`. An agent stores nothing between requests: `check_stateless`.

    item                     message of the chat, as engines make it
    ---------------------    ------------------------------------------------------------------------------
    `instructions`           a system message, before all others
    `input` as a text        a user message
    message                  its role and content; text parts stay parts, an assistant's are joined
    reasoning                `reasoning` of an assistant's message; without readable text nothing
    function_call            a call in `tool_calls` of an assistant's message
    function_call_output     a tool's message

Consecutive reasoning, text and calls of an assistant are one message. Tools that are no functions are left out, but
`custom` and `namespace` are refused: some engines render them, each in its own way. Source: vLLM
`vllm/entrypoints/openai/responses/utils.py` (`construct_input_messages`, `construct_tool_dicts`); SGLang
`python/sglang/srt/entrypoints/openai/serving_responses.py` and TensorRT-LLM `tensorrt_llm/serve/responses_utils.py`
(`_create_input_messages`) agree on instructions, text and tools' outputs. For tools: vLLM's `flat_namespace_tool_name`,
SGLang's `custom_tool_description` (`responses_adapters.py` there).
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from kv_protocol.openai.endpoints import PATHS
from kv_protocol.openai.errors import RequestInvalid, Verbatim
from kv_protocol.openai.inbound import Inbound, json_object, json_objects
from kv_protocol.openai.option_table import Count, template_options
from kv_protocol.openai.parts import ABSENT, RawPart

RESPONSES = PATHS["responses"]
_STATEFUL: Mapping[str, str] = {
    "previous_response_id": "none: nothing is stored, `input` has the whole conversation",
    "conversation": "none: nothing is stored, `input` has the whole conversation",
    "background": "false: an answer is given to the request itself, and nothing is stored",
    "store": "false: nothing is stored",
    "prompt": "none: no prompt templates are stored, `input` has the prompt",
}
STATEFUL_KEYS = tuple(_STATEFUL)
_NOTHING = (b"", b"null", b"false")

Message = dict[str, Any]
Item = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_RENDERED_DIFFERENTLY = ("custom", "namespace")
_input = RawPart[str | list[Item]](str | list[Item])


def chat_messages(instructions: str | None, given: str | list[Item]) -> list[Message]:
    """Return the chat of `instructions` and `input`; raise `RequestInvalid`, which names the place."""
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise RequestInvalid("input", [], "a text, or at least one item")
    for at, item in enumerate(given):
        where, kind = f"input[{at}]", item.get("type", "message")
        add = _KINDS.get(kind) if isinstance(kind, str) else None
        if add is None:
            raise RequestInvalid(f"{where}.type", kind, ", ".join(_KINDS))
        add(where, item, messages)
    for message in messages:
        message.setdefault("content", None if "tool_calls" in message else "")
    return messages


def chat_tools(tools: list[Item]) -> list[dict[str, Any]]:
    """Return the functions among the tools as a chat has them; raise `RequestInvalid`, which names the place."""
    for at, tool in enumerate(tools):
        if tool.get("type") in _RENDERED_DIFFERENTLY:
            raise RequestInvalid(f"tools[{at}].type", tool["type"], "a function, or a tool that no engine renders")
    functions = [tool for tool in tools if tool.get("type") == "function"]
    return [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in functions]


def _message(where: str, item: Item, messages: list[Message]) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestInvalid(f"{where}.role", role, ", ".join(_ROLES))
    content = _content(f"{where}.content", item.get("content"))
    if role != "assistant":
        messages.append({"role": role, "content": content})
        return
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    _of_assistant(messages, "content")["content"] = text


def _reasoning(where: str, item: Item, messages: list[Message]) -> None:
    texts = item.get("content") or item.get("summary") or []
    if not isinstance(texts, list) or not all(isinstance(each, dict) for each in texts):
        raise RequestInvalid(f"{where}.content", texts, "a list of parts with text")
    text = "".join(_text(f"{where}.content", each.get("text")) for each in texts)
    if text:
        message = _of_assistant(messages, "reasoning")
        message["reasoning"] = message["reasoning_content"] = text


def _call(where: str, item: Item, messages: list[Message]) -> None:
    names = ("call_id", "name", "arguments")
    call_id, name, arguments = (_text(f"{where}.{key}", item.get(key)) for key in names)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _of_assistant(messages, "").setdefault("tool_calls", []).append(call)


def _output(where: str, item: Item, messages: list[Message]) -> None:
    call_id, output = _text(f"{where}.call_id", item.get("call_id")), item.get("output")
    messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(f"{where}.output", output)})


_KINDS: dict[str, Callable[[str, Item, list[Message]], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def _of_assistant(messages: list[Message], key: str) -> Message:
    """Return the last message if it is an assistant's without `key`; else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or key in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(where: str, content: object) -> str | list[dict[str, Any]]:
    if isinstance(content, list):
        return [_part(f"{where}[{at}]", part) for at, part in enumerate(content)]
    return _text(where, content)


def _part(where: str, part: object) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in _TEXTS:
        return {"type": "text", "text": _text(f"{where}.text", part.get("text"))}
    if isinstance(part, dict) and kind == "input_image":
        return {"type": "image_url", "image_url": {"url": _text(f"{where}.image_url", part.get("image_url"))}}
    raise RequestInvalid(f"{where}.type", kind, ", ".join((*_TEXTS, "input_image")))


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestInvalid(where, value, "a string")
    return value


class ResponsesInbound(Inbound, frozen=True, kw_only=True):
    """`POST /v1/responses`."""

    endpoint: ClassVar[str] = "responses"
    path: ClassVar[str] = RESPONSES
    input: msgspec.Raw = ABSENT
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    conversation: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens to generate."""
        return self.max_output_tokens

    @property
    def changed_by(self) -> str:
        """The key that makes an engine's prompt differ from the router's; empty: no key does."""
        stored = ("previous_response_id", "conversation", "prompt")
        return next(filter(self._gives, stored), "") or super().changed_by

    @property
    def prompt_parts(self) -> tuple[msgspec.Raw, ...]:
        """The JSON of what becomes the prompt, in its order."""
        return msgspec.Raw(msgspec.json.encode(self.instructions)), self.tools, self.input

    def read_messages(self) -> list[dict[str, Any]]:
        """Return the request as a chat; raise `RequestInvalid`, which names the place."""
        return chat_messages(self.instructions, read_input(self.input))

    def read_options(self) -> dict[str, Any]:
        """Return the options for rendering the chat; raise `RequestInvalid`, which names the place."""
        tools = chat_tools(json_objects.read(self.tools, "tools") or [])
        reasoning = json_object.read(self.reasoning, "reasoning") or {}
        effort = reasoning.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise RequestInvalid("reasoning.effort", effort, "a string")
        return template_options(
            tools=tools or None,
            reasoning_effort=effort,
            template_kwargs=json_object.read(self.chat_template_kwargs, "chat_template_kwargs"),
        )


def read_input(given: msgspec.Raw) -> str | list[dict[str, Any]]:
    """Return `input`: a text, or items; raise `RequestInvalid`, which names the place."""
    return _input.read(given, "input")


def check_stateless(fields: Mapping[str, object]) -> None:
    """Check that no key of a body needs state stored between requests; raise `RequestInvalid` otherwise."""
    for key, allowed in _STATEFUL.items():
        given = fields.get(key)
        value = bytes(given) if isinstance(given, msgspec.Raw) else msgspec.json.encode(given)
        if value not in _NOTHING:
            raise RequestInvalid(key, Verbatim(value.decode("utf-8", "replace")), allowed)
