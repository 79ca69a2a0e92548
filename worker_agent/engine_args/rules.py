"""Engine arguments that the agent sets itself: named flags, forced values, omissions.

    forced                                     to                    reason
    backend                                    pytorch               KV events are published, and `_autodeploy` with the
                                                                     runtime `demollm` has none
    kv_cache_config.event_buffer_max_size      100000                KV events are published, and it is unset or 0
    kv_cache_config.kv_events_config           false                 KV events are published: a polled engine says more
      .enable_kv_cache_events                                        than one that streams (salts, adapters, media)
    kv_cache_config.enable_partial_reuse       false                 the connector is `kvbm`
    skip_tokenizer_init                        false                 the modality is multimodal, decoding is guided, or
                                                                     logits processors are loaded: each needs one
    disable_overlap_scheduler                  true                  a prefill worker, and the engine's version refuses
                                                                     context-only requests otherwise (below 1.3.0rc1)

    left out                                                         reason
    arguments that the backend lacks           each with a warning   the engine refuses it
    num_postprocess_workers                    with a warning        the agent does that work itself
    all but `ENCODE` of an encode worker       each with a warning   `MultimodalEncoder` takes nothing else

The engine gets only a user's arguments and these: every other argument has the engine's own default, which a model's
defaults may replace only while the argument is unset. An encode worker, which has neither a KV cache nor our tokenizer,
gets no forced arguments.

Source: `docs/SOURCES.md` D6.2 and D6.3 (flags, forced values, the encoder's list), E2.1 (100000). NVIDIA/TensorRT-LLM:
`tensorrt_llm/llmapi/llm.py`, `_build_model` (guided decoding takes the engine's own tokenizer);
`tensorrt_llm/llmapi/llm_utils.py`, `apply_model_defaults_to_llm_args` (defaults of a model give way to set
fields); `tensorrt_llm/executor/base_worker.py`, `_enqueue_request`, and PR #10755 (overlap);
`tensorrt_llm/_torch/pyexecutor/connectors/registry.py` (`KVBM`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from kv_protocol.fleet import Role
from kv_protocol.trtllm_versions import CONTEXT_WITH_OVERLAP, is_before
from worker_agent.engine_args.fields import LACKS, Backend
from worker_agent.engine_args.findings import ArgumentFinding, found, shown
from worker_agent.engine_args.layers import Path, Values, at, layer

EVENT_BUFFER_SIZE = 100_000
_STREAMING: Path = ("kv_cache_config", "kv_events_config", "enable_kv_cache_events")
ENCODE = frozenset({"model", "max_batch_size", "trust_remote_code", "tensor_parallel_size", "model_kwargs"})

KVBM: Mapping[str, str] = {
    "connector_module": "kvbm.trtllm_integration.connector",
    "connector_scheduler_class": "DynamoKVBMConnectorLeader",
    "connector_worker_class": "DynamoKVBMConnectorWorker",
}
"""The arguments of the preset `kvbm` of newer versions. Every supported version takes them written out."""

DEFAULTS = layer(
    "default", [((), {"model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "skip_tokenizer_init": True}, "default")]
)
"""The agent's defaults that differ from the engine's: a model, and no tokenizer, because the agent tokenizes."""

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
"""The agent's named flags, and the argument that each sets; `publish-metrics` sets `return_perf_metrics`, too."""


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's options that engine arguments depend on.

    `gpu_count` counts the GPUs that the engine may use, on all nodes; None: unknown. `allows_unknown`: arguments that
    `fields.py` does not know are passed on with a warning each, and an engine of an unsupported version is used.
    `engine_version` is the installed engine's; empty: none is installed, or it is unknown.
    """

    role: Role = "aggregated"
    publishes_kv_events: bool = False
    connector: Literal["none", "kvbm"] = "none"
    is_multimodal: bool = False
    has_logits_processors: bool = False
    gpu_count: int | None = None
    allows_unknown: bool = False
    engine_version: str = ""


def flag_layer(flags: Mapping[str, Any], circumstances: Circumstances) -> Values:
    """Return the layer of the named flags; `flags` maps names of `FLAGS` to values, None: not given."""
    entries = [(FLAGS[name], value, f"--{name}") for name, value in flags.items() if value is not None]
    if flags.get("publish-metrics"):
        entries.append((("return_perf_metrics",), True, "--publish-metrics"))
    if circumstances.connector == "kvbm":
        entries += [(("kv_connector_config", name), value, "--connector kvbm") for name, value in KVBM.items()]
    return layer("flag", entries)


def forced_layer(values: Values, circumstances: Circumstances) -> Values:
    """Return the forced values of the table that differ from the merged ones'."""
    if circumstances.role == "encode":
        return layer("forced", [])
    forced = [*_for_events(values, circumstances), *_for_others(values, circumstances)]
    return layer("forced", [(path, value, why) for path, value, why in forced if at(values, *path) != value])


def _for_events(values: Values, circumstances: Circumstances) -> Iterator[tuple[Path, Any, str]]:
    if not circumstances.publishes_kv_events:
        return
    if at(values, "backend") == "_autodeploy" and at(values, "runtime") == "demollm":
        yield ("backend",), "pytorch", "KV events are published"
    if not at(values, "kv_cache_config", "event_buffer_max_size"):
        yield ("kv_cache_config", "event_buffer_max_size"), EVENT_BUFFER_SIZE, "KV events are published"
    if at(values, *_STREAMING):
        yield _STREAMING, False, "KV events are polled"


def _for_others(values: Values, circumstances: Circumstances) -> Iterator[tuple[Path, Any, str]]:
    if circumstances.connector == "kvbm":
        yield ("kv_cache_config", "enable_partial_reuse"), False, "the connector is kvbm"
    version = circumstances.engine_version
    if circumstances.role == "prefill" and is_before(version, CONTEXT_WITH_OVERLAP):
        why = f"TensorRT-LLM {version} refuses context-only requests while the overlap scheduler is on"
        yield ("disable_overlap_scheduler",), True, why
    for needs_tokenizer, why in (
        (circumstances.is_multimodal, "the modality is multimodal"),
        (circumstances.has_logits_processors, "logits processors are loaded"),
        (at(values, "guided_decoding_backend") is not None, "decoding is guided"),
    ):
        if needs_tokenizer:
            yield ("skip_tokenizer_init",), False, why
            return


def backend_of(values: Values) -> Backend:
    """Return the engine's backend: `pytorch` if none is named."""
    return "_autodeploy" if at(values, "backend") == "_autodeploy" else "pytorch"


def pruned(values: Values, role: Role) -> tuple[Values, list[ArgumentFinding]]:
    """Return the values without arguments that the engine does not get, and a warning for each that a user gave."""
    left_out, warnings = dict(_left_out(values, role)), []
    for name, why in left_out.items():
        given = [each for path, each in values.items() if path[0] == name]
        places = [each.origin.place for each in given if each.origin.layer not in ("default", "forced")]
        if places:
            what, expected = f"{found(shown((name,), at(values, name)))}; left out", f"nothing {why}"
            warnings.append(
                ArgumentFinding(severity="warning", place=places[0], path=(name,), expected=expected, found=what)
            )
    return {path: each for path, each in values.items() if path[0] not in left_out}, warnings


def _left_out(values: Values, role: Role) -> Iterator[tuple[str, str]]:
    backend = backend_of(values)
    for name in sorted({path[0] for path in values}):
        if role == "encode":
            if name not in ENCODE:
                yield name, "of an encode worker, which takes only " + ", ".join(sorted(ENCODE))
        elif name == "num_postprocess_workers":
            yield name, "because the agent processes what the engine generates itself"
        elif name in LACKS[backend]:
            yield name, f"under backend {backend}: {LACKS[backend][name]}"
