"""Imports TensorRT-LLM and builds the objects of its API.

    ours                                 the library's
    engine arguments, role encode        `MultimodalEncoder`
    backend pytorch, _autodeploy         `tensorrt_llm.LLM`, `tensorrt_llm._torch.auto_deploy.LLM`
    sections of the arguments            mappings, which the library's own models turn into its classes
    error, warning, info, debug          log levels error, warning, info, debug; TLLM_LOG_LEVEL wins
    a prompt with media                  `preprocess`, which takes long, then `generate_async` of its result

`fault` reports a dead engine, and must be called before `meaning`, which classifies other errors.

Everything is imported on use, because it takes seconds and needs a GPU. Names and their sources:
`SURFACE.md` of the fake.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import structlog
from pydantic import ValidationError

from kv_protocol.errors import shortened
from kv_runtime.config.words import allowed
from kv_runtime.extras import DISTRIBUTION, install_command
from worker_agent.engine_args.arguments import EngineArgs
from worker_agent.engine_args.layers import dotted, found, shown
from worker_agent.engines.trtllm.logits import LogitsAdapter
from worker_agent.engines.trtllm.requests import disaggregated_fields, sampling_fields
from worker_agent.engines.trtllm.settings import TrtllmSettings
from worker_agent.engines.trtllm.tensors import bias_of, file_of, image_of, tensor_of
from worker_agent.media.inputs import cache_salt_of, has_media, with_digests
from worker_agent.port.handoff import Handoff, HandoffInvalid, handoff_of
from worker_agent.port.types import EngineError, EngineRequest, Media, RequestRefused

EXTRA = "trtllm"
_LOGGED_MAX = 64
"""At most this many dropped handoff keys, and as many mismatches, are logged, each once."""
_log = structlog.get_logger("trtllm")


_MESSAGE_CHARACTERS_MAX = 300
"""How many characters of a message are kept: enough for the missing name at its end."""


class LibraryMismatch(EngineError):
    """The installed TensorRT-LLM does not fit the agent's calls: the agent's fault, not the client's."""


class Bindings:
    """The imported library, and its engine `llm` once that is loaded.

    `placing` is held while a thread places media in a prompt: tokenizers are not thread-safe.

    An error of the library                          means
    AttributeError, TypeError, ImportError           `LibraryMismatch`: this version lacks a name, or takes other
                                                     arguments than the agent gives: 500, each message logged once
    any other, at submission                         `RequestRefused`: a value of the request, or what it names, is bad
    `RequestError`, or a handoff that cannot be      `RequestRefused`
      read, after submission
    any other, after submission                      the engine is dead

    Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/executor/utils.py` (`RequestError`), `tensorrt_llm/llmapi/llm.py`
    (`_check_arguments` raises ValueError).

    Raises:
        EngineError: the library is not installed, or cannot be imported.
    """

    def __init__(self, args: EngineArgs, settings: TrtllmSettings) -> None:
        try:
            import tensorrt_llm  # noqa: PLC0415  see above

            request_error = _named("executor.utils", "RequestError")
        except ModuleNotFoundError as error:
            if error.name != "tensorrt_llm":
                raise EngineError(f"tensorrt_llm cannot be imported: {error}") from error
            raise EngineError(f"the engine trtllm needs {DISTRIBUTION}[{EXTRA}]: {install_command(EXTRA)}") from error
        except (ImportError, OSError, RuntimeError) as error:  # a CUDA library is missing or incompatible
            raise EngineError(f"tensorrt_llm cannot be imported: {error}") from error
        self.version = str(tensorrt_llm.__version__)
        self._of_requests = (request_error, HandoffInvalid)
        self._dropped, self._mismatches = set[str](), set[str]()
        self._args, self._settings = args, settings
        self.llm: Any = None
        self.placing = asyncio.Lock()
        _named("logger", "logger").set_level(settings.log_level)

    def meaning(self, error: Exception, *, is_new: bool) -> EngineError | None:
        """Return the request's error; None: the engine is dead. `is_new`: the request was just submitted."""
        if isinstance(error, (AttributeError, TypeError, ImportError)):
            found = shortened(f"{type(error).__name__}: {error}", _MESSAGE_CHARACTERS_MAX)
            if found not in self._mismatches and len(self._mismatches) < _LOGGED_MAX:
                self._mismatches.add(found)
                _log.error("library_mismatch", version=self.version, reason=found, exc_info=error)
            return LibraryMismatch(f"tensorrt_llm {self.version} lacks what the agent asks for: {found}")
        if is_new or isinstance(error, self._of_requests):
            return RequestRefused("request", str(error), "what the engine can serve")
        return None

    def load(self) -> None:
        """Load the engine; block this thread, for minutes.

        Raises:
            EngineError: the library refuses the arguments, or cannot load the model.
        """
        args = self._args
        try:
            self.llm = _engine_class(args)(**args.as_dict())
        except ValidationError as error:
            lines = "".join(f"\n  {refusal}" for refusal in dict.fromkeys(refusals(args, error)))
            raise EngineError(f"the engine refuses its arguments:{lines}") from error
        except Exception as error:
            named = named_in(args, error) if isinstance(error, ValueError) else ""
            raise EngineError(f"the engine cannot be loaded: {type(error).__name__}: {error}{named}") from error

    def call(self, request: EngineRequest, adapters: list[LogitsAdapter]) -> Callable[[], Any]:
        """Return the call that submits one request and returns its result object at once.

        `request` has passed `check_request`. If it has media, this takes long and belongs on a thread: images are
        decoded, and placed in the prompt.

        Raises:
            RequestRefused: an image cannot be decoded.
            Exception: whatever the library raises.
        """
        args, settings = self._args, self._settings
        sampling, fields = self._sampling(request, adapters), disaggregated_fields(request, args.role)
        disaggregated = None if fields is None else self._disaggregated(fields)
        inputs: Any = list(request.prompt)
        if request.media or (has_media(request) and request.text is not None):
            inputs = self.llm.preprocess(_with_media(self.llm, request), sampling, disaggregated)
        others: dict[str, Any] = {
            "streaming": args.role != "prefill",
            "disaggregated_params": disaggregated,
            "trace_headers": dict(request.trace_headers) or None,
            "cache_salt": cache_salt_of(request),
            "priority": request.queue_priority,
        }
        if lora := request.lora_name:
            number = 1 + list(settings.loras).index(lora)  # unique in the engine
            others["lora_request"] = _named("llmapi", "LoRARequest")(lora, number, settings.loras[lora])
        if settings.conversation_affinity and request.conversation_id is not None:  # the engine chooses the rank
            named = _named("conversation_params", "ConversationParams")
            others["conversation_params"] = named(conversation_id=request.conversation_id)
        elif request.dp_rank is not None and args.attention_dp_size > 1:
            scheduling = _named("scheduling_params", "SchedulingParams")
            others["scheduling_params"] = scheduling(attention_dp_rank=request.dp_rank, attention_dp_relax=False)
        given = {name: each for name, each in others.items() if each is not None}
        return partial(self.llm.generate_async, inputs, sampling, **given)

    async def encode(self, text: str, media: Sequence[Media]) -> Handoff:
        """Return a handoff with the encoder's handle for each image, and the images' digests as their hashes.

        Images are decoded, and placed in `text`, on a thread.

        Raises:
            RequestRefused: an image cannot be decoded, or there is not a handle for each.
            Exception: whatever the library raises.
        """

        def prepared() -> Any:  # noqa: ANN401 - the library has no types here
            images = {"image": [image_of(each) for each in media]}
            return self.llm.preprocess({"prompt": text, "multi_modal_data": images, "mm_processor_kwargs": {}})

        async with self.placing:
            inputs = await asyncio.to_thread(prepared)
        handoff = handoff_of((await self.llm.generate_async(inputs)).disaggregated_params)
        handles = len(handoff.multimodal_embedding_handles or ())
        if handles != len(media):
            raise RequestRefused("media", f"{handles} embeddings of {len(media)} images", "as many")
        return with_digests(handoff, [each.digest for each in media])

    async def embeddings(self, text: str, media: Sequence[Media]) -> tuple[bytes, ...]:
        """Return a `.safetensors` file for each image, in their order; otherwise as `encode`.

        Positions (mrope) are a prompt's, not an image's: a model that needs them is refused here.
        """
        handoff = await self.encode(text, media)
        if handoff.mrope_position_ids_handle is not None:
            raise RequestRefused("form", "embeddings", "handles: this model's positions go with the prompt")
        container = _named("_torch.shared_tensor", "SharedTensorContainer")

        def file(handle: dict[str, Any]) -> bytes:  # a handle opens once; its bytes may be copied from a GPU
            return file_of(container.from_dict(dict(handle)).get_local_view())

        return tuple([await asyncio.to_thread(file, each) for each in handoff.multimodal_embedding_handles or ()])

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
            collector = _named("metrics", "MetricsCollector")
        except (ImportError, AttributeError) as error:
            _log.warning("engine_metrics_absent", version=self.version, reason=str(error))
            return None
        return collector({"model_name": model, "engine_type": "trtllm"})

    def _sampling(self, request: EngineRequest, adapters: list[LogitsAdapter]) -> Any:  # noqa: ANN401 - as above
        sampling = sampling_fields(request, self._args.role, self._settings.end_ids)
        if (guide := request.sampling.guide) is not None:  # each kind is the name of a field
            params = _named("sampling_params", "GuidedDecodingParams")
            sampling["guided_decoding"] = params(**{guide.kind: guide.value})
        if request.logit_bias:
            sampling["embedding_bias"] = bias_of(request.logit_bias, self._settings.vocab_size or 0)
        if adapters:
            _named("sampling_params", "LogitsProcessor").register(LogitsAdapter)
            sampling["logits_processor"] = adapters
        return _named("sampling_params", "SamplingParams")(**sampling)

    def _disaggregated(self, fields: dict[str, Any]) -> Any:  # noqa: ANN401 - as above
        """Return the handoff as the library's class; keys that this version lacks are dropped."""
        params = _named("disaggregated_params", "DisaggregatedParams")
        known = params.__dataclass_fields__.keys()
        accepted = {name: value for name, value in fields.items() if name in known}
        unknown = fields.keys() - known - self._dropped
        if unknown and len(self._dropped) < _LOGGED_MAX:
            self._dropped |= unknown
            _log.warning("handoff_keys_dropped", version=self.version, keys=sorted(unknown))
        if "schedule_style" in accepted:
            style = _named("disaggregated_params", "DisaggScheduleStyle")
            accepted["schedule_style"] = style(accepted["schedule_style"])
        if "first_gen_log_probs" in accepted:
            logprob = _named("executor.result", "Logprob")
            accepted["first_gen_log_probs"] = [
                alternatives
                if isinstance(alternatives, float)
                else {each.token_id: logprob(logprob=each.logprob, rank=each.rank) for each in alternatives}
                for alternatives in accepted["first_gen_log_probs"]
            ]
        return params(**accepted)


def _named(module: str, name: str) -> Any:  # noqa: ANN401 - as above
    """Return what the library has under this name."""
    return getattr(import_module(f"tensorrt_llm.{module}"), name)


def _engine_class(args: EngineArgs) -> Any:  # noqa: ANN401 - as above
    if args.role == "encode":
        return _named("llmapi", "MultimodalEncoder")
    return _named("_torch.auto_deploy" if args.value("backend") == "_autodeploy" else "llmapi", "LLM")


def _with_media(llm: Any, request: EngineRequest) -> dict[str, Any]:  # noqa: ANN401 - as above
    """Return the prompt as `TextPrompt`; as `TokensPrompt` if its text is unknown and the model accepts tokens.

    For other models the tokens are decoded to text. The library does that itself, but in some versions it drops
    embeddings and UUIDs, and has None for `mm_processor_kwargs`.
    Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/llm.py` @ 4c05a748, `generate_async`.
    """
    text, prompt, tokenizer = request.text, list(request.prompt), getattr(llm, "tokenizer", None)
    takes_tokens = getattr(getattr(llm, "input_processor", None), "supports_token_id_mm_expansion", False)
    if text is None and tokenizer is not None and not takes_tokens:
        text = tokenizer.decode(prompt)
    inputs: dict[str, Any] = {"prompt_token_ids": prompt} if text is None else {"prompt": text}
    inputs["mm_processor_kwargs"] = {}
    if images := [each for each in request.media if each.tensor is None]:
        inputs["multi_modal_data"] = {"image": [image_of(each) for each in images]}
        inputs["multi_modal_uuids"] = {"image": [each.digest for each in images]}
    if embeddings := [each for each in request.media if each.tensor is not None]:
        inputs["multi_modal_embeddings"] = {"image": [tensor_of(each) for each in embeddings]}
    return inputs


_WORD = re.compile(r"\w+")


def refusals(args: EngineArgs, error: ValidationError) -> Iterator[str]:
    """Yield each argument that the installed version refused, with its place."""
    for each in error.errors(include_url=False):
        path = tuple(str(part) for part in each["loc"])
        nearest = (args.first(*path[:size]) for size in range(len(path), 0, -1))  # some parts may be pydantic's own
        given = next((each for each in nearest if each is not None), None)
        place = "" if given is None else f"{given.place}: "
        name = f"{dotted(path)}: " if path else ""
        yield f"{place}{name}found {found(shown(path, each['input']))}, {allowed(each)}"


def named_in(args: EngineArgs, error: Exception) -> str:
    """Return where the arguments that the error names were given, to be appended to a message."""
    words = set(_WORD.findall(str(error)))
    given = [setting for setting in args.settings if setting.path[0] in words and setting.layer != "default"]
    return "".join(f"; {setting.name}: {setting.origin}" for setting in given)
