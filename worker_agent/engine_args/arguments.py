"""Computes the engine's effective arguments: all layers merged, forced values, and pruned arguments.

An argument that no layer sets is not sent: the engine's own default, or the model's, holds.

    default < flag < file < override < forced                 `layers.py`: merged, each value with its origin
    each layer: types of what the agent reads                 `_READ`
    merged: forced values, arguments that the backend lacks   `rules.py`
    merged: conflicting arguments                             `rules.py`

Which names there are and what any other value may be is the engine's to say, and differs between its versions: its own
pydantic model refuses it before the model is loaded (`worker_agent/engines/trtllm/bindings.py` names layer and place).

Source of the types: NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/llm_args.py` at 0004396720054fd8e205cbf616f21f0b57c6b412.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from kv_protocol.fleet import Role
from worker_agent.engine_args.layers import (
    ArgumentFinding,
    EffectiveValue,
    EngineArgsInvalid,
    Path,
    Replacement,
    ValueOrigin,
    Values,
    at,
    found,
    merge,
    nested,
    origin_of,
    shown,
)
from worker_agent.engine_args.rules import (
    DEFAULTS,
    ENCODE,
    FLAGS,
    LACKS,
    Backend,
    Circumstances,
    attention_dp_size,
    backend_of,
    conflicts,
    forced_layer,
    pruned,
    world_size,
)

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
"""The arguments that the agent computes with. A block is a power of two above 1: `docs/SOURCES.md` E1.1; the largest is
the fleet's own bound."""


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's arguments. `replaced` is in the order of the layers, with pruned ones."""

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

    def origin(self, *path: str) -> ValueOrigin | None:
        """Return the origin of the value at `path`; None without a value."""
        return origin_of(self.values, path)

    @property
    def settings(self) -> tuple[EffectiveValue, ...]:
        """Every value with its path and origin, by path."""
        return tuple(each for _, each in sorted(self.values.items()))

    @property
    def left_to_engine(self) -> tuple[Path, ...]:
        """The paths of arguments with an agent's flag that no layer sets: the engine's or the model's default holds."""
        lacks = LACKS[backend_of(self.values)]
        known = (
            path for path in FLAGS.values() if path[0] not in lacks and (self.role != "encode" or path[0] in ENCODE)
        )
        return tuple(sorted(path for path in known if self.origin(*path) is None))

    @property
    def attention_dp_size(self) -> int:
        """How many ranks, each with a KV cache of its own, the engine has."""
        return attention_dp_size(self.values)

    @property
    def world_size(self) -> int:
        """How many GPUs the engine takes, on all nodes."""
        return world_size(self.values)


def effective_args(layers: Sequence[Values], circumstances: Circumstances) -> EngineArgs:
    """Return the engine's arguments; each value has the highest layer that sets it as its origin.

    `layers` are flags, file and override, the lowest first; none of them is changed.

    Raises:
        EngineArgsInvalid: with all errors of the layers, or, if there are none, of the merged arguments.
    """
    findings = [each for layer in layers for each in _findings(layer)]
    _refuse_errors(findings)
    values, replaced = DEFAULTS, list[Replacement]()
    for layer in layers:
        values, gone = merge(values, layer)
        replaced += gone
    values, gone = merge(values, forced_layer(values, circumstances))
    values, left_out = pruned(values, circumstances.role)
    findings += [*left_out, *conflicts(values, circumstances)]
    _refuse_errors(findings)
    return EngineArgs(role=circumstances.role, values=values, replaced=(*replaced, *gone), warnings=tuple(findings))


def _refuse_errors(findings: Sequence[ArgumentFinding]) -> None:
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise EngineArgsInvalid(errors)


def _findings(layer: Values) -> Iterator[ArgumentFinding]:
    """Yield the values of a layer that the agent reads and that have a wrong type, or are out of range."""
    for name, kind in _READ.items():
        path = tuple(name.split("."))
        origin, value = origin_of(layer, path), at(layer, *path)
        if origin is None or not (expected := _expected(kind, value)):
            continue
        what = found(shown(path, value))
        yield ArgumentFinding(severity="error", place=origin.place, path=path, expected=expected, found=what)


def _expected(kind: Any, value: object) -> str:  # noqa: ANN401 - a type, in any of its forms
    """Return what is allowed of a type; empty where the value is."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if get_origin(kind) is Literal:
            return f"one of {', '.join(map(str, get_args(kind)))}"
        return str(error).partition(", got ")[0].removeprefix("Expected ").replace("`", "")
    return ""
