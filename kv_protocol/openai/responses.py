"""A request to `/v1/responses` as the router reads it.

| key | here |
|---|---|
| `input`, `instructions`, `tools`, `reasoning.effort` | the prompt (`responses_chat.py`) |
| `previous_response_id`, `conversation`, `prompt` | the prompt is known to the engine only (`changed_by`) |
| every other key of the interface, and engines' own | bytes, for the worker |

Source: the OpenAI API reference, "Create a model response"; engines' own keys: vLLM
`vllm/entrypoints/openai/responses/protocol.py`. An agent stores nothing between requests: `check_stateless`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from kv_protocol.openai.endpoints import PATHS
from kv_protocol.openai.errors import RequestInvalid, Verbatim
from kv_protocol.openai.inbound import Inbound
from kv_protocol.openai.option_table import Count
from kv_protocol.openai.options import template_options
from kv_protocol.openai.parts import ABSENT, OptionalPart, RawPart
from kv_protocol.openai.responses_chat import chat_messages, chat_tools

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
        """The key with which an engine makes another prompt than the router would; empty: there is none."""
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
        tools = chat_tools(_objects.read(self.tools, "tools") or [])
        reasoning = _object.read(self.reasoning, "reasoning") or {}
        effort = reasoning.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise RequestInvalid("reasoning.effort", effort, "a string")
        return template_options(
            tools=tools or None,
            reasoning_effort=effort,
            template_kwargs=_object.read(self.chat_template_kwargs, "chat_template_kwargs"),
        )


_input = RawPart[str | list[dict[str, Any]]](str | list[dict[str, Any]])
_objects = OptionalPart[list[dict[str, Any]]](list[dict[str, Any]])
_object = OptionalPart[dict[str, Any]](dict[str, Any])


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
