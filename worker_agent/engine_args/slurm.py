"""Engine arguments and nodes of prefill and decode workers within one Slurm allocation.

    tasks per node    4(x2),3 = 4 4 3, in the order of the node list     one task is one GPU
    a worker          within one node, or on whole nodes that follow each other
    placement         prefill workers first, then decode workers; each takes the first nodes that have room

    experts' backend                        NVFP4 on B200   FP8 on B200   H200      reason
    attention DP, 16 GPUs or more           CUTEDSL         DEEPGEMM      CUTLASS   many experts; load balancing
    attention DP, fewer                     CUTLASS         DEEPGEMM      CUTLASS   throughput
    no attention DP                         TRTLLM          TRTLLM        CUTLASS   latency; TRTLLM needs a B200

`WIDEEP` is never chosen: it is refused from August 2026 on, and no value from 1.3.0rc27 on. The others are values of
every supported version. DEEPGEMM is for B200 alone, with FP8 block scales.

Source: Slurm's `sbatch`, SLURM_TASKS_PER_NODE; NVIDIA/TensorRT-LLM PRs #9592, #17119 (DEEPGEMM on Hopper), #17797;
`examples/wide_ep/README.md`; `tensorrt_llm/llmapi/llm_args.py`, `MoeLoadBalancerConfig.setup` (slots).
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Gpu = Literal["b200", "h200"]
Precision = Literal["nvfp4", "fp8"]
_PART = re.compile(r"([1-9][0-9]{0,3})(?:\(x([1-9][0-9]{0,3})\))?")
_NODES_MAX = 4096
_WIDE = 16


class ShapeRefused(Exception):
    """The workers do not fit the allocation, or the shape contradicts itself; the text says why."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one role. `slots` are those of the expert load balancer, 0: none; `mtp_layers` 0: no speculation."""

    role: Literal["prefill", "decode"]
    workers: int
    gpus: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    attention_dp: bool = False
    kv_dtype: str = "fp8"
    mtp_layers: int = 0
    slots: int = 0


class PlacedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and its nodes; `gpus_per_node` GPUs of each."""

    role: Literal["prefill", "decode"]
    number: int
    nodes: tuple[str, ...]
    gpus_per_node: int


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Return the tasks of each node; raise `ShapeRefused` for another form."""
    tasks: list[int] = []
    for part in text.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            raise ShapeRefused(f"tasks per node {text[:80]!r}: expected counts as Slurm writes them: 4(x2),3")
        tasks += [int(found[1])] * int(found[2] or 1)
        if len(tasks) > _NODES_MAX:
            raise ShapeRefused(f"tasks per node {text[:80]!r}: expected at most {_NODES_MAX} nodes")
    return tuple(tasks)


def placed(nodes: Sequence[str], tasks: Sequence[int], shapes: Sequence[Shape]) -> list[PlacedWorker]:
    """Return where each worker runs; no GPU has two workers.

    Raises:
        ShapeRefused: there are too few nodes or tasks, or counts of nodes and tasks differ.
    """
    if len(nodes) != len(tasks):
        raise ShapeRefused(f"{len(nodes)} nodes, but tasks of {len(tasks)}")
    free, result = list(tasks), list[PlacedWorker]()
    for shape in shapes:
        for number in range(shape.workers):
            at = _room(free, tasks, shape.gpus)
            if not at:
                needed = sum(each.workers * each.gpus for each in shapes)
                raise ShapeRefused(
                    f"{shape.role} worker {number} of {shape.gpus} GPUs does not fit: all workers need {needed} GPUs, "
                    f"{len(nodes)} nodes have {sum(tasks)}"
                )
            taken = shape.gpus // len(at)
            for index in at:
                free[index] -= taken
            result.append(
                PlacedWorker(
                    role=shape.role, number=number, nodes=tuple(nodes[index] for index in at), gpus_per_node=taken
                )
            )
    return result


def _room(free: Sequence[int], tasks: Sequence[int], gpus: int) -> range:
    """Return the first nodes with room for a worker; empty: none."""
    for first in range(len(free)):
        if free[first] >= gpus:
            return range(first, first + 1)
        size = tasks[first]
        count, rest = divmod(gpus, size)
        whole = range(first, first + count)
        if count > 1 and not rest and whole.stop <= len(free) and all(free[at] == tasks[at] == size for at in whole):
            return whole
    return range(0)


def moe_backend(gpu: Gpu, precision: Precision, shape: Shape) -> str:
    """Return the backend of the experts by the table above."""
    if gpu == "h200":
        if precision == "nvfp4":
            raise ShapeRefused("NVFP4 needs a B200: an H200 does not compute with it")
        return "CUTLASS"
    if not shape.attention_dp:
        return "TRTLLM"
    if precision == "fp8":
        return "DEEPGEMM"
    return "CUTEDSL" if shape.gpus >= _WIDE else "CUTLASS"


def engine_arguments(shape: Shape, backend: str, gpus_per_node: int) -> dict[str, Any]:
    """Return the arguments of the shape's workers.

    Raises:
        ShapeRefused: the slots are no multiple of the GPUs.
    """
    if shape.slots % shape.gpus:
        raise ShapeRefused(f"{shape.role}: {shape.slots} slots are no multiple of {shape.gpus} GPUs")
    arguments: dict[str, Any] = {
        "tensor_parallel_size": shape.gpus,
        "moe_expert_parallel_size": shape.gpus,
        "gpus_per_node": gpus_per_node,
        "enable_attention_dp": shape.attention_dp,
        "max_batch_size": shape.max_batch_size,
        "max_num_tokens": shape.max_num_tokens,
        "max_seq_len": shape.max_seq_len,
        "kv_cache_config": {"dtype": shape.kv_dtype, "enable_block_reuse": True, "free_gpu_memory_fraction": 0.8},
        "moe_config": {"backend": backend},
        "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": shape.max_seq_len},
    }
    if shape.slots:
        arguments["moe_config"]["load_balancer"] = {"num_slots": shape.slots, "layer_updates_per_iter": 1}
    if shape.mtp_layers:
        arguments["speculative_config"] = {"decoding_type": "MTP", "num_nextn_predict_layers": shape.mtp_layers}
    if shape.role == "decode":
        return arguments | {"cuda_graph_config": {"enable_padding": True, "max_batch_size": shape.max_batch_size}}
    return arguments | {"enable_chunked_prefill": True}
