"""Computes the engine's effective arguments: all layers merged, forced values, and pruned arguments.

An argument that no layer sets is not sent: the engine's own default, or the model's, holds.

    default < flag < file < override < forced                 `layers.py`: merged, each value with its origin
    each layer: names, and types of what the agent reads      `fields.py`
    merged: forced values, arguments that the backend lacks   `rules.py`
    merged: conflicting arguments                             `rules.py`

A name that `fields.py` does not have is an error where no engine is installed: a misspelt name is likelier than one of
a newer engine, for which `allows_unknown` passes it on with a warning. With an installed engine there is the warning
alone: the engine refuses what it does not know, before the model is loaded.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kv_protocol.fleet import Role
from worker_agent.engine_args.fields import LACKS, layer_findings
from worker_agent.engine_args.findings import ArgumentFinding, EngineArgsInvalid
from worker_agent.engine_args.layers import (
    EffectiveValue,
    Path,
    Replacement,
    ValueOrigin,
    Values,
    at,
    merge,
    nested,
    origin_of,
)
from worker_agent.engine_args.rules import (
    DEFAULTS,
    ENCODE,
    FLAGS,
    Circumstances,
    attention_dp_size,
    backend_of,
    conflicts,
    forced_layer,
    pruned,
    world_size,
)


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
    passes_unknown = circumstances.allows_unknown or bool(circumstances.engine_version)
    findings = [each for layer in layers for each in layer_findings(layer, allows_unknown=passes_unknown)]
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
