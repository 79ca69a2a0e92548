"""Checks across engine arguments: conflicts with each other, or with the installed engine.

    found                                                               severity   reason
    block reuse off, although KV events are published                   warning    without reuse there are no events:
                                                                                   the router only balances load
    transceiver buffer < longest input, of a prefill worker             error      the KV of a longer input is never
                                                                                   transferred, and its blocks stay held
    the same of a decode worker                                         warning    prefill workers may allow only
                                                                                   shorter inputs
    transceiver missing or without backend, of a prefill/decode worker  warning    the environment may set it
    MoE tensor x expert x cluster parallel != tensor parallel           error      the engine's mapping refuses it
    MoE size that does not divide tensor parallel                       error      likewise
    tensor x pipeline x context parallel > GPUs                         error      the engine's processes do not start
    attention DP with one rank                                          warning    it has no effect
    more attention-DP ranks than a worker may have                      error      the registration is refused
    attention_dp_config without attention DP                            warning    it is ignored
    an installed engine outside the supported versions                  error      its arguments, handovers and events
                                                                                   may differ; a warning if unknown
                                                                                   arguments are allowed

The longest input is `max_seq_len` - 1, because at least one token is generated. If `max_seq_len` is not given, the
model defines it, and the buffer is not checked. The router checks that a prefill and a decode worker fit
together (`router/fleet/registry.py`).

Source: `docs/SOURCES.md` D4.2 (buffer), D6.3 (reuse) and E1.1; NVIDIA/TensorRT-LLM
`tensorrt_llm/mapping.py` (`Mapping.__init__`), `tensorrt_llm/llmapi/llm_args.py` (`_ParallelConfig.world_size`);
versions: `kv_protocol/trtllm_versions.py`.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Literal

from kv_protocol.ids import DP_RANK_MAX
from kv_protocol.trtllm_versions import SUPPORTED, is_supported
from worker_agent.engine_args.findings import ArgumentFinding
from worker_agent.engine_args.layers import Path, Tree, at, node_at
from worker_agent.engine_args.rules import Circumstances

_REUSE: Path = ("kv_cache_config", "enable_block_reuse")
_BUFFER: Path = ("cache_transceiver_config", "max_tokens_in_buffer")
_TRANSCEIVER: Path = ("cache_transceiver_config", "backend")
_MOE: tuple[Path, ...] = (("moe_tensor_parallel_size",), ("moe_expert_parallel_size",), ("moe_cluster_parallel_size",))
_WORLD: tuple[Path, ...] = (("tensor_parallel_size",), ("pipeline_parallel_size",), ("context_parallel_size",))

Severity = Literal["error", "warning"]
Check = Callable[[Tree, Circumstances], Iterator[ArgumentFinding]]


def findings(tree: Tree, circumstances: Circumstances) -> list[ArgumentFinding]:
    """Return what the checks in the table above find in the engine's arguments."""
    checks: tuple[Check, ...] = (_version, _reuse, _transceiver, _parallelism, _gpus, _attention_dp)
    return [finding for check in checks for finding in check(tree, circumstances)]


def world_size(tree: Tree) -> int:
    """Return how many GPUs the engine uses, on all nodes."""
    if at(tree, "backend") == "_autodeploy":
        return int(at(tree, "world_size") or 1)
    tensor, pipeline, context = (at(tree, *path) or 1 for path in _WORLD)
    return int(tensor * pipeline * context)


def attention_dp_size(tree: Tree) -> int:
    """Return how many KV caches the engine has: with attention DP one for each tensor-parallel rank, else one."""
    return int(at(tree, "tensor_parallel_size") or 1) if at(tree, "enable_attention_dp") else 1


def _reuse(tree: Tree, circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    if circumstances.publishes_kv_events and at(tree, *_REUSE) is False:
        expected = "true where KV events are published (without reuse there are none: the router only balances load)"
        yield _finding("warning", tree, _REUSE, "false", expected)


def _transceiver(tree: Tree, circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    role = circumstances.role
    if role not in ("prefill", "decode"):
        return
    if at(tree, *_TRANSCEIVER) is None:
        yield _finding("warning", tree, _TRANSCEIVER, "nothing", f"how a {role} worker's KV is transferred: NIXL, UCX")
    buffer, max_seq_len = at(tree, *_BUFFER), at(tree, "max_seq_len")
    if buffer is not None and max_seq_len is not None and buffer < max_seq_len - 1:
        expected = f"{max_seq_len - 1} or more, the longest input (max_seq_len - 1): a longer one is never transferred"
        yield _finding("error" if role == "prefill" else "warning", tree, _BUFFER, str(buffer), expected)


def _parallelism(tree: Tree, _circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    """Check MoE sizes. The engine computes a missing tensor or expert size from the others, and rounds it down."""
    tensor = at(tree, *_WORLD[0]) or 1
    if at(tree, "backend") == "_autodeploy" or (at(tree, *_WORLD[2]) or 1) > 1:
        return  # `_autodeploy` shards by `world_size`; with context parallelism the rule depends on its kind
    given = {path: size for path in _MOE if (size := at(tree, *path)) not in (None, -1)}
    product, are_complete = prod(given.values()), {_MOE[0], _MOE[1]} <= given.keys()
    if given and (product != tensor if are_complete else tensor % product):
        words = " x ".join(f"{path[0]} {size}" for path, size in given.items())
        expected = f"{'' if are_complete else 'a divisor of '}tensor_parallel_size, {tensor}"
        yield _finding("error", tree, next(iter(given)), f"{words} = {product}", expected)


def _gpus(tree: Tree, circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    count, needed = circumstances.gpu_count, world_size(tree)
    if count is None or needed <= count:
        return
    if at(tree, "backend") == "_autodeploy":
        yield _finding("error", tree, ("world_size",), str(needed), f"at most {count}, the GPUs there are")
    else:
        words = " x ".join(f"{path[0]} {size}" for path in _WORLD if (size := at(tree, *path)) is not None)
        yield _finding("error", tree, _WORLD[0], f"{words} = {needed}", f"at most {count} together, the GPUs there are")


def _attention_dp(tree: Tree, _circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    size = attention_dp_size(tree)
    if at(tree, "enable_attention_dp") and size == 1:
        expected = "tensor_parallel_size above 1 with it (attention_dp_size is 1: nothing is parallel)"
        yield _finding("warning", tree, ("enable_attention_dp",), "true", expected)
    if size > DP_RANK_MAX + 1:
        expected = f"an attention_dp_size of at most {DP_RANK_MAX + 1}, the ranks that a worker may have"
        yield _finding("error", tree, _WORLD[0], str(size), expected)
    if not at(tree, "enable_attention_dp") and at(tree, "attention_dp_config"):
        expected = "enable_attention_dp with it (it is ignored)"
        yield _finding("warning", tree, ("attention_dp_config",), "a mapping", expected)


def _version(_tree: Tree, circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    version = circumstances.engine_version
    if version and not is_supported(version):
        severity: Severity = "warning" if circumstances.allows_unknown else "error"
        yield ArgumentFinding(severity=severity, place="tensorrt_llm", found=f"version {version}", expected=SUPPORTED)


def _finding(severity: Severity, tree: Tree, path: Path, found: str, expected: str) -> ArgumentFinding:
    node = node_at(tree, path)
    place = "not given" if node is None else node.origin.place
    return ArgumentFinding(severity=severity, place=place, path=path, found=found, expected=expected)
