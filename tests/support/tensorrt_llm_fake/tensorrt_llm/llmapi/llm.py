"""`LLM`: building an engine, and asking it.

| when | what is refused | with |
|---|---|---|
| building | an unknown keyword | ValueError |
| building | a bad value, or a bad nested configuration | pydantic.ValidationError |
| building | more GPUs than the node has | RuntimeError |
| asking | after `shutdown` | RuntimeError("LLM is shutting down") |
| asking | of a dead engine | EngineDeadError |
| asking | sampling parameters or a conversation of another type; a prompt of no known form | TypeError |
| asking | media that are not as many as their places; handles without the prompt's text | ValueError |
| asking | no `end_id` and no tokenizer; a priority outside 0..1 | ValueError |
| asking | a prompt longer than `max_num_tokens`, without chunked prefill and not generation-only | RequestError |
| while iterating | no room below `max_seq_len`; an attention-DP rank that is not there | RequestError |
| while iterating | disaggregation without a transceiver; a foreign opaque state | RequestError |

The caller's sampling parameters are changed: `end_id` and `pad_id` are filled in, a context-only request's `max_tokens`
becomes 1. Source: `tensorrt_llm/llmapi/llm.py`, stored text 55216765702 (`SURFACE.md`).
"""

# ruff: noqa: PLR0917  the real signatures
# ruff: noqa: TID252  by its own name mypy would look for the real package

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .._fake.admission import build_request
from .._fake.control import control
from .._fake.media import (
    PLACEHOLDER,
    InputProcessor,
    MediaItem,
    expand,
    image_token,
    items_of,
    items_of_handles,
    split_at,
)
from ..conversation_params import ConversationParams
from ..disaggregated_params import DisaggregatedParams
from ..executor import GenerationExecutor, GenerationResult, LoRARequest
from ..executor.request import DEFAULT_REQUEST_PRIORITY
from ..executor.utils import EngineDeadError, RequestError
from ..inputs import PromptInputs, prompt_inputs
from ..logger import logger
from ..sampling_params import SamplingParams
from ..scheduling_params import SchedulingParams
from .llm_args import TorchLlmArgs
from .tokenizer import TokenizerBase, load_tokenizer


class RequestOutput(GenerationResult):
    """A request's result, with its prompt's text."""

    _prompt: str | None

    def __init__(self) -> None:
        raise RuntimeError(f"{type(self).__name__} is made by LLM.generate_async, not by users.")

    @classmethod
    def _from_generation_result(
        cls, generation_result: GenerationResult, prompt: str | None = None, tokenizer: TokenizerBase | None = None
    ) -> "RequestOutput":
        made = cls.__new__(cls)
        made.__dict__.update(generation_result.__dict__)
        made.tokenizer = tokenizer
        made._prompt = prompt
        return made


@dataclass
class PreprocessedInputs:
    """A prompt after its tokenization."""

    prompt_token_ids: list[int]
    query_token_ids: list[int] | None = None
    multimodal_params: Any = None
    encoder_input_token_ids: list[int] | None = None


class BaseLLM:
    """What all LLM classes do."""

    _encoder_only = False

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: Literal["auto", "slow"] = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._executor: GenerationExecutor | None = None
        self._tokenizer: TokenizerBase | None = None
        self._hf_model_dir = Path(model)  # the real one: where the checkpoint lies, which it may have downloaded
        kind = _args_class(kwargs.setdefault("backend", "pytorch"))
        valid = {*kind.model_fields, "_mpi_session", "backend"}
        for key in kwargs:
            if key not in valid:
                logger.error(f"Failed to parse the arguments for the LLM constructor: {key}")
                raise ValueError(f"{type(self).__name__} got invalid argument: {key}")
        for key, value in (kwargs.get("env_overrides") or {}).items():
            os.environ[key] = str(value)
        self.args = kind(
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            **kwargs,
        )
        parallel = self.args.parallel_config
        if parallel.is_multi_gpu and control.gpus < parallel.world_size_per_node:
            raise RuntimeError(f"Only {control.gpus} GPUs are available, but {parallel.world_size} are required.")
        self._build_model()
        control.built(self)

    @property
    def tokenizer(self) -> TokenizerBase | None:
        """Return the model's tokenizer; none with `skip_tokenizer_init`."""
        return self._tokenizer

    def generate_async(
        self,
        inputs: PromptInputs | PreprocessedInputs,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: SchedulingParams | None = None,
        conversation_params: ConversationParams | None = None,
        cache_salt: str | None = None,
        priority: float = DEFAULT_REQUEST_PRIORITY,
    ) -> RequestOutput:
        """Return a request's result at once. What is refused, and how, stands above."""
        del prompt_adapter_request, _postproc_params, kv_cache_retention_config
        executor = self._alive()
        if conversation_params is not None and not isinstance(conversation_params, ConversationParams):
            raise TypeError(f"conversation_params must be ConversationParams, but got {type(conversation_params)}")
        conversation = None if conversation_params is None else conversation_params.conversation_id
        control.heard.append((dict(trace_headers or {}), conversation))
        params = self._prepare_sampling_params(sampling_params)
        kind = (disaggregated_params and disaggregated_params.request_type) or "context_and_generation"
        if kind == "context_only":
            params.max_tokens = 1
        prompt, text, media = self._preprocess(inputs, params, disaggregated_params)
        limit = self.args.max_num_tokens if str(self.args.backend) == "pytorch" else None
        if not self.args.enable_chunked_prefill and kind != "generation_only" and limit and len(prompt) > limit:
            raise RequestError(
                f"The sum of prompt length ({float(len(prompt))}), query length (0) should not exceed "
                f"max_num_tokens ({limit})"
            )
        if not 0.0 <= priority <= 1.0:
            raise ValueError(f"priority must be a float in [0.0, 1.0], got {priority}")
        made = executor.submit(
            build_request(
                executor,
                self.args,
                prompt,
                params,
                kind,
                media,
                streaming=streaming,
                lora=lora_request,
                disaggregated=disaggregated_params,
                scheduling=scheduling_params,
                cache_salt=cache_salt,
            )
        )
        result = RequestOutput._from_generation_result(made, text, self.tokenizer)
        control.answers(result)
        return result

    def preprocess(
        self,
        inputs: PromptInputs,
        sampling_params: SamplingParams | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
    ) -> PreprocessedInputs:
        """Return a prompt's tokens, which `generate_async` takes in its place."""
        params = self._prepare_sampling_params(sampling_params)
        prompt, _, media = self._preprocess(inputs, params, disaggregated_params)
        return PreprocessedInputs(prompt, multimodal_params=media or None)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return the rows of all iterations since the last call; wait up to `timeout` seconds for one."""
        return self._alive(polling=True).get_stats(timeout=timeout)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return all KV events since the last call; wait up to `timeout` seconds for one."""
        return self._alive(polling=True).get_kv_events(timeout=timeout)

    def get_kv_cache_capacity(self) -> dict[str, Any]:
        """Return the GPU pool's size."""
        return self._alive(polling=True).get_kv_cache_capacity()

    def shutdown(self) -> None:
        """End the engine; may be repeated."""
        executor, self._executor = getattr(self, "_executor", None), None
        if executor is not None:
            executor.shutdown()

    def _check_health(self) -> bool:
        return self._executor is not None and self._executor.check_health()

    def __del__(self) -> None:
        executor, self._executor = getattr(self, "_executor", None), None
        if executor is not None:
            executor._abandon()

    # -------------------------------------------------------------------------------------------- inside
    def _build_model(self) -> None:
        if not self.args.skip_tokenizer_init:
            given = self.args.tokenizer
            self._tokenizer = given if isinstance(given, TokenizerBase) else load_tokenizer(given or self.args.model)
        self.input_processor = InputProcessor()
        self._executor = GenerationExecutor(self.args, encoder_only=self._encoder_only)

    def _alive(self, *, polling: bool = False) -> GenerationExecutor:
        executor = self._executor
        if polling:
            if executor is None:  # the real one has no attribute there to ask
                raise AttributeError("'NoneType' object has no attribute 'get_kv_events'")
            return executor
        if executor is not None and executor._fatal_error is not None:
            raise EngineDeadError(executor._fatal_error)
        if executor is None or executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        return executor

    def _prepare_sampling_params(self, sampling_params: SamplingParams | None) -> SamplingParams:
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(params)}")
        if params.use_beam_search:
            raise NotImplementedError("the fake has no beam search")
        if params.end_id is None:
            if self.tokenizer is None:
                raise ValueError(
                    "tokenizer is required to reset end_id if it is None, or you can explicitly specify the end_id "
                    "for sampling_params"
                )
            params.end_id = params.pad_id = self.tokenizer.eos_token_id
        if params._stream_interval is None:
            params._stream_interval = self.args.stream_interval
        params.return_perf_metrics = params.return_perf_metrics or self.args.return_perf_metrics
        return params

    def _preprocess(
        self, inputs: Any, params: SamplingParams, disaggregated: DisaggregatedParams | None
    ) -> tuple[list[int], str | None, list[MediaItem]]:
        if isinstance(inputs, PreprocessedInputs):
            return inputs.prompt_token_ids, None, inputs.multimodal_params or []
        given = prompt_inputs(inputs)
        if "prompt" not in given and "prompt_token_ids" not in given:
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        items = self._media(given, disaggregated)
        text, tokens = given.get("prompt"), given.get("prompt_token_ids")
        if text is None:
            assert tokens is not None
            prompt, media = expand(split_at(tokens, image_token()) if items else [list(tokens)], items)
            return prompt, None, media
        if self.tokenizer is None:
            raise ValueError("tokenizer is required to tokenize the prompt")
        pieces = [
            self.tokenizer.encode(part, add_special_tokens=params.add_special_tokens and index == 0)
            for index, part in enumerate(text.split(PLACEHOLDER) if items else [text])
        ]
        prompt, media = expand(pieces, items)
        return prompt, given.get("prompt"), media

    def _media(self, given: dict[str, Any], disaggregated: DisaggregatedParams | None) -> list[MediaItem]:
        if disaggregated is None or disaggregated.multimodal_embedding_handles is None:
            return items_of(given)
        if str(self.args.backend) == "_autodeploy":
            raise ValueError("Multimodal disaggregated inference is not supported for this model")
        if disaggregated.request_type == "generation_only":
            raise ValueError("Generation-only mode should not need multimodal parameters")
        if not given.get("prompt"):
            raise ValueError("Text prompt is required but not provided")
        return items_of_handles(disaggregated.multimodal_embedding_handles, disaggregated.multimodal_hashes)


def _args_class(backend: str | None) -> type[TorchLlmArgs]:
    if backend == "pytorch":
        return TorchLlmArgs
    if backend == "_autodeploy":
        from .._torch.auto_deploy.llm_args import LlmArgs  # noqa: PLC0415  as the real one, only where it is asked for

        return LlmArgs
    raise ValueError(f"Unsupported backend: {backend!r}")


class LLM(BaseLLM):
    """A language model: the backend is `pytorch` where none is named."""
