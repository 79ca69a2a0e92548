"""Computes the longest sequence of a TensorRT-LLM engine (PyTorch backend) before the engine is loaded.

    the model           `max_position_embeddings`, times `rope_scaling.factor` (rounded up) unless the kind of scaling
                        is one of `_COUNTED`: there the positions are scaled already
    the argument        `max_seq_len`: the smaller of it and the model's. With TLLM_ALLOW_LONG_MAX_MODEL_LEN
                        it counts alone
    neither             the engine is not loaded

The engine computes this length in its own process and does not report it: `llm.args.max_seq_len` stays None. For a
model without positions it assumes 2,048 tokens; the agent requires the argument instead. `max_input_len` has no effect.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/_torch/models/modeling_utils.py` (`infer_max_seq_len`),
`tensorrt_llm/_torch/pyexecutor/model_engine.py` (`_init_max_seq_len`), `tensorrt_llm/executor/base_worker.py`
(`setup_engine`).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

_COUNTED = ("su", "longrope", "llama3", "yarn")
_SECTIONS = ("text_config", "llm_config", "language_config")
"""The keys under which multimodal models have the configuration of their language model."""


class SequenceLengthUnknown(Exception):
    """Neither the model nor the argument bounds a sequence."""


def model_seq_len(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence of a model in tokens, by its `config.json`; None where that has no positions."""
    for section in sections(config):
        positions = section.get("max_position_embeddings")
        if type(positions) is int and positions > 0:
            return math.ceil(positions * _factor(section.get("rope_scaling")))
    return None


def engine_seq_len(requested: int | None, config: Mapping[str, Any], *, model: str, allows_longer: bool) -> int:
    """Return the longest sequence that the engine will serve, in tokens. `requested` is the engine argument.

    Raises:
        SequenceLengthUnknown: neither the model nor the argument has it.
    """
    own = model_seq_len(config)
    if requested is not None:
        return requested if own is None or allows_longer else min(requested, own)
    if own is not None:
        return own
    found = "no max_position_embeddings" if config else "no config.json"
    allowed = "one that has it, or the engine argument max_seq_len"
    raise SequenceLengthUnknown(f"max_seq_len: found none, and {found} of model {model!r}, allowed {allowed}")


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
