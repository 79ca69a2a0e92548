"""The options of chats and completions (OpenAI): types and ranges, the same for routers and worker agents.

An option that is absent, or null, is None. A router reads the options in `Common`, and forwards the body unchanged;
the worker refuses what its engine does not support.

Sources: the OpenAI API reference (chat and legacy completions); for extensions NVIDIA/TensorRT-LLM,
`tensorrt_llm/serve/openai_protocol.py` (`ResponseFormat`, `EarlyStopping`, `_LOGIT_BIAS_MAX`); vllm-project/vllm,
`vllm/sampling_params.py` (`SamplingParams`, `StructuredOutputsParams`, -1 of `top_k`, `prompt_logprobs` and
`thinking_token_budget`); sgl-project/sglang, `python/sglang/srt/sampling/sampling_params.py` (`verify`). If engines
differ, the wider range is used.

Marks at an option's field say what is done with it (`marks_of` reads them):

    PASSED             an agent with an engine in its process passes the option on, under its name
    Unsupported        no such engine has the option: the agent refuses all values but `neutral`, which has no effect
    NO_EFFECT          the agent accepts every value: with it or without it, the answer follows the other options
    KEPT               a stream that resumes on another attached engine keeps the option
    LEFT_OUT           that stream does not need it: the prompt's ids contain its effect, the router sets it anew, or
                       it does not change the answer's text
    no KEPT, LEFT_OUT  a stream with this option does not resume, unless the option is null or false

`nvext` is the extension of NVIDIA Dynamo's clients; `NvExt.ineffective` names those of its keys that have no effect
here. Source: `docs/SOURCES.md` D7.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from kv_protocol.ids import TokenId
from kv_protocol.openai.parts import ABSENT, is_given, read_ids

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]
I64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
CACHE_SALT_CHARACTERS_MAX = 1024
"""At most 4096 bytes of UTF-8: less than the 65,536 bytes that an agent accepts in an engine's event."""
CacheSalt = Annotated[str, msgspec.Meta(max_length=CACHE_SALT_CHARACTERS_MAX)]
LOGPROBS_MAX = 20
"""How many likeliest tokens of each position a request may ask for. Source: `top_logprobs` of the OpenAI API."""

JsonObject = dict[str, Any]
Name = Annotated[str, msgspec.Meta(min_length=1)]
TokenLimit = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Logprobs = Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)]
StopStrings = Annotated[list[str], msgspec.Meta(max_length=128)]
"""Few, because each is searched for in every piece of the answer."""
StopTokens = Annotated[list[TokenId], msgspec.Meta(max_length=128)]
Priority = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
Factor = Annotated[float, msgspec.Meta(gt=0)]
ThinkingBudget = Annotated[int, msgspec.Meta(ge=-1, le=1 << 24)]
BiasedToken = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,10}\Z")]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Biases = Annotated[dict[BiasedToken, Bias], msgspec.Meta(max_length=1024)]
BadWords = Annotated[list[Name], msgspec.Meta(max_length=128)]
GuidedChoices = Annotated[list[str], msgspec.Meta(min_length=1, max_length=1024)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=4095)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3.6e6)]
_MS_PER_S = 1000

PASSED, NO_EFFECT, KEPT, LEFT_OUT = "passed", "no effect", "kept", "left out"


class Unsupported(NamedTuple):
    """The mark of an option that no engine in an agent's process has. `neutral` None: no value is accepted."""

    neutral: object = None


def marks_of(*kinds: type[msgspec.Struct]) -> dict[str, tuple[object, ...]]:
    """Return the marks of each option of these kinds of requests."""
    hints = [hint for kind in kinds for hint in get_type_hints(kind, include_extras=True).items()]
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints}


class Wishes(msgspec.Struct, frozen=True):
    """The keys of `stream_options` that the router reads."""

    include_usage: bool | None = None


class StreamOptions(Wishes, frozen=True, forbid_unknown_fields=True):
    """All keys of `stream_options`."""

    include_obfuscation: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Unsupported(neutral=False)] = None


# ---------------------------------------------------------------- guides


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of `response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    schema: JsonObject
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The value of `response_format`: a type, and the keys of all types. Agents check which of them are the type's.

    `json`, `regex` and `ebnf` are TensorRT-LLM's. `structural_tag` has `format` (TensorRT-LLM, vLLM), or `structures`
    and `triggers` (older vLLM).
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex", "ebnf", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema: JsonObject | None = None
    regex: str | None = None
    ebnf: str | None = None
    format: JsonObject | None = None
    structures: list[JsonObject] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of vLLM's `structured_outputs`."""

    json: JsonObject | str | None = None
    regex: str | None = None
    choice: GuidedChoices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: JsonObject | str | None = None
    disable_any_whitespace: Annotated[bool | None, Unsupported(neutral=False)] = None
    disable_additional_properties: Annotated[bool | None, Unsupported(neutral=False)] = None
    whitespace_pattern: Annotated[str | None, Unsupported()] = None


# ---------------------------------------------------------------- tools


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function of a `NamedToolChoice`."""

    name: Name


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `tool_choice` of one function, which has to be one of `tools`."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a tool; its other keys are for the chat template."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """An item of `tools`, as far as it is checked."""

    type: Literal["function"] = "function"
    function: ToolFunction


# ---------------------------------------------------------------- the extension


def template_options(**options: object) -> dict[str, Any]:
    """Return the options for rendering a chat (`ChatOptions`) that the client set."""
    return {name: value for name, value in options.items() if value is not None}


class AgentHints(msgspec.Struct, frozen=True):
    """Hints of an agent about its request. `osl` is the expected length of the response, in tokens."""

    priority: I64 | None = None
    strict_priority: U32 | None = None
    osl: Count | None = None
    speculative_prefill: bool | None = None


class Targets(msgspec.Struct, frozen=True):
    """Latency targets in milliseconds: the first token, and each later one."""

    ttft_target: Milliseconds | None = None
    itl_target: Milliseconds | None = None

    @property
    def ttft_target_s(self) -> float | None:
        """The target of the first token, in seconds."""
        return None if self.ttft_target is None else self.ttft_target / _MS_PER_S

    @property
    def itl_target_s(self) -> float | None:
        """The target of each later token, in seconds."""
        return None if self.itl_target is None else self.itl_target / _MS_PER_S


NO_TARGETS = Targets()
_NO_HINTS = AgentHints()


class NvExt(msgspec.Struct, frozen=True):
    """The extension, as far as it is read here; a worker gets all of it.

    `token_data` is the prompt as token ids, in place of messages or text.
    """

    backend_instance_id: str | int | None = None
    prefill_worker_id: str | int | None = None
    decode_worker_id: str | int | None = None
    dp_rank: Rank | None = None
    prefill_dp_rank: Rank | None = None
    token_data: msgspec.Raw = ABSENT
    cache_salt: CacheSalt | None = None
    agent_hints: AgentHints | None = None
    router: Targets | None = None
    annotations: list[str] | None = None
    extra_fields: list[str] | None = None
    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    max_thinking_tokens: U32 | None = None

    def prompt_ids(self) -> bytes | None:
        """Return `token_data` as little-endian u32s, None if there is none; raise `RequestInvalid`."""
        return read_ids(self.token_data, "nvext.token_data") if is_given(self.token_data) else None

    @property
    def hints(self) -> AgentHints:
        """The hints; empty ones if there are none."""
        return self.agent_hints or _NO_HINTS

    @property
    def ineffective(self) -> Iterator[str]:
        """The paths of its keys that have no effect, in the order of their names."""
        if self.hints.speculative_prefill is not None:
            yield "nvext.agent_hints.speculative_prefill"
        for key in ("annotations", "extra_fields", "greed_sampling", "max_thinking_tokens", "use_raw_prompt"):
            if getattr(self, key) is not None:
                yield f"nvext.{key}"


NO_NVEXT = NvExt()


# ---------------------------------------------------------------- both endpoints


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that routers and agents read alike."""

    nvext: Annotated[NvExt | None, LEFT_OUT] = None
    stream: Annotated[bool | None, KEPT] = None
    stream_options: Annotated[Wishes | None, KEPT] = None
    max_tokens: Annotated[Count | None, LEFT_OUT] = None
    min_tokens: Annotated[TokenLimit | None, PASSED, LEFT_OUT] = None
    stop: Annotated[str | StopStrings | None, KEPT] = None
    add_special_tokens: Annotated[bool | None, LEFT_OUT] = None
    return_token_ids: Annotated[bool | None, Unsupported(neutral=False), LEFT_OUT] = None
    cache_salt: Annotated[CacheSalt | None, KEPT] = None
    priority: Annotated[Priority | None, KEPT] = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def salt(self) -> str:
        """The cache salt, which isolates the request's cached blocks; empty: none."""
        return self.cache_salt or (self.nvext and self.nvext.cache_salt) or ""

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens to generate; None: the worker decides."""
        return self.max_tokens


class Options(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that both endpoints have. Others are fields of one endpoint's request, with types from here."""

    stream_options: Annotated[StreamOptions | None, KEPT] = None
    n: Annotated[Choices | None, LEFT_OUT] = None
    best_of: Choices | None = None
    stop_token_ids: Annotated[StopTokens | None, KEPT] = None
    include_stop_str_in_output: Annotated[bool | None, Unsupported(neutral=False), KEPT] = None
    ignore_eos: Annotated[bool | None, KEPT] = None
    temperature: Annotated[Temperature | None, PASSED, KEPT] = None
    top_p: Annotated[Probability | None, PASSED, KEPT] = None
    top_k: Annotated[TopK | None, PASSED, KEPT] = None
    min_p: Annotated[Probability | None, PASSED, KEPT] = None
    top_p_min: Annotated[Probability | None, Unsupported(neutral=0.0)] = None
    seed: Annotated[I64 | None, PASSED, KEPT] = None
    frequency_penalty: Annotated[Penalty | None, PASSED, KEPT] = None
    presence_penalty: Annotated[Penalty | None, PASSED, KEPT] = None
    repetition_penalty: Annotated[Factor | None, PASSED, KEPT] = None
    length_penalty: Annotated[float | None, NO_EFFECT, KEPT] = None
    early_stopping: Annotated[bool | Literal["never"] | None, NO_EFFECT] = None
    use_beam_search: Annotated[bool | None, Unsupported(neutral=False)] = None
    logit_bias: Annotated[Biases | None, KEPT] = None
    bad_words: Annotated[BadWords | None, KEPT] = None
    allowed_token_ids: Annotated[list[TokenId] | None, Unsupported(neutral=[]), KEPT] = None
    logits_processors: Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    prompt_logprobs: Logprobs | None = None
    thinking_token_budget: Annotated[ThinkingBudget | None, Unsupported()] = None
    skip_special_tokens: Annotated[bool | None, Unsupported(neutral=True), KEPT] = None
    spaces_between_special_tokens: Annotated[bool | None, NO_EFFECT, KEPT] = None
    detokenize: Annotated[bool | None, Unsupported(neutral=True), LEFT_OUT] = None
    return_tokens_as_token_ids: Annotated[bool | None, Unsupported(neutral=False)] = None
    response_format: ResponseFormat | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: GuidedChoices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Annotated[str | None, Unsupported()] = None
    guided_decoding_backend: Annotated[str | None, NO_EFFECT] = None
    structured_outputs: StructuredOutputs | None = None
    structural_tag: JsonObject | str | None = None
    user: Annotated[str | None, NO_EFFECT, KEPT] = None
    service_tier: Annotated[str | None, NO_EFFECT, LEFT_OUT] = None
    store: Annotated[bool | None, NO_EFFECT, LEFT_OUT] = None
    metadata: Annotated[JsonObject | None, NO_EFFECT, LEFT_OUT] = None
    safety_identifier: Annotated[str | None, NO_EFFECT, LEFT_OUT] = None
