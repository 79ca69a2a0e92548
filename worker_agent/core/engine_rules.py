"""Which engine arguments the agent itself knows better: defaults, its named flags, forced values, what is left out.

    forced                                     to                    because
    backend                                    pytorch               KV events are published, and it is neither that nor
                                                                     `_autodeploy` with the runtime that has them
    kv_cache_config.event_buffer_max_size      100000                KV events are polled, and it is unset or 0
    kv_cache_config.enable_partial_reuse       false                 the connector is `kvbm`
    skip_tokenizer_init                        false                 the modality is multimodal, decoding is guided, or
                                                                     logits processors are loaded: each needs one

    left out                                                         because
    what the backend does not know             each with a warning   the engine refuses it
    num_postprocess_workers                    with a warning        the agent does that work itself
    all but `ENCODE` of an encode worker       each with a warning   `MultimodalEncoder` takes nothing else
    the default max_batch_size                 under `_autodeploy`   where max_num_tokens is lower

What is left out of the defaults goes without a warning: nobody asked for it. On an encode worker, which has neither KV
cache nor tokenizer of ours, nothing is forced.

Source: `dynamo_reference.md` sections 6.2 and 6.3 (defaults, flags, forced values, the encoder's list);
`event_plane.md` section 2.1 (100000). Guided decoding builds its grammar from the engine's own tokenizer:
NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/llm.py`, `_build_model` (`_xgrammar_tokenizer_info(self.tokenizer)`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from worker_agent.core.engine_field_kinds import Backend, found
from worker_agent.core.engine_fields import ENGINE
from worker_agent.core.engine_findings import Finding, shown
from worker_agent.core.engine_layers import Layer, Origin, Path, Section, Tree, Value, at, plain, without

Role = Literal["aggregated", "prefill", "decode", "encode"]
EVENT_BUFFER_SIZE = 100_000
ENCODE = frozenset({"model", "max_batch_size", "trust_remote_code", "tensor_parallel_size", "model_kwargs"})

DEFAULTS = Layer(
    name="default",
    place="default",
    values={
        "model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "backend": "pytorch",
        "load_format": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_attention_dp": False,
        "max_batch_size": 2048,
        "max_num_tokens": 8192,
        "max_beam_width": 1,
        "skip_tokenizer_init": True,
        "return_perf_metrics": False,
        "enable_iter_perf_stats": False,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.9, "tokens_per_block": 32},
        "scheduler_config": {
            "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
            "dynamic_batch_config": {
                "enable_batch_size_tuning": True,
                "enable_max_num_tokens_tuning": False,
                "dynamic_batch_moving_average_window": 128,
            },
        },
    },
)
"""Sizes that the peer leaves to the engine stand here as the engine's own, so that they are seen and checked."""

FLAGS: Mapping[str, Path] = {
    "model": ("model",),
    "backend": ("backend",),
    "tensor-parallel-size": ("tensor_parallel_size",),
    "pipeline-parallel-size": ("pipeline_parallel_size",),
    "expert-parallel-size": ("moe_expert_parallel_size",),
    "enable-attention-dp": ("enable_attention_dp",),
    "kv-block-size": ("kv_cache_config", "tokens_per_block"),
    "gpus-per-node": ("gpus_per_node",),
    "max-batch-size": ("max_batch_size",),
    "max-num-tokens": ("max_num_tokens",),
    "max-seq-len": ("max_seq_len",),
    "max-beam-width": ("max_beam_width",),
    "free-gpu-memory-fraction": ("kv_cache_config", "free_gpu_memory_fraction"),
    "load-format": ("load_format",),
    "guided-decoding-backend": ("guided_decoding_backend",),
    "publish-metrics": ("enable_iter_perf_stats",),
}
"""Our named flags, and the argument that each sets."""


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent does with the engine, as far as its arguments depend on it.

    `gpu_count` counts the GPUs that the engine may use, on all nodes; None: not known. `allows_unknown`: arguments that
    `engine_fields` does not know are passed on with a warning each.
    """

    role: Role = "aggregated"
    publishes_kv_events: bool = False
    connector: Literal["none", "kvbm"] = "none"
    is_multimodal: bool = False
    has_logits_processors: bool = False
    gpu_count: int | None = None
    allows_unknown: bool = False


def flag_layer(given: Mapping[str, Any], circumstances: Circumstances) -> Layer:
    """Return what the named flags say; `given` maps names of `FLAGS` to values, None: not given."""
    said = [(FLAGS[name], value, f"--{name}") for name, value in given.items() if value is not None]
    if circumstances.connector != "none":
        said.append((("kv_connector_config", "connector"), circumstances.connector, "--connector"))
    return _layer("flag", said)


def _layer(name: Literal["flag", "forced"], said: list[tuple[Path, Any, str]]) -> Layer:
    values: dict[str, Any] = {}
    for path, value, _ in said:
        inner = values
        for above in path[:-1]:
            inner = inner.setdefault(above, {})
        inner[path[-1]] = value
    return Layer(name=name, values=values, place=name, places={path: place for path, _, place in said})


def forced_layer(tree: Tree, circumstances: Circumstances) -> Layer:
    """Return what has to be as the table says, where it is not."""
    if circumstances.role == "encode":
        return _layer("forced", [])
    wanted = [*_for_events(tree, circumstances), *_for_others(tree, circumstances)]
    return _layer("forced", [(path, value, why) for path, value, why in wanted if at(tree, *path) != value])


def _for_events(tree: Tree, circumstances: Circumstances) -> Iterator[tuple[Path, Any, str]]:
    if not circumstances.publishes_kv_events:
        return
    if at(tree, "backend") != "_autodeploy" or at(tree, "runtime") == "demollm":
        yield ("backend",), "pytorch", "KV events are published"
    if not streams_events(tree) and not at(tree, "kv_cache_config", "event_buffer_max_size"):
        yield ("kv_cache_config", "event_buffer_max_size"), EVENT_BUFFER_SIZE, "KV events are published"


def _for_others(tree: Tree, circumstances: Circumstances) -> Iterator[tuple[Path, Any, str]]:
    if circumstances.connector == "kvbm":
        yield ("kv_cache_config", "enable_partial_reuse"), False, "the connector is kvbm"
    for needs_tokenizer, why in (
        (circumstances.is_multimodal, "the modality is multimodal"),
        (circumstances.has_logits_processors, "logits processors are loaded"),
        (at(tree, "guided_decoding_backend") is not None, "decoding is guided"),
    ):
        if needs_tokenizer:
            yield ("skip_tokenizer_init",), False, why
            return


def streams_events(tree: Tree) -> bool:
    """Whether the engine publishes its KV events over ZMQ itself, instead of keeping them until they are polled."""
    events = ("kv_cache_config", "kv_events_config")
    return at(tree, *events, "enable_kv_cache_events") is True and at(tree, *events, "publisher") in (None, "zmq")


def pruned(tree: Tree, role: Role) -> tuple[Tree, list[Finding]]:
    """Return what the engine gets, and a warning for each argument that somebody gave and it does not get."""
    told = []
    for name, why in _left_out(tree, role):
        node = tree[name]
        asked = [origin for origin in _origins(node) if origin.layer not in ("default", "forced")]
        if asked:
            told.append(_left_out_finding((name,), node, asked[0], why))
        tree = without(tree, (name,))
    return tree, told


def _left_out(tree: Tree, role: Role) -> Iterator[tuple[str, str]]:
    backend: Backend = "_autodeploy" if at(tree, "backend") == "_autodeploy" else "pytorch"
    for name in sorted(tree):
        field = ENGINE.fields.get(name)
        if role == "encode":
            if name not in ENCODE:
                yield name, "of an encode worker, which takes only " + ", ".join(sorted(ENCODE))
        elif name == "num_postprocess_workers":
            yield name, "because the agent processes what the engine generates itself"
        elif field and backend in field.pruned:
            yield name, f"under backend {backend}: {field.pruned[backend]}"
        elif name == "max_batch_size" and backend == "_autodeploy" and _is_default_above_tokens(tree):
            yield name, "that exceeds max_num_tokens: the engine lowers its own, and refuses one that is given"


def _is_default_above_tokens(tree: Tree) -> bool:
    node, tokens = tree["max_batch_size"], at(tree, "max_num_tokens")
    return node.origin.layer == "default" and tokens is not None and plain(node) > tokens


def _left_out_finding(path: Path, node: Value | Section, origin: Origin, why: str) -> Finding:
    what = found(shown(path, plain(node)))
    return Finding(
        severity="warning", place=origin.place, path=path, expected=f"nothing {why}", found=f"{what}; left out"
    )


def _origins(node: Value | Section) -> list[Origin]:
    if isinstance(node, Value) or not node.below:
        return [node.origin]
    return [origin for inner in node.below.values() for origin in _origins(inner)]
