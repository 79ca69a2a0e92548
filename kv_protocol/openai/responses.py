"""A request to `/v1/responses` as the router reads it. Nothing is stored between requests.

| key | here |
|---|---|
| `store` | false or absent |
| `previous_response_id`, `conversation`, `background`, `prompt` | refused: `input` has the whole conversation |
| `input`, `instructions`, `tools`, `reasoning.effort` | the prompt (`responses_chat.py`) |
| every other key of the interface, and engines' own | bytes, for the worker |

Source: the OpenAI API reference, "Create a model response"; engines' own keys: vLLM
`vllm/entrypoints/openai/responses/protocol.py`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from kv_protocol.openai.combinations import check_min_tokens
from kv_protocol.openai.endpoints import PATHS, ApiEndpoint
from kv_protocol.openai.errors import RequestInvalid, Verbatim
from kv_protocol.openai.inbound import UNUSED_KEYS, Inbound
from kv_protocol.openai.keys import refusing
from kv_protocol.openai.option_table import Count, Logprobs
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
NOT_OF_RESPONSES = frozenset(
    {"best_of", "disaggregated_params", "max_tokens", "n", "prompt_logprobs", "response_format"}
)
"""Keys of chats that this endpoint does not have, or names differently."""


class ResponsesInbound(Inbound, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`."""

    endpoint: ClassVar[ApiEndpoint] = "responses"
    path: ClassVar[str] = RESPONSES
    input: msgspec.Raw
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    max_tool_calls: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    truncation: msgspec.Raw = ABSENT
    include: msgspec.Raw = ABSENT
    top_logprobs: Logprobs | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    conversation: msgspec.Raw = ABSENT
    background: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens to generate."""
        return self.max_output_tokens

    @property
    def ineffective(self) -> tuple[str, ...]:
        """The paths of the keys in the request that have no effect here."""
        named = tuple(key for key in UNUSED_KEYS if key != "store" and getattr(self, key) is not None)
        return named if self.nvext is None else named + tuple(self.nvext.ineffective)

    @property
    def rendered_bytes(self) -> int:
        """The bytes of JSON that have to be read for the prompt."""
        return len(self.input) + len(self.instructions or "") + len(self.tools) + len(self.chat_template_kwargs)

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
            documents=None,
            reasoning_effort=effort,
            template_kwargs=_object.read(self.chat_template_kwargs, "chat_template_kwargs"),
            continue_final_message=None,
            add_generation_prompt=None,
        )


_input = RawPart[str | list[dict[str, Any]]](str | list[dict[str, Any]])
_objects = OptionalPart[list[dict[str, Any]]](list[dict[str, Any]])
_object = OptionalPart[dict[str, Any]](dict[str, Any])
_decoder = msgspec.json.Decoder(ResponsesInbound)
_check = refusing(NOT_OF_RESPONSES)


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


def decode_responses(body: bytes | bytearray) -> ResponsesInbound:
    """Return the request in `body`; raise `RequestInvalid` or one of `UNDECODABLE` for anything else."""
    inbound = _decoder.decode(body)
    _check(inbound)
    check_stateless({key: getattr(inbound, key) for key in STATEFUL_KEYS})
    if inbound.min_tokens is not None:
        check_min_tokens(inbound)
    return inbound
