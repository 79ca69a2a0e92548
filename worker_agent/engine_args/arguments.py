"""The engine's effective arguments: all layers merged, with what the agent sets itself, leaves out, and checks.

    default < flag < file < override < forced    `layers.py`: merged, each value with its origin
    in each layer                                the types of what the agent reads are checked: `_READ`
    once merged                                  `forced_layer` sets values, `pruned` leaves out what the engine does
                                                 not take, and `conflicts` finds arguments that do not fit together

The engine gets our `DEFAULTS`, what a user set and the engine takes, and forced arguments: every other argument has
the engine's own default, which a model's defaults may replace only while the argument is unset. An encode worker, which
has neither a KV cache nor our tokenizer, gets no forced arguments.

All other names and values are checked by the installed engine's own pydantic class, before the weights are loaded. If
it refuses one, `worker_agent/engines/trtllm/bindings.py` names the layer and place that set it.

Source: `docs/SOURCES.md` D4.2 (buffer), D6.2 and D6.3 (flags, forced values, reuse, the encoder's list), E1.1, E2.1
(100000). NVIDIA/TensorRT-LLM: `tensorrt_llm/llmapi/llm.py`, `_build_model` (guided decoding takes the engine's own
tokenizer); `tensorrt_llm/llmapi/llm_utils.py`, `apply_model_defaults_to_llm_args` (defaults of a model give way to set
fields); `tensorrt_llm/executor/base_worker.py`, `_enqueue_request`, and PR #10755 (overlap);
`tensorrt_llm/_torch/pyexecutor/connectors/registry.py` (`KVBM`); `tensorrt_llm/llmapi/llm_args.py` at
0004396720054fd8e205cbf616f21f0b57c6b412 (types, `_ParallelConfig.world_size`); of `_autodeploy`
`tensorrt_llm/_torch/auto_deploy/llm_args.py` (`LlmArgs`, which refuses names that it does not know) at 01e5db066ef7.

Versions of TensorRT-LLM (the full table: `docs/TENSORRT_LLM.md`; the extra `trtllm` in `pyproject.toml` has the range):

    version      what changed                                                       source
    1.3.0rc1     a context-only request is taken while the overlap scheduler is on  PR #10755, release notes
    1.3.0rc27    `moe_config.backend` has no `WIDEEP`                               PR #17797, page `MoeConfig`
    1.4.0rc0     `kv_cache_config.kv_events_config` is refused at start             `docs/source/features/kvcache.md`
                                                                                    @ 0076e939
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from kv_protocol.fleet import Role
from kv_protocol.ids import DP_RANK_MAX
from worker_agent.engine_args.layers import (
    ArgumentFinding,
    EffectiveValue,
    EngineArgsInvalid,
    Path,
    Replacement,
    Severity,
    Values,
    at,
    first_at,
    found,
    layer,
    merge,
    nested,
    shown,
)

Backend = Literal["pytorch", "_autodeploy"]

EVENT_BUFFER_SIZE = 100_000
_STREAMING: Path = ("kv_cache_config", "kv_events_config", "enable_kv_cache_events")
_EVENT_BUFFER: Path = ("kv_cache_config", "event_buffer_max_size")
_PARTIAL_REUSE: Path = ("kv_cache_config", "enable_partial_reuse")
_REUSE: Path = ("kv_cache_config", "enable_block_reuse")
_NO_TOKENIZER: Path = ("skip_tokenizer_init",)
_BUFFER: Path = ("cache_transceiver_config", "max_tokens_in_buffer")
_TRANSCEIVER: Path = ("cache_transceiver_config", "backend")
_WORLD: tuple[Path, ...] = (("tensor_parallel_size",), ("pipeline_parallel_size",), ("context_parallel_size",))
_POSTPROCESS = "num_postprocess_workers"
_OURS = ("default", "forced")
"""The layers that are not a user's."""
ENCODE = frozenset({"model", "max_batch_size", "trust_remote_code", "tensor_parallel_size", "model_kwargs"})
"""All arguments that an encode worker's engine takes."""

KVBM: Mapping[str, str] = {
    "connector_module": "kvbm.trtllm_integration.connector",
    "connector_scheduler_class": "DynamoKVBMConnectorLeader",
    "connector_worker_class": "DynamoKVBMConnectorWorker",
}
"""Newer versions have these arguments as the preset `kvbm`; every supported version takes them one by one."""

DEFAULTS = layer(
    "default", [((), {"model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "skip_tokenizer_init": True}, "default")]
)
"""The agent's defaults that differ from the engine's: a model, and no tokenizer, because the agent tokenizes."""

_PATHS: Mapping[str, Path] = {
    "expert-parallel-size": ("moe_expert_parallel_size",),
    "free-gpu-memory-fraction": ("kv_cache_config", "free_gpu_memory_fraction"),
    "kv-block-size": ("kv_cache_config", "tokens_per_block"),
    "publish-metrics": ("enable_iter_perf_stats",),
}
"""The arguments that are named otherwise than their flags; `publish-metrics` sets `return_perf_metrics`, too."""
_Count = Annotated[int, Meta(ge=1)]
_READ: dict[str, Any] = {
    "backend": Backend,
    "cache_transceiver_config.max_tokens_in_buffer": _Count | None,
    "context_parallel_size": _Count,
    "enable_attention_dp": bool,
    "enable_chunked_prefill": bool,
    "enable_iter_perf_stats": bool,
    "enable_lora": bool,
    "kv_cache_config.enable_block_reuse": bool,
    "kv_cache_config.event_buffer_max_size": Annotated[int, Meta(ge=0)],
    "kv_cache_config.kv_events_config.enable_kv_cache_events": bool,
    "kv_cache_config.tokens_per_block": Literal[2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096],
    "max_batch_size": _Count | None,
    "max_num_tokens": _Count | None,
    "max_seq_len": Annotated[int, Meta(ge=2)] | None,
    "model": Annotated[str, Meta(min_length=1)],
    "model_kwargs": dict[Any, Any] | None,
    "pipeline_parallel_size": _Count,
    "tensor_parallel_size": _Count,
    "world_size": Annotated[int, Meta(ge=0)],
}
"""The arguments that the agent computes with. A block's size is a power of two above 1: `docs/SOURCES.md` E1.1; the
largest is the fleet's own bound."""


SUPPORTED = "1.3.0rc0 or later, below 1.5"
_OLDEST, _NEXT_LINE, CONTEXT_WITH_OVERLAP = (1, 3, 0, 0), (1, 5), (1, 3, 0, 1)
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?:rc(\d{1,6}))?(?:\.post(\d{1,6}))?(?:\+[\w.]+)?")
_RELEASE = 1 << 30
"""The candidate number of a final release: it comes after every candidate."""


def parse_version(text: str) -> tuple[int, ...] | None:
    """Return major, minor, patch, candidate and post of a version, in the order of PEP 440; None for another form."""
    if (found := _VERSION.fullmatch(text)) is None:
        return None
    major, minor, patch, candidate, post = found.groups()
    return int(major), int(minor), int(patch or 0), _RELEASE if candidate is None else int(candidate), int(post or 0)


def is_supported(text: str) -> bool:
    """Return whether the version that `text` names is in the range `SUPPORTED`; a text of another form is not."""
    version = parse_version(text)
    return version is not None and _OLDEST <= version < _NEXT_LINE


def is_before(text: str, other: tuple[int, ...]) -> bool:
    """Return whether `text` names a version that is older than `other`; False if it names none."""
    version = parse_version(text)
    return version is not None and version < other


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's options that engine arguments are read from, or depend on.

    `flags` has each flag's value by name, None: not given; `extra` is a YAML file, `override` a JSON object, `dynamic`
    are the words that no option of the command took. `given` names the options that are not at their defaults.

    `gpu_count` counts the GPUs that the engine may use, on all nodes; None: unknown. `allows_unknown`: an engine of an
    unsupported version is used, with a warning. `engine_version` is the installed engine's; empty: none is installed.
    """

    flags: Mapping[str, Any] = {}
    extra: str | None = None
    override: str | None = None
    dynamic: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    role: Role = "aggregated"
    publishes_kv_events: bool = False
    connector: Literal["none", "kvbm"] = "none"
    is_multimodal: bool = False
    has_logits_processors: bool = False
    gpu_count: int | None = None
    allows_unknown: bool = False
    engine_version: str = ""


def flag_path(name: str) -> Path:
    """Return the argument that the flag `--name` sets."""
    return _PATHS.get(name, (name.replace("-", "_"),))


def flag_layer(options: EngineOptions) -> Values:
    """Return the layer of the given flags."""
    entries = [(flag_path(name), value, f"--{name}") for name, value in options.flags.items() if value is not None]
    if options.flags.get("publish-metrics"):
        entries.append((("return_perf_metrics",), True, "--publish-metrics"))
    if options.connector == "kvbm":
        entries += [(("kv_connector_config", name), value, "--connector kvbm") for name, value in KVBM.items()]
    return layer("flag", entries)


def forced_layer(values: Values, options: EngineOptions) -> Values:
    """Return the values of `rows` below that differ from the merged ones; if several rows set a path, the last counts.

    KV events are polled, because streamed ones name no salts and no media. Guides, logits processors and media
    need the engine's own tokenizer.
    """
    events, role, version = options.publishes_kv_events, options.role, options.engine_version
    refuses_overlap = role == "prefill" and is_before(version, CONTEXT_WITH_OVERLAP)
    overlap = f"TensorRT-LLM {version} refuses context-only requests while the overlap scheduler is on"
    guided = at(values, "guided_decoding_backend") is not None
    rows: tuple[tuple[bool, Path, Any, str], ...] = (
        (events and not at(values, *_EVENT_BUFFER), _EVENT_BUFFER, EVENT_BUFFER_SIZE, "KV events are published"),
        (events and at(values, *_STREAMING) is True, _STREAMING, False, "KV events are polled"),
        (options.connector == "kvbm", _PARTIAL_REUSE, False, "the connector is kvbm"),
        (refuses_overlap, ("disable_overlap_scheduler",), True, overlap),
        (guided, _NO_TOKENIZER, False, "decoding is guided"),
        (options.has_logits_processors, _NO_TOKENIZER, False, "logits processors are loaded"),
        (options.is_multimodal, _NO_TOKENIZER, False, "the modality is multimodal"),
    )
    forced = [] if role == "encode" else [(path, value, why) for applies, path, value, why in rows if applies]
    return layer("forced", [(path, value, why) for path, value, why in forced if at(values, *path) != value])


def left_out(role: Role, name: str) -> str:
    """Return why the engine does not get an argument; empty: it gets it."""
    if role == "encode":
        return "" if name in ENCODE else f"of an encode worker, which takes only {', '.join(sorted(ENCODE))}"
    return "because the agent processes what the engine generates itself" if name == _POSTPROCESS else ""


def pruned(values: Values, role: Role) -> tuple[Values, list[ArgumentFinding]]:
    """Return the values without arguments that the engine does not get, and a warning for each that a user gave."""
    warnings = []
    for name in sorted({path[0] for path in values}):
        why = left_out(role, name)
        places = [each.place for path, each in values.items() if path[0] == name and each.layer not in _OURS]
        if why and places:
            what, expected = f"{found(shown((name,), at(values, name)))}; left out", f"nothing {why}"
            warnings.append(ArgumentFinding(places[0], what, expected, (name,), "warning"))
    return {path: each for path, each in values.items() if not left_out(role, path[0])}, warnings


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's arguments. `replaced` is in the order of the layers, and has pruned arguments, too."""

    role: Role
    values: Values
    replaced: tuple[Replacement, ...]
    warnings: tuple[ArgumentFinding, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return a new copy of the arguments as nested mappings."""
        return nested({path: each.value for path, each in self.values.items()})

    def value(self, *path: str) -> Any:  # noqa: ANN401 - whatever the argument is
        """Return a copy of the value at `path`, a section as a mapping; None without a value."""
        return at(self.values, *path)

    def first(self, *path: str) -> EffectiveValue | None:
        """Return the value at `path` with its origin, or a section's first value; None without a value."""
        return first_at(self.values, path)

    @property
    def settings(self) -> tuple[EffectiveValue, ...]:
        """Every value with its path and origin, sorted by path."""
        return tuple(each for _, each in sorted(self.values.items()))

    @property
    def attention_dp_size(self) -> int:
        """How many ranks have a KV cache of their own: with attention DP each tensor-parallel rank, else one."""
        has_several = self.value("enable_attention_dp") and self.value("backend") != "_autodeploy"
        return int(self.value("tensor_parallel_size") or 1) if has_several else 1

    @property
    def world_size(self) -> int:
        """How many GPUs the engine takes, on all nodes."""
        if self.value("backend") == "_autodeploy":
            return int(self.value("world_size") or 1)
        return int(prod(self.value(*path) or 1 for path in _WORLD))


def conflicts(args: EngineArgs, options: EngineOptions) -> list[ArgumentFinding]:
    """Return what is wrong with the engine's arguments as a whole: those of `rows` below that apply.

    A transceiver without backend is a warning, because the environment may set it. The transfer buffer must hold the
    longest input, `max_seq_len` - 1 tokens, as at least one is generated. Without `max_seq_len` it is not checked. At a
    decode worker a smaller buffer is a warning, because its prefill workers may allow only shorter inputs. The router
    checks that a prefill and a decode worker fit together (`router/fleet/registry.py`).
    """
    role, count, version = options.role, options.gpu_count, options.engine_version
    buffer, longest = args.value(*_BUFFER), (args.value("max_seq_len") or 0) - 1
    transfers, attention_dp = role in ("prefill", "decode"), bool(args.value("enable_attention_dp"))
    ranks, gpus = args.attention_dp_size, args.world_size
    sizes = " x ".join(f"{path[0]} {size}" for path in _WORLD if (size := args.value(*path)) is not None)
    too_large, most = count is not None and gpus > count, DP_RANK_MAX + 1
    counted_by_world = args.value("backend") == "_autodeploy"
    rows: tuple[tuple[bool, Severity, Path, str, str], ...] = (
        (
            options.publishes_kv_events and args.value(*_REUSE) is False, "warning", _REUSE, "false",
            "true where KV events are published (without reuse there are none: the router only balances load)",
        ),
        (
            options.publishes_kv_events and args.value("runtime") == "demollm", "error", ("runtime",), "'demollm'",
            "another runtime where KV events are published: this one has none",
        ),
        (
            transfers and args.value(*_TRANSCEIVER) is None, "warning", _TRANSCEIVER, "nothing",
            f"how a {role} worker's KV is transferred: NIXL, UCX",
        ),
        (
            transfers and buffer is not None and buffer < longest, "error" if role == "prefill" else "warning",
            _BUFFER, str(buffer),
            f"{longest} or more, the longest input (max_seq_len - 1): a longer one is never transferred",
        ),
        (
            too_large and counted_by_world, "error", ("world_size",), str(gpus),
            f"at most {count}, the GPUs there are",
        ),
        (
            too_large and not counted_by_world, "error", _WORLD[0], f"{sizes} = {gpus}",
            f"at most {count} together, the GPUs there are",
        ),
        (
            attention_dp and ranks == 1, "warning", ("enable_attention_dp",), "true",
            "tensor_parallel_size above 1 with it (attention_dp_size is 1: nothing is parallel)",
        ),
        (
            ranks > most, "error", _WORLD[0], str(ranks),
            f"an attention_dp_size of at most {most}, the ranks that a worker may have",
        ),
        (
            not attention_dp and bool(args.value("attention_dp_config")), "warning", ("attention_dp_config",),
            "a mapping", "enable_attention_dp with it (it is ignored)",
        ),
    )  # fmt: skip
    findings = []
    if version and not is_supported(version):
        severity: Severity = "warning" if options.allows_unknown else "error"
        findings.append(ArgumentFinding("tensorrt_llm", f"version {version}", SUPPORTED, severity=severity))
    for applies, severity, path, what, expected in rows:
        if applies:
            given = args.first(*path)
            place = "not given" if given is None else given.place
            findings.append(ArgumentFinding(place, what, expected, path, severity))
    return findings


def effective_args(layers: Sequence[Values], options: EngineOptions) -> EngineArgs:
    """Return the engine's arguments; a value's origin is the highest layer that sets it.

    `layers` are flags, file and override, the lowest first; none of them is changed.

    Raises:
        EngineArgsInvalid: with all errors of the layers, or, if there are none, of the merged arguments.
    """
    findings = [each for values in layers for each in _findings(values)]
    _refuse_errors(findings)
    values, replaced = DEFAULTS, list[Replacement]()
    for higher in layers:
        values, gone = merge(values, higher)
        replaced += gone
    values, gone = merge(values, forced_layer(values, options))
    values, warnings = pruned(values, options.role)
    args = EngineArgs(role=options.role, values=values, replaced=(*replaced, *gone), warnings=())
    findings += [*warnings, *conflicts(args, options)]
    _refuse_errors(findings)
    return msgspec.structs.replace(args, warnings=tuple(findings))


def _refuse_errors(findings: Sequence[ArgumentFinding]) -> None:
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise EngineArgsInvalid(errors)


def _findings(values: Values) -> Iterator[ArgumentFinding]:
    """Yield the values of a layer that the agent reads and that have a wrong type, or are out of range."""
    for name, kind in _READ.items():
        path = tuple(name.split("."))
        given, value = first_at(values, path), at(values, *path)
        if given is not None and (expected := _expected(kind, value)):
            yield ArgumentFinding(given.place, found(shown(path, value)), expected, path)


def _expected(kind: Any, value: object) -> str:  # noqa: ANN401 - a type, in any of its forms
    """Return what a type allows; empty if it allows the value."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if get_origin(kind) is Literal:
            return f"one of {', '.join(map(str, get_args(kind)))}"
        return str(error).partition(", got ")[0].removeprefix("Expected ").replace("`", "")
    return ""
