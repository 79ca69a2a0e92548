"""Engine arguments that the agent sets itself, or leaves out, and what it checks across them.

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

    found                                                               severity   reason
    block reuse off, although KV events are published                   warning    without reuse there are no events:
                                                                                   the router only balances load
    transceiver buffer < longest input, of a prefill worker             error      the KV of a longer input is never
                                                                                   transferred, and its blocks stay held
    the same of a decode worker                                         warning    prefill workers may allow only
                                                                                   shorter inputs
    transceiver missing or without backend, of a prefill/decode worker  warning    the environment may set it
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
`tensorrt_llm/llmapi/llm_args.py` (`_ParallelConfig.world_size`); of `_autodeploy`
`tensorrt_llm/_torch/auto_deploy/llm_args.py` (`LlmArgs`, which refuses names that it does not know) at 01e5db066ef7;
versions: `kv_protocol/trtllm_versions.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from kv_protocol.fleet import Role
from kv_protocol.ids import DP_RANK_MAX
from kv_protocol.trtllm_versions import CONTEXT_WITH_OVERLAP, SUPPORTED, is_before, is_supported
from worker_agent.engine_args.layers import ArgumentFinding, Path, Severity, Values, at, found, layer, origin_of, shown

Backend = Literal["pytorch", "_autodeploy"]

EVENT_BUFFER_SIZE = 100_000
_STREAMING: Path = ("kv_cache_config", "kv_events_config", "enable_kv_cache_events")
_ONLY_AUTODEPLOY = """
    compile_backend device draft_checkpoint_loader mode model_factory runtime skip_loading_weights
    speculative_model_kwargs tokenizer_kwargs transforms world_size yaml_extra
"""
_SHARDS = """
    context_parallel_size cp_config enable_attention_dp moe_cluster_parallel_size moe_expert_parallel_size
    moe_tensor_parallel_size pipeline_parallel_size tensor_parallel_size
"""
LACKS: dict[Backend, dict[str, str]] = {
    "pytorch": dict.fromkeys(_ONLY_AUTODEPLOY.split(), "only `_autodeploy` knows it"),
    "_autodeploy": {
        **dict.fromkeys(_SHARDS.split(), "it shards by `world_size` alone"),
        "gpus_per_node": "it counts the GPUs itself",
    },
}
"""The arguments that a backend does not get, and why."""
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

    `gpu_count` counts the GPUs that the engine may use, on all nodes; None: unknown. `allows_unknown`: an engine of an
    unsupported version is used, with a warning. `engine_version` is the installed engine's; empty: none is installed.
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


_REUSE: Path = ("kv_cache_config", "enable_block_reuse")
_BUFFER: Path = ("cache_transceiver_config", "max_tokens_in_buffer")
_TRANSCEIVER: Path = ("cache_transceiver_config", "backend")
_WORLD: tuple[Path, ...] = (("tensor_parallel_size",), ("pipeline_parallel_size",), ("context_parallel_size",))

Check = Callable[[Values, Circumstances], Iterator[ArgumentFinding]]


def conflicts(values: Values, circumstances: Circumstances) -> list[ArgumentFinding]:
    """Return what the checks in the table above find in the engine's arguments."""
    checks: tuple[Check, ...] = (_version, _reuse, _transceiver, _gpus, _attention_dp)
    return [finding for check in checks for finding in check(values, circumstances)]


def world_size(values: Values) -> int:
    """Return how many GPUs the engine uses, on all nodes."""
    if at(values, "backend") == "_autodeploy":
        return int(at(values, "world_size") or 1)
    tensor, pipeline, context = (at(values, *path) or 1 for path in _WORLD)
    return int(tensor * pipeline * context)


def attention_dp_size(values: Values) -> int:
    """Return how many KV caches the engine has: with attention DP one for each tensor-parallel rank, else one."""
    return int(at(values, "tensor_parallel_size") or 1) if at(values, "enable_attention_dp") else 1


def _reuse(values: Values, circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    if circumstances.publishes_kv_events and at(values, *_REUSE) is False:
        expected = "true where KV events are published (without reuse there are none: the router only balances load)"
        yield _finding("warning", values, _REUSE, "false", expected)


def _transceiver(values: Values, circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    role = circumstances.role
    if role not in ("prefill", "decode"):
        return
    if at(values, *_TRANSCEIVER) is None:
        yield _finding(
            "warning", values, _TRANSCEIVER, "nothing", f"how a {role} worker's KV is transferred: NIXL, UCX"
        )
    buffer, max_seq_len = at(values, *_BUFFER), at(values, "max_seq_len")
    if buffer is not None and max_seq_len is not None and buffer < max_seq_len - 1:
        expected = f"{max_seq_len - 1} or more, the longest input (max_seq_len - 1): a longer one is never transferred"
        yield _finding("error" if role == "prefill" else "warning", values, _BUFFER, str(buffer), expected)


def _gpus(values: Values, circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    count, needed = circumstances.gpu_count, world_size(values)
    if count is None or needed <= count:
        return
    if at(values, "backend") == "_autodeploy":
        yield _finding("error", values, ("world_size",), str(needed), f"at most {count}, the GPUs there are")
    else:
        words = " x ".join(f"{path[0]} {size}" for path in _WORLD if (size := at(values, *path)) is not None)
        yield _finding(
            "error", values, _WORLD[0], f"{words} = {needed}", f"at most {count} together, the GPUs there are"
        )


def _attention_dp(values: Values, _circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    size = attention_dp_size(values)
    if at(values, "enable_attention_dp") and size == 1:
        expected = "tensor_parallel_size above 1 with it (attention_dp_size is 1: nothing is parallel)"
        yield _finding("warning", values, ("enable_attention_dp",), "true", expected)
    if size > DP_RANK_MAX + 1:
        expected = f"an attention_dp_size of at most {DP_RANK_MAX + 1}, the ranks that a worker may have"
        yield _finding("error", values, _WORLD[0], str(size), expected)
    if not at(values, "enable_attention_dp") and at(values, "attention_dp_config"):
        expected = "enable_attention_dp with it (it is ignored)"
        yield _finding("warning", values, ("attention_dp_config",), "a mapping", expected)


def _version(_values: Values, circumstances: Circumstances) -> Iterator[ArgumentFinding]:
    version = circumstances.engine_version
    if version and not is_supported(version):
        severity: Severity = "warning" if circumstances.allows_unknown else "error"
        yield ArgumentFinding(severity=severity, place="tensorrt_llm", found=f"version {version}", expected=SUPPORTED)


def _finding(severity: Severity, values: Values, path: Path, found: str, expected: str) -> ArgumentFinding:
    origin = origin_of(values, path)
    place = "not given" if origin is None else origin.place
    return ArgumentFinding(severity=severity, place=place, path=path, found=found, expected=expected)
