"""A client's request as the router reads it: keys for routing are typed, all others stay bytes.

    key                                            read as
    options                                        `Options`: types and ranges are checked
    nvext                                          `NvExt`
    messages, prompt, tools, and other inputs of
    the chat template                              bytes, which are decoded only if the prompt must be encoded
    any other key                                  refused by its path

One pass over the body; a mode that reads no overlap decodes nothing of the messages.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, ClassVar

import msgspec

from kv_protocol.openai.endpoints import PATHS, ApiEndpoint
from kv_protocol.openai.option_table import (
    Count,
    Effort,
    JsonObject,
    Logprobs,
    Modalities,
    Options,
    TextFormat,
    ToolChoice,
    Verbosity,
)
from kv_protocol.openai.options import NO_NVEXT, NvExt, template_options
from kv_protocol.openai.parts import ABSENT, OptionalPart, RawPart
from kv_protocol.openai.prompts import read_prompt

CHAT, COMPLETIONS = PATHS["chat"], PATHS["completions"]
UNUSED_KEYS = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
"""Keys of the interface that have no effect here, in the order of their names."""


class Inbound(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request of either endpoint."""

    model: str
    nvext: NvExt | None = None
    kv_prompt_ids: None = None
    kv_continue: None = None
    disaggregated_params: msgspec.Raw = ABSENT

    endpoint: ClassVar[ApiEndpoint] = "completions"
    """The endpoint of the request, and its path."""
    path: ClassVar[str] = COMPLETIONS

    @property
    def extension(self) -> NvExt:
        """`nvext`; an empty one if there is none."""
        return self.nvext or NO_NVEXT

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens to generate; None: the worker decides."""
        return self.max_tokens

    @property
    def salt(self) -> str:
        """The cache salt, which isolates its cached blocks; empty: none."""
        return self.cache_salt or (self.nvext and self.nvext.cache_salt) or ""

    @property
    def is_guided(self) -> bool:
        """Whether the response has to follow a grammar: another worker cannot resume it."""
        return _guides(self) != _NO_GUIDES and any(
            guide is not None and not isinstance(guide, TextFormat) for guide in _guides(self)
        )

    @property
    def ineffective(self) -> tuple[str, ...]:
        """The paths of the keys in the request that have no effect here."""
        read, absent = _UNUSED[type(self)]
        named = () if read(self) == absent else _given(self)
        return named if self.nvext is None else named + tuple(self.nvext.ineffective)

    def token_data(self) -> bytes | None:
        """Return the token ids in `nvext` as little-endian u32s; None: there are none; raise `RequestInvalid`."""
        return self.nvext.prompt_ids() if self.nvext else None


class ChatInbound(Inbound, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    endpoint: ClassVar[ApiEndpoint] = "chat"
    path: ClassVar[str] = CHAT
    messages: msgspec.Raw
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    modalities: Modalities | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    thinking: JsonObject | bool | None = None
    prediction: JsonObject | None = None
    prompt_cache_key: str | None = None
    prompt_token_ids: msgspec.Raw = ABSENT

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens to generate, by either of its names."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def rendered_bytes(self) -> int:
        """The bytes of JSON that have to be read for the prompt."""
        return len(self.messages) + len(self.tools) + len(self.documents) + len(self.chat_template_kwargs)

    def read_messages(self) -> list[dict[str, Any]]:
        """Return the messages; raise `RequestInvalid`, which names the place."""
        return _messages.read(self.messages, "messages")

    def read_options(self) -> dict[str, Any]:
        """Return the options for rendering the chat; raise `RequestInvalid`, which names the place."""
        if _rendering(self) == _PLAIN:
            return {}
        return template_options(
            tools=_objects.read(self.tools, "tools"),
            documents=_objects.read(self.documents, "documents"),
            reasoning_effort=self.reasoning_effort,
            template_kwargs=_kwargs.read(self.chat_template_kwargs, "chat_template_kwargs"),
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
        )


class CompletionInbound(Inbound, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`. `prompt` is a text or its token ids (`prompts.py`)."""

    prompt: msgspec.Raw
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Logprobs | None = None

    def read_prompt(self) -> str | bytes:
        """Return the text, or its ids as little-endian u32s; raise `RequestInvalid`, which names the place."""
        return read_prompt(self.prompt)


_GUIDES = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag",
    "response_format",
)  # fmt: skip
_guides = attrgetter(*_GUIDES)
_NO_GUIDES = (None,) * len(_GUIDES)


def _given(inbound: Inbound) -> tuple[str, ...]:
    return tuple(key for key in UNUSED_KEYS if getattr(inbound, key, None) is not None)


_rendering = attrgetter(
    "tools", "documents", "reasoning_effort", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"
)
_PLAIN = (ABSENT, ABSENT, None, ABSENT, None, None)
"""What `_rendering` returns for a chat without any of them."""
_messages = RawPart[list[dict[str, Any]]](Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)])
_objects = OptionalPart[list[dict[str, Any]]](list[dict[str, Any]])
_kwargs = OptionalPart[dict[str, Any]](dict[str, Any])


def _unused(kind: type[Inbound]) -> tuple[Callable[[Inbound], object], object]:
    """Return a getter of all unused keys of a body, and its result if there is none of them."""
    keys = [key for key in UNUSED_KEYS if key in kind.__struct_fields__]
    return attrgetter(*keys), (None,) * len(keys)


_UNUSED: dict[type[Inbound], tuple[Callable[[Inbound], object], object]] = {
    kind: _unused(kind) for kind in (ChatInbound, CompletionInbound)
}
