"""Finds the data type of a TensorRT-LLM engine's KV cache (PyTorch backend), which the engine does not report.

    `kv_cache_config.dtype`      fp8, nvfp4: that one; `auto`: the checkpoint's
    `hf_quant_config.json`       `quantization.kv_cache_quant_algo`: FP8, NVFP4, ..
    `config.json`                a `quantization_config` with a key about the KV cache: unknown, because it depends on
                                 the engine's version whether that is read; else the model's own dtype
    argument `dtype`             the model's own, in place of `torch_dtype` (`dtype`) of `config.json`

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/_torch/pyexecutor/model_loader.py` (`validate_and_set_kv_cache_quant`),
`tensorrt_llm/_torch/model_config.py` (`load_hf_quant_config`).
"""

from collections.abc import Mapping
from typing import Any

from worker_agent.engines.trtllm.sequence_length import sections

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
    if any(_quantizes_kv(section.get("quantization_config")) for section in sections(config)):
        return ""
    own = [model_dtype, *(section.get(key) for section in sections(config) for key in ("torch_dtype", "dtype"))]
    return next((str(each).lower().removeprefix("torch.") for each in own if each not in _NAMED_BY_CHECKPOINT), "")


def _quantizes_kv(quantization: object) -> bool:
    return isinstance(quantization, Mapping) and any(
        key.startswith("kv_cache") and quantization[key] for key in quantization
    )
