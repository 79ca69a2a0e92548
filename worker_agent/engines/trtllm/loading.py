"""Loads TensorRT-LLM's engine and describes it.

The longest sequence of an engine (PyTorch backend) is computed before the engine is loaded:

    the model           `max_position_embeddings`, times `rope_scaling.factor` (rounded up) unless the kind of scaling
                        is one of `_COUNTED`: there the positions are scaled already
    the argument        `max_seq_len`: the smaller one of it and the model's length counts; with
                        TLLM_ALLOW_LONG_MAX_MODEL_LEN only the argument does
    neither             the engine is not loaded

The engine computes this length in its own process and does not report it: `llm.args.max_seq_len` stays None. For a
model without positions it assumes 2,048 tokens; the agent requires the argument instead. `max_input_len` has no effect.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/_torch/models/modeling_utils.py` (`infer_max_seq_len`),
`tensorrt_llm/_torch/pyexecutor/model_engine.py` (`_init_max_seq_len`), `tensorrt_llm/executor/base_worker.py`
(`setup_engine`).

The data type of an engine's KV cache (PyTorch backend), which the engine does not report, is found in:

    `kv_cache_config.dtype`      fp8, nvfp4: that one; `auto`: the checkpoint's
    `hf_quant_config.json`       `quantization.kv_cache_quant_algo`: FP8, NVFP4, ..
    `config.json`                a `quantization_config` with a key about the KV cache: unknown, because it depends on
                                 the engine's version whether that is read; else the model's own dtype
    argument `dtype`             the model's own, in place of `torch_dtype` (`dtype`) of `config.json`

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/_torch/pyexecutor/model_loader.py` (`validate_and_set_kv_cache_quant`),
`tensorrt_llm/_torch/model_config.py` (`load_hf_quant_config`).
"""

import math
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from kv_runtime.text.chat_messages import TextError
from worker_agent.engine_args.arguments import EngineArgs
from worker_agent.engines.trtllm.bindings import Bindings
from worker_agent.engines.trtllm.settings import TrtllmSettings
from worker_agent.media.image_models import NO_STANDALONE_ENCODER, model_config, model_type
from worker_agent.port.types import EngineDescription, EngineError

_BLOCK_SIZE = 32
"""An encoder has no blocks, and registers this size."""
_ALLOW_LONGER = "TLLM_ALLOW_LONG_MAX_MODEL_LEN"
_YES = ("1", "true", "yes", "y")
"""The engine's own variable and what it takes for yes. Source: `_torch/pyexecutor/model_engine.py`."""


def load_engine(
    args: EngineArgs, settings: TrtllmSettings, model: str, abandoned: threading.Event
) -> tuple[Bindings, EngineDescription]:
    """Load and describe the engine; block this thread. Checks that need no engine come first.

    `model` is its name in requests. An engine that is loaded when `abandoned` is set is shut down.

    Raises:
        EngineError: the model does not fit the engine, cannot be loaded, or cannot be described.
    """
    try:
        longest = _checked_seq_len(args)
    except TextError as error:
        raise EngineError(str(error)) from error
    bindings = Bindings(args, settings)
    bindings.load()
    try:
        description = described(args, bindings, model, longest)
    except EngineError:
        bindings.llm.shutdown()
        raise
    if abandoned.is_set():
        bindings.llm.shutdown()
        raise EngineError("the start was cancelled: the loaded engine is not wanted any more")
    return bindings, description


def _checked_seq_len(args: EngineArgs) -> int | None:
    """Return the longest sequence in tokens; None: only the engine knows it. An encoder's is 1: it generates nothing.

    Raises:
        EngineError: it is unknown, and the engine will not report it either; or the model has no encoder of its own.
        TextError: the model's configuration cannot be read.
    """
    requested, model = args.value("max_seq_len"), str(args.value("model"))
    if args.role != "encode" and args.value("backend") == "_autodeploy":
        return int(requested) if requested else None
    config = model_config(model)
    if args.role != "encode":
        longer = os.environ.get(_ALLOW_LONGER, "0").lower() in _YES
        config = {**config, **(args.value("model_kwargs") or {})}
        return engine_seq_len(requested, config, model=model, allows_longer=longer)
    if (found := model_type(config)) in NO_STANDALONE_ENCODER:
        allowed = f"a model_type with an encoder of its own, which {', '.join(sorted(NO_STANDALONE_ENCODER))} has not"
        raise EngineError(f"role encode: found {found!r}, allowed {allowed}")
    return 1


def described(args: EngineArgs, bindings: Bindings, model: str, longest: int | None) -> EngineDescription:
    """Return the loaded engine's description; `longest` is its longest sequence, None: only the engine knows.

    Raises:
        EngineError: neither engine nor arguments state how long a sequence may be, or how large a block is.
    """
    llm, capacity = bindings.llm, bindings.capacity() if args.role != "encode" else {}
    own = getattr(llm, "args", None)
    iteration_tokens = args.value("max_num_tokens") or getattr(own, "max_num_tokens", None) or 0
    longest = longest or getattr(own, "max_seq_len", None)
    if longest is None:
        raise EngineError("max_seq_len: found none, allowed an engine argument")
    return EngineDescription(
        model=model,
        version=bindings.version,
        event_source="trtllm",
        block_size=_block_size(args, capacity),
        total_kv_blocks=capacity.get("maxNumBlocks") or 0,
        max_num_seqs=args.value("max_batch_size") or getattr(own, "max_batch_size", None) or 0,
        max_num_batched_tokens=iteration_tokens,
        max_seq_len=longest,
        max_prompt_tokens=_max_prompt_tokens(args, iteration_tokens, longest),
        dp_ranks=tuple(range(args.attention_dp_size)),
        kv_cache_dtype=_kv_cache_dtype(args, llm, own),
        takes_structural_tags=args.value("guided_decoding_backend") == "xgrammar",
    )


def _kv_cache_dtype(args: EngineArgs, llm: Any, own: Any) -> str:  # noqa: ANN401 - the library's
    """Return the dtype of the KV cache, by the engine's arguments and its checkpoint's directory."""
    directory = str(getattr(llm, "_hf_model_dir", None) or args.value("model"))
    requested = getattr(getattr(own, "kv_cache_config", None), "dtype", None) or args.value("kv_cache_config", "dtype")
    try:
        config, quantization = model_config(directory), model_config(directory, "hf_quant_config.json")
    except TextError as error:
        raise EngineError(str(error)) from error
    return kv_cache_dtype(requested, args.value("dtype"), config, quantization)


def _block_size(args: EngineArgs, capacity: Mapping[str, Any]) -> int:
    """Return the tokens in a block; there is no default, because a model may have its own."""
    stated: int | None = capacity.get("tokensPerBlock") or args.value("kv_cache_config", "tokens_per_block")
    if stated is None and args.role == "encode":
        return _BLOCK_SIZE
    if stated is None:
        raise EngineError(
            "kv_cache_config.tokens_per_block: found none, and the engine does not state it; allowed an engine argument"
        )
    return stated


def _max_prompt_tokens(args: EngineArgs, iteration_tokens: int, max_seq_len: int) -> int:
    """Return the longest prompt that the library accepts; 0 if it follows from `max_seq_len`.

    Without chunked prefill one iteration must compute the prompt. Source: NVIDIA/TensorRT-LLM,
    `tensorrt_llm/llmapi/llm.py`, `_check_arguments` (backend pytorch; each context-parallel rank has its part).
    """
    if args.role == "encode" or args.value("backend") == "_autodeploy" or args.value("enable_chunked_prefill"):
        return 0
    tokens: int = iteration_tokens * (args.value("context_parallel_size") or 1)
    return tokens if tokens < max_seq_len - 1 else 0


_COUNTED = ("su", "longrope", "llama3", "yarn")
_SECTIONS = ("text_config", "llm_config", "language_config")
"""The keys under which multimodal models have the configuration of their language model."""
_NAMED_BY_CHECKPOINT = (None, "", "auto")


def kv_cache_dtype(
    requested: object, model_dtype: object, config: Mapping[str, Any], quantization: Mapping[str, Any]
) -> str:
    """Return the dtype in lower case; empty if it is unknown. `requested` and `model_dtype` are the two arguments.

    `config` is the checkpoint's `config.json`, `quantization` its `hf_quant_config.json`; each is empty if absent.
    """
    if requested not in _NAMED_BY_CHECKPOINT:
        return str(requested).lower()
    quantized = quantization.get("quantization")
    algorithm = quantized.get("kv_cache_quant_algo") if isinstance(quantized, Mapping) else None
    if algorithm:
        return str(algorithm).lower()
    quantizations = [section.get("quantization_config") for section in sections(config)]
    names = [name for each in quantizations if isinstance(each, Mapping) for name, value in each.items() if value]
    if any(name.startswith("kv_cache") for name in names):
        return ""
    own = [model_dtype, *(section.get(key) for section in sections(config) for key in ("torch_dtype", "dtype"))]
    return next((str(each).lower().removeprefix("torch.") for each in own if each not in _NAMED_BY_CHECKPOINT), "")


def model_seq_len(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence of a model in tokens, by its `config.json`; None if that has no positions."""
    for section in sections(config):
        positions = section.get("max_position_embeddings")
        if type(positions) is int and positions > 0:
            return math.ceil(positions * _factor(section.get("rope_scaling")))
    return None


def engine_seq_len(requested: int | None, config: Mapping[str, Any], *, model: str, allows_longer: bool) -> int:
    """Return the longest sequence that the engine will serve, in tokens. `requested` is the engine argument.

    Raises:
        EngineError: neither the model nor the argument states it.
    """
    own = model_seq_len(config)
    if requested is not None:
        return requested if own is None or allows_longer else min(requested, own)
    if own is not None:
        return own
    found = "no max_position_embeddings" if config else "no config.json"
    allowed = "one that has it, or the engine argument max_seq_len"
    raise EngineError(f"max_seq_len: found none, and {found} of model {model!r}, allowed {allowed}")


def sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a model's `config.json`, then the parts of it that are about the language model."""
    yield config
    for name in _SECTIONS:
        if isinstance(section := config.get(name), Mapping):
            yield section


def _factor(scaling: object) -> float:
    if not isinstance(scaling, Mapping) or scaling.get("type", scaling.get("rope_type")) in _COUNTED:
        return 1.0
    factor = scaling.get("factor", 1.0)
    return float(factor) if type(factor) in (int, float) and factor > 0 else 1.0
