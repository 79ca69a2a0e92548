"""Arguments of one role made into those of another, or of another tensor-parallel size.

    to               `enable_block_reuse`  `cache_transceiver_config`   besides
    aggregated       true                  removed                      chunked prefill on, where an iteration is
                                                                        shorter than the longest prompt;
                                                                        without `disable_overlap_scheduler: true`
    prefill, decode  true                  kept, else `transceiver`;    -
                                           room for the longest prompt

    another tensor_parallel_size: a `moe_expert_parallel_size` or `moe_tensor_parallel_size` equal to the old size gets
    the new one; any other stays, and must divide the new one

Everything else stays as it is. Reuse is on because without it the engine has no KV events (`checks.py`).
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

Target = Literal["aggregated", "prefill", "decode"]
_TENSOR, _TRANSCEIVER, _OVERLAP = "tensor_parallel_size", "cache_transceiver_config", "disable_overlap_scheduler"
_MOE = ("moe_expert_parallel_size", "moe_tensor_parallel_size")


class NotConvertible(Exception):
    """The arguments have no counterpart of that role or size; the text says why."""


def converted(arguments: Mapping[str, Any], target: Target, transceiver: str = "UCX") -> dict[str, Any]:
    """Return the arguments for a worker of the role `target`; nothing of `arguments` is shared or changed.

    Raises:
        NotConvertible: a section that would change is no mapping.
    """
    result = deepcopy(dict(arguments))
    result["kv_cache_config"] = {**_section(result, "kv_cache_config"), "enable_block_reuse": True}
    if target != "aggregated":
        result[_TRANSCEIVER] = _with_backend(result, transceiver)
        return result
    result.pop(_TRANSCEIVER, None)
    if result.get(_OVERLAP):
        del result[_OVERLAP]
    if not _takes_whole_prompts(result):
        result["enable_chunked_prefill"] = True
    return result


def resized(arguments: Mapping[str, Any], tensor_parallel_size: int) -> dict[str, Any]:
    """Return the arguments for that many tensor-parallel GPUs; nothing of `arguments` is shared or changed.

    Raises:
        NotConvertible: sizes or slots of the experts do not fit the new size.
    """
    result = deepcopy(dict(arguments))
    old = result.get(_TENSOR) or 1
    result[_TENSOR] = tensor_parallel_size
    for name in _MOE:
        size = result.get(name)
        if size == old and old > 1:
            result[name] = tensor_parallel_size
        elif size not in (None, -1) and tensor_parallel_size % size:
            raise NotConvertible(f"{name}: found {size}, allowed a divisor of {_TENSOR}, {tensor_parallel_size}")
    experts, tensor = (result.get(name) or -1 for name in _MOE)
    if min(experts, tensor) > 0 and experts * tensor != tensor_parallel_size:
        found = f"{' x '.join(_MOE)}: found {experts} x {tensor}"
        raise NotConvertible(f"{found}, allowed a product of {_TENSOR}, {tensor_parallel_size}")
    _check_slots(result)
    return result


def _with_backend(arguments: dict[str, Any], backend: str) -> dict[str, Any]:
    section = _section(arguments, _TRANSCEIVER)
    if section.get("backend") is None:
        section["backend"] = backend
    longest = arguments.get("max_seq_len")
    if longest is not None and section.get("max_tokens_in_buffer") is None:
        section["max_tokens_in_buffer"] = longest
    return section


def _takes_whole_prompts(arguments: Mapping[str, Any]) -> bool:
    """Whether the longest prompt is known to fit one iteration, or `max_num_tokens` is not given."""
    tokens, longest = arguments.get("max_num_tokens"), arguments.get("max_seq_len")
    return tokens is None or (longest is not None and longest - 1 <= tokens)


def _check_slots(arguments: dict[str, Any]) -> None:
    balancer, experts = _section(arguments, "moe_config").get("load_balancer"), arguments.get(_MOE[0])
    slots = balancer.get("num_slots") if isinstance(balancer, dict) else None
    if slots and experts and experts > 0 and slots % experts:
        found = f"moe_config.load_balancer.num_slots: found {slots}"
        raise NotConvertible(f"{found}, allowed a multiple of {_MOE[0]}, {experts}")


def _section(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    section = arguments.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise NotConvertible(f"{name}: found {type(section).__name__}, allowed a mapping")
    return section
