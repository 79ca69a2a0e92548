"""Imports TensorRT-LLM and builds the objects of its API.

    ours                                 the library's
    engine arguments, role encode        `MultimodalEncoder`
    backend pytorch, _autodeploy         `tensorrt_llm.LLM`, `tensorrt_llm._torch.auto_deploy.LLM`
    sections of the arguments            mappings, of which its own models make their classes
    error, warning, info, debug          log levels error, warning, info, debug; TLLM_LOG_LEVEL wins
    a prompt with media                  `preprocess`, which takes long, then `generate_async` of what it gives

`errors.py` classifies its errors; `fault` reports a dead engine, and is checked before them.

Everything is imported on use, because it takes seconds and needs a GPU. Names and their sources:
`SURFACE.md` of the fake.
"""

# ruff: noqa: PLC0415  see above

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import structlog
from pydantic import ValidationError

from kv_protocol.errors import shortened
from kv_runtime.config.words import allowed
from kv_runtime.extras import DISTRIBUTION, install_command
from worker_agent.engine_args.arguments import EngineArgs
from worker_agent.engine_args.layers import Path, ValueOrigin, dotted, found, shown
from worker_agent.engines.trtllm.logits import LogitsAdapter
from worker_agent.engines.trtllm.requests import TrtllmRequest
from worker_agent.engines.trtllm.settings import TrtllmSettings
from worker_agent.engines.trtllm.tensors import bias_of, file_of, image_of, tensor_of
from worker_agent.media.inputs import of_kind
from worker_agent.port.handoff import HandoffInvalid
from worker_agent.port.sampling import TokenLogprob
from worker_agent.port.types import EngineError, Media, RequestRefused

EXTRA = "trtllm"
_DROPPED_MAX = 64
"""Names of dropped handoff keys that are logged, each once."""
_log = structlog.get_logger("trtllm")


class Call(NamedTuple):
    """A request in the library's types: a prompt, `SamplingParams`, `DisaggregatedParams` or None."""

    inputs: Any
    sampling: Any
    disaggregated: Any


_MISMATCHES = (AttributeError, TypeError, ImportError)
_LOGGED_MESSAGES_MAX = 64
"""Different messages that are logged, each once."""
_MESSAGE_CHARACTERS_MAX = 300
"""Of a message: the missing name stands at its end."""


class LibraryMismatch(EngineError):
    """The installed TensorRT-LLM does not fit the agent's calls: the agent's fault, not the client's."""


class LibraryErrors:
    """Classifies the errors of one installed `version`; `request_error`: its class of errors of one request.

    AttributeError, TypeError, ImportError           `LibraryMismatch`: this version lacks a name, or takes other
                                                     arguments than the agent gives. 500, one log line a message
    any other, at submission                         `RequestRefused`: a value of the request, or what it names
    `RequestError`, or a handoff that cannot be      `RequestRefused`
      read, after submission
    any other, after submission                      the engine is dead

    Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/executor/utils.py` (`RequestError`), `tensorrt_llm/llmapi/llm.py`
    (`_check_arguments` raises ValueError).
    """

    def __init__(self, version: str, request_error: type[Exception]) -> None:
        self._version, self._of_requests = version, (request_error, HandoffInvalid)
        self._logged: set[str] = set()

    def meaning(self, error: Exception, *, is_new: bool) -> EngineError | None:
        """Return the request's error; None: the engine is dead. `is_new`: the request was just submitted."""
        if isinstance(error, _MISMATCHES):
            return self._mismatch(error)
        if is_new or isinstance(error, self._of_requests):
            return RequestRefused("request", str(error), "what the engine can serve")
        return None

    def _mismatch(self, error: Exception) -> LibraryMismatch:
        found = shortened(f"{type(error).__name__}: {error}", _MESSAGE_CHARACTERS_MAX)
        if found not in self._logged and len(self._logged) < _LOGGED_MESSAGES_MAX:
            self._logged.add(found)
            _log.error("library_mismatch", version=self._version, reason=found, exc_info=error)
        return LibraryMismatch(f"tensorrt_llm {self._version} lacks what the agent asks for: {found}")


class Bindings:
    """The imported library, and its engine `llm` once that is loaded. `placing`: tokenizers are not thread-safe.

    Raises:
        EngineError: the library is not installed, or cannot be imported.
    """

    def __init__(self, settings: TrtllmSettings) -> None:
        try:
            import tensorrt_llm
            from tensorrt_llm.executor.utils import RequestError
            from tensorrt_llm.logger import logger
        except ModuleNotFoundError as error:
            if error.name != "tensorrt_llm":
                raise EngineError(f"tensorrt_llm cannot be imported: {error}") from error
            raise EngineError(f"the engine trtllm needs {DISTRIBUTION}[{EXTRA}]: {install_command(EXTRA)}") from error
        except (ImportError, OSError, RuntimeError) as error:  # a CUDA library is missing or incompatible
            raise EngineError(f"tensorrt_llm cannot be imported: {error}") from error
        self.version = str(tensorrt_llm.__version__)
        self.errors = LibraryErrors(self.version, RequestError)
        self._dropped: set[str] = set()
        self._loras = settings.loras
        self.llm: Any = None
        self.placing = asyncio.Lock()
        logger.set_level(settings.log_level)

    def load(self, args: EngineArgs) -> None:
        """Load the engine; block this thread, for minutes.

        Raises:
            EngineError: the library refuses the arguments, or cannot load the model.
        """
        try:
            self.llm = self._class(args)(**args.as_dict())
        except ValidationError as error:
            lines = "".join(f"\n  {refusal}" for refusal in dict.fromkeys(refusals(args, error)))
            raise EngineError(f"the engine refuses its arguments:{lines}") from error
        except Exception as error:
            named = named_in(args, error) if isinstance(error, ValueError) else ""
            raise EngineError(f"the engine cannot be loaded: {type(error).__name__}: {error}{named}") from error

    def call(self, request: TrtllmRequest, adapters: list[LogitsAdapter]) -> Call:
        """Return the call that `generate` submits. Media are decoded and placed here: then call it on a thread.

        Raises:
            RequestRefused: an image cannot be decoded.
            Exception: whatever the library raises.
        """
        sampling = self._sampling(request, adapters)
        disaggregated = _optional(self._disaggregated, request.disaggregated)
        inputs: Any = list(request.asked.prompt)
        if request.text is not None or request.asked.media:
            inputs = self.llm.preprocess(_with_media(self.llm, request), sampling, disaggregated)
        return Call(inputs, sampling, disaggregated)

    def generate(self, request: TrtllmRequest, call: Call) -> Any:  # noqa: ANN401 - the library has no types here
        """Submit one request and return its result object at once; raise what the library raises."""
        wishes = {
            "lora_request": _optional(self._lora, request.asked.lora_name or None),
            "disaggregated_params": call.disaggregated,
            "scheduling_params": _optional(self._scheduling, request.dp_rank),
            "conversation_params": _optional(self._conversation, request.conversation_id),
            "trace_headers": dict(request.asked.trace_headers) or None,
            "cache_salt": request.cache_salt,
            "priority": request.asked.queue_priority,
        }
        return self.llm.generate_async(
            call.inputs,
            call.sampling,
            streaming=request.streaming,
            **{name: wish for name, wish in wishes.items() if wish is not None},
        )

    def to_encode(self, text: str, media: Sequence[Media]) -> Any:  # noqa: ANN401 - as above
        """Return the inputs of `encode`: images decoded and placed in the prompt. Call it on a thread.

        Raises:
            RequestRefused: an image cannot be decoded.
            Exception: whatever the library raises.
        """
        images = [image_of(each) for each in media]
        return self.llm.preprocess({"prompt": text, "multi_modal_data": {"image": images}, "mm_processor_kwargs": {}})

    def encode(self, prepared: Any) -> Any:  # noqa: ANN401 - as above
        """Submit inputs to the encoder and return its result object at once."""
        return self.llm.generate_async(prepared)

    @staticmethod
    def embeddings(handle: Mapping[str, Any]) -> bytes:
        """Return the file of an encoder's handle, which can be used once. It may copy from a GPU."""
        from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

        return file_of(SharedTensorContainer.from_dict(dict(handle)).get_local_view())

    def fault(self) -> BaseException | None:
        """Return why the engine is dead; None while it lives."""
        fatal: BaseException | None = getattr(getattr(self.llm, "_executor", None), "_fatal_error", None)
        if fatal is not None:
            return fatal
        check = getattr(self.llm, "_check_health", None)
        return None if check is None or check() else EngineError("the engine's own health check fails")

    def capacity(self) -> Mapping[str, Any]:
        """Return the size of a rank's KV cache; empty if this version or engine does not report it."""
        try:
            return dict(self.llm.get_kv_cache_capacity())
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            _log.warning("kv_cache_capacity_unknown", version=self.version, reason=str(error))
            return {}

    def metrics_collector(self, model: str) -> Any:  # noqa: ANN401 - as above
        """Return a new collector of the engine's own metrics; None: this version has none."""
        try:
            from tensorrt_llm.metrics import MetricsCollector
        except ImportError as error:
            _log.warning("engine_metrics_absent", version=self.version, reason=str(error))
            return None
        return MetricsCollector({"model_name": model, "engine_type": "trtllm"})

    @staticmethod
    def _class(args: EngineArgs) -> Any:  # noqa: ANN401 - as above
        if args.role == "encode":
            from tensorrt_llm.llmapi import MultimodalEncoder

            return MultimodalEncoder
        if args.value("backend") == "_autodeploy":
            from tensorrt_llm._torch import auto_deploy

            return auto_deploy.LLM
        from tensorrt_llm import LLM

        return LLM

    @staticmethod
    def _sampling(request: TrtllmRequest, adapters: list[LogitsAdapter]) -> Any:  # noqa: ANN401 - as above
        from tensorrt_llm.sampling_params import GuidedDecodingParams, LogitsProcessor, SamplingParams

        sampling = dict(request.sampling)
        if request.guide is not None:
            sampling["guided_decoding"] = GuidedDecodingParams(**request.guide)
        if request.asked.logit_bias:
            sampling["embedding_bias"] = bias_of(request.asked.logit_bias, request.vocab_size)
        if adapters:
            LogitsProcessor.register(LogitsAdapter)
            sampling["logits_processor"] = adapters
        return SamplingParams(**sampling)

    @staticmethod
    def _conversation(conversation_id: str) -> Any:  # noqa: ANN401 - as above
        from tensorrt_llm.conversation_params import ConversationParams

        return ConversationParams(conversation_id=conversation_id)

    def _disaggregated(self, fields: dict[str, Any]) -> Any:  # noqa: ANN401 - as above
        """Return the handoff as the library's class; keys that this version lacks are dropped."""
        from tensorrt_llm.disaggregated_params import DisaggregatedParams, DisaggScheduleStyle

        known = DisaggregatedParams.__dataclass_fields__.keys()
        accepted = {name: value for name, value in fields.items() if name in known}
        unknown = fields.keys() - known - self._dropped
        if unknown and len(self._dropped) < _DROPPED_MAX:
            self._dropped |= unknown
            _log.warning("handoff_keys_dropped", version=self.version, keys=sorted(unknown))
        if "schedule_style" in accepted:
            accepted["schedule_style"] = DisaggScheduleStyle(accepted["schedule_style"])
        if "first_gen_log_probs" in accepted:
            accepted["first_gen_log_probs"] = [
                alternatives
                if isinstance(alternatives, float)
                else {token: _logprob(each) for token, each in alternatives.items()}
                for alternatives in accepted["first_gen_log_probs"]
            ]
        return DisaggregatedParams(**accepted)

    @staticmethod
    def _scheduling(dp_rank: int) -> Any:  # noqa: ANN401 - as above
        from tensorrt_llm.scheduling_params import SchedulingParams

        return SchedulingParams(attention_dp_rank=dp_rank, attention_dp_relax=False)

    def _lora(self, name: str) -> Any:  # noqa: ANN401 - as above
        from tensorrt_llm.llmapi import LoRARequest

        return LoRARequest(name, self._loras[name].number, self._loras[name].path)


def _with_media(llm: Any, request: TrtllmRequest) -> dict[str, Any]:  # noqa: ANN401 - as above
    """Return the prompt as `TextPrompt`; as `TokensPrompt` if its text is unknown and the model accepts tokens.

    For other models the tokens are decoded to text. The library does that itself, but in some versions it drops
    embeddings and UUIDs, and has None for `mm_processor_kwargs`.
    Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/llm.py` @ 4c05a748, `generate_async`.
    """
    text, prompt, tokenizer = request.text, list(request.asked.prompt), getattr(llm, "tokenizer", None)
    if text is None and tokenizer is not None and not _takes_tokens(llm):
        text = tokenizer.decode(prompt)
    inputs: dict[str, Any] = {"prompt_token_ids": prompt} if text is None else {"prompt": text}
    inputs["mm_processor_kwargs"] = {}
    if images := of_kind(request.asked.media, "image"):
        inputs["multi_modal_data"] = {"image": [image_of(each) for each in images]}
        inputs["multi_modal_uuids"] = {"image": [each.digest for each in images]}
    if embeddings := of_kind(request.asked.media, "embeddings"):
        inputs["multi_modal_embeddings"] = {"image": [tensor_of(each) for each in embeddings]}
    return inputs


def _takes_tokens(llm: Any) -> bool:  # noqa: ANN401 - as above
    return bool(getattr(getattr(llm, "input_processor", None), "supports_token_id_mm_expansion", False))


def _logprob(token: TokenLogprob) -> Any:  # noqa: ANN401 - the library's `Logprob`
    from tensorrt_llm.executor.result import Logprob

    return Logprob(logprob=token.logprob, rank=token.rank)


def _optional(make: Callable[[Any], Any], value: object) -> Any:  # noqa: ANN401 - whatever the library makes of it
    return None if value is None else make(value)


_WORD = re.compile(r"\w+")


def refusals(args: EngineArgs, error: ValidationError) -> Iterator[str]:
    """Yield each argument that the installed version refused, with its place."""
    for each in error.errors(include_url=False):
        path = tuple(str(part) for part in each["loc"])
        origin = _origin(args, path)
        place = "" if origin is None else f"{origin.place}: "
        name = f"{dotted(path)}: " if path else ""
        yield f"{place}{name}found {found(shown(path, each['input']))}, {allowed(each)}"


def named_in(args: EngineArgs, error: Exception) -> str:
    """Return, as a message's ending, where the arguments that the error names were given."""
    words = set(_WORD.findall(str(error)))
    given = [setting for setting in args.settings if setting.path[0] in words and setting.origin.layer != "default"]
    return "".join(f"; {setting.name}: {setting.origin}" for setting in given)


def _origin(args: EngineArgs, path: Path) -> ValueOrigin | None:
    """Return the origin of the first value at the longest part of the path that has one.

    Parts of a path may be pydantic's own: the number of a list's item, the tag of a union.
    """
    for size in range(len(path), 0, -1):
        for setting in args.settings:
            if setting.path[:size] == path[:size]:
                return setting.origin
    return None
