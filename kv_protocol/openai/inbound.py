"""A client's request as the router reads it: the keys that it routes by, and those that matter when it answers.

    key                                            read as
    what routing reads                             a value; the worker refuses one of the wrong type
    nvext                                          `NvExt`; a wrong type of a key that the router reads is refused
    extra_args                                     `Targets`, as clients of NVIDIA Dynamo's global router state them
    messages, prompt, tools, and other inputs of
    the chat template                              bytes, which are decoded only if the prompt must be encoded
    what changes a prompt in an engine             bytes: the prompt then is not rendered here (`changed_by`)
    any other key                                  not read: the worker gets the client's bytes

In a mode that reads no overlap the messages are not decoded. Source of `extra_args`:
ai-dynamo/dynamo, page "Custom Request Arguments (extra_args)", milliseconds; newer versions have `nvext.router` for it.
"""

import re
from typing import Annotated, Any, ClassVar

import msgspec

from kv_protocol.body_limits import Bytes
from kv_protocol.openai.endpoints import PATHS
from kv_protocol.openai.errors import RequestInvalid
from kv_protocol.openai.option_table import (
    NO_NVEXT,
    NO_TARGETS,
    Common,
    Count,
    NvExt,
    Targets,
    marks_of,
    template_options,
)
from kv_protocol.openai.parts import ABSENT, OptionalPart, is_given, is_list_of_prompts, read_messages, read_prompts

CHAT, COMPLETIONS, EMBEDDINGS = PATHS["chat"], PATHS["completions"], PATHS["embeddings"]
_TEXT_FORMAT = b'{"type":"text"}'
_MODEL_OF_FORM = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')
_FORM_BYTES = 64 << 10
"""`model` is searched for in this many bytes of the form's beginning, then of its end: a file may lie between."""

_GUIDE, _SHAPE, _CHANGE = "guide", "shape", "change"
_Guide = Annotated[msgspec.Raw, _GUIDE]
"""A key that makes the response follow a grammar."""
_Shape = Annotated[msgspec.Raw, _SHAPE]
"""A key that shapes an answer so that it cannot be continued."""
_Change = Annotated[msgspec.Raw, _CHANGE]
"""A key that makes an engine's prompt differ from the router's."""


class Inbound(Common, frozen=True, kw_only=True):
    """A request of any endpoint. Keys that are absent, null or of a wrong type are None; absent bytes are `ABSENT`."""

    model: str
    extra_args: Targets | None = None
    kv_prompt_ids: None = None
    kv_continue: None = None
    disaggregated_params: msgspec.Raw = ABSENT
    n: Count | None = None
    guided_json: _Guide = ABSENT
    guided_regex: _Guide = ABSENT
    guided_choice: _Guide = ABSENT
    guided_grammar: _Guide = ABSENT
    structured_outputs: _Guide = ABSENT
    structural_tag: _Guide = ABSENT
    regex: _Guide = ABSENT
    ebnf: _Guide = ABSENT
    response_format: _Guide = ABSENT
    best_of: _Shape = ABSENT
    detokenize: msgspec.Raw = ABSENT
    echo: _Shape = ABSENT
    include_stop_str_in_output: msgspec.Raw = ABSENT
    logits_processors: _Shape = ABSENT
    logprobs: _Shape = ABSENT
    prompt_logprobs: _Shape = ABSENT
    return_tokens_as_token_ids: _Shape = ABSENT
    suffix: _Shape = ABSENT
    thinking_token_budget: _Shape = ABSENT
    use_beam_search: _Shape = ABSENT
    chat_template: _Change = ABSENT
    lora_path: _Change = ABSENT
    media_io_kwargs: _Change = ABSENT
    mm_processor_kwargs: _Change = ABSENT
    prompt_embeds: _Change = ABSENT
    truncate_prompt_tokens: _Change = ABSENT

    endpoint: ClassVar[str] = "completions"
    """The endpoint of the request, and its path."""
    path: ClassVar[str] = COMPLETIONS

    @property
    def extension(self) -> NvExt:
        """`nvext`; an empty one if there is none."""
        return self.nvext or NO_NVEXT

    @property
    def targets(self) -> Targets:
        """The latency targets of `nvext.router`; without it, of `extra_args`."""
        return self.extension.router or self.extra_args or NO_TARGETS

    @property
    def has_one_choice(self) -> bool:
        """Whether the answer is of one prompt and has one choice."""
        return self.n is None or self.n == 1

    @property
    def names_phase(self) -> bool:
        """Whether the client runs the phases of prefill and decode itself."""
        return is_given(self.disaggregated_params)

    @property
    def is_guided(self) -> bool:
        """Whether the response has to follow a grammar: another worker cannot resume it."""
        guides = [bytes(getattr(self, key)) for key in filter(self._gives, _GUIDES)]
        return any(guide.translate(None, b" \t\r\n") != _TEXT_FORMAT for guide in guides)

    @property
    def changed_by(self) -> str:
        """The key that makes an engine's prompt differ from the router's; empty: no key does.

        Source: vllm-project/vllm, `vllm/entrypoints/openai/chat_completion/protocol.py` and `completion/protocol.py`
        (`chat_template`, `mm_processor_kwargs`, `media_io_kwargs`, `truncate_prompt_tokens`, `prompt_embeds`);
        sgl-project/sglang, `python/sglang/srt/entrypoints/openai/protocol.py` (`lora_path`).
        """
        return next(filter(self._gives, _CHANGING), "")

    def _gives(self, key: str) -> bool:
        option = getattr(self, key)
        return option is not ABSENT and is_given(option)  # most requests have none of these keys

    @property
    def ineffective(self) -> tuple[str, ...]:
        """The paths of the keys of `nvext` that have no effect here."""
        return () if self.nvext is None else tuple(self.nvext.ineffective)

    @property
    def prompt_parts(self) -> tuple[msgspec.Raw, ...]:
        """The JSON of what becomes the prompt, in its order."""
        return ()

    def token_data(self) -> bytes | None:
        """Return the token ids in `nvext` as little-endian u32s; None: there are none; raise `RequestInvalid`."""
        return self.nvext.prompt_ids() if self.nvext else None

    def read_messages(self) -> list[dict[str, Any]]:
        """Return the chat's messages; raise `RequestInvalid`, which names the place."""
        raise RequestInvalid("messages", self.endpoint, "the endpoint of a chat")

    def read_options(self) -> dict[str, Any]:
        """Return the options for rendering a chat; raise `RequestInvalid`, which names the place."""
        return {}


class ChatInbound(Inbound, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    endpoint: ClassVar[str] = "chat"
    path: ClassVar[str] = CHAT
    messages: msgspec.Raw = ABSENT
    max_completion_tokens: Count | None = None
    tools: msgspec.Raw = ABSENT
    reasoning_effort: str | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prompt_token_ids: msgspec.Raw = ABSENT

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens to generate, by either of its names."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def changed_by(self) -> str:
        """The key that makes an engine's prompt differ from the router's; empty: no key does."""
        return "add_special_tokens" if self.add_special_tokens else super().changed_by

    @property
    def names_phase(self) -> bool:
        """Whether the client runs the phases of prefill and decode itself."""
        return is_given(self.disaggregated_params) or is_given(self.prompt_token_ids)

    @property
    def prompt_parts(self) -> tuple[msgspec.Raw, ...]:
        """The JSON of what becomes the prompt, in its order."""
        return self.tools, self.documents, self.messages

    def read_messages(self) -> list[dict[str, Any]]:
        """Return the messages; raise `RequestInvalid`, which names the place."""
        return read_messages(self.messages)

    def read_options(self) -> dict[str, Any]:
        """Return the options for rendering the chat; raise `RequestInvalid`, which names the place."""
        return template_options(
            tools=json_objects.read(self.tools, "tools"),
            documents=json_objects.read(self.documents, "documents"),
            reasoning_effort=self.reasoning_effort,
            template_kwargs=json_object.read(self.chat_template_kwargs, "chat_template_kwargs"),
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
        )


class CompletionInbound(Inbound, frozen=True, kw_only=True):
    """`POST /v1/completions`. `prompt` is a text, its token ids, or several of either (`parts.py`)."""

    prompt: msgspec.Raw = ABSENT

    @property
    def has_one_choice(self) -> bool:
        """Whether the answer is of one prompt and has one choice; False for each list of prompts."""
        return super().has_one_choice and not is_list_of_prompts(self.prompt)

    @property
    def prompt_parts(self) -> tuple[msgspec.Raw, ...]:
        """The JSON of what becomes the prompt."""
        return (self.prompt,)

    def read_prompts(self) -> list[str | bytes]:
        """Return each prompt: a text, or ids as little-endian u32s; raise `RequestInvalid`, which names the place."""
        return read_prompts(self.prompt)


class EmbeddingsInbound(Inbound, frozen=True, kw_only=True):
    """`POST /v1/embeddings`. The worker checks `input`, which is not hashed: an embedding reuses no KV prefix."""

    endpoint: ClassVar[str] = "embeddings"
    path: ClassVar[str] = EMBEDDINGS
    input: msgspec.Raw = ABSENT


class PassedInbound(Inbound, frozen=True, kw_only=True):
    """A request to another path of an engine: it is passed on as it is.

    `endpoint` is the path as workers state it; `path` is the path with the query. The model is the body's key `model`,
    or a form's field (audio); any other body has none, and the router takes the only model of the workers with that
    path. Source: the Anthropic API reference, "Messages"; the OpenAI API reference, "Create transcription".
    """

    model: str | None = None  # type: ignore[assignment]  # None as it is read; `decode_passed` returns a text
    endpoint: str = ""  # type: ignore[misc]  # other kinds have one for all their requests
    path: str = ""  # type: ignore[misc]
    system: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT

    @property
    def changed_by(self) -> str:
        """Always the key of the prompt: the router does not render it."""
        return "messages"

    @property
    def prompt_parts(self) -> tuple[msgspec.Raw, ...]:
        """The JSON of what becomes the prompt, in its order."""
        return self.tools, self.system, self.messages


def passed_form(path: str, body: Bytes) -> PassedInbound:
    """Return the request to `path`; its body is a form, or empty."""
    for part in (body[:_FORM_BYTES], body[-_FORM_BYTES:]):
        if found := _MODEL_OF_FORM.search(part):
            return PassedInbound(model=found[1].decode("utf-8", "replace"), endpoint=path, path=path)
    return PassedInbound(model="", endpoint=path, path=path)


_GUIDES, SHAPING_KEYS, _CHANGING = (
    tuple(name for name, marks in marks_of(Inbound).items() if mark in marks) for mark in (_GUIDE, _SHAPE, _CHANGE)
)
CHANGING_KEYS = (*_CHANGING, "add_special_tokens")
"""The keys that `changed_by` may name."""

UNCOMMON_KEYS = (
    "nvext", "extra_args", "priority", "cache_salt", "n", "disaggregated_params", "prompt_token_ids", *CHANGING_KEYS,
    "tools", "documents", "reasoning_effort", "chat_template_kwargs", "continue_final_message",
    "add_generation_prompt", *_GUIDES,
)  # fmt: skip
"""A chat or completion without them states no wishes to the router: `token_data`, `salt`, `changed_by`, `read_options`,
`names_phase` and `ineffective` are empty, `targets` and `is_guided` too, and a chat `has_one_choice`."""
json_objects = OptionalPart[list[dict[str, Any]]](list[dict[str, Any]])
json_object = OptionalPart[dict[str, Any]](dict[str, Any])
