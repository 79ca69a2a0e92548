"""Computes the engine's effective arguments: all layers merged, forced values, and pruned arguments.

An argument that no layer sets is not sent: the engine's own default, or the model's, holds.

    default < flag < file < override < forced                 engine_layers: merged, each value with its origin
    each layer: names, and types of what the agent reads      engine_fields
    merged: forced values, arguments that the backend lacks   engine_rules
    merged: conflicting arguments                             engine_checks

A name that `fields.py` does not have is an error where no engine is installed: a misspelt name is likelier than one of
a newer engine, for which `allows_unknown` passes it on with a warning. With an installed engine there is the warning
alone: the engine refuses what it does not know, before the model is loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec

from kv_protocol.fleet import Role
from worker_agent.engine_args import checks as engine_checks
from worker_agent.engine_args.field_kinds import Field, found
from worker_agent.engine_args.fields import ENGINE
from worker_agent.engine_args.findings import ArgumentFinding, EngineArgsInvalid, shown
from worker_agent.engine_args.layers import (
    LAYERS,
    EffectiveValue,
    Layer,
    Path,
    Replacement,
    Tree,
    ValueOrigin,
    at,
    dotted,
    is_section,
    merge,
    node_at,
    plain,
    replacements,
    settings,
    tree_of,
)
from worker_agent.engine_args.rules import (
    DEFAULTS,
    ENCODE,
    FLAGS,
    Circumstances,
    backend_of,
    forced_layer,
    pruned,
)


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's arguments. `replaced` is in the order of the layers, with pruned ones."""

    role: Role
    tree: Tree
    replaced: tuple[Replacement, ...]
    warnings: tuple[ArgumentFinding, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return a new copy of the arguments as nested mappings."""
        return {name: plain(node) for name, node in self.tree.items()}

    def value(self, *path: str) -> Any:  # noqa: ANN401 - whatever the argument is
        """Return a copy of the value at `path`, a section as a mapping; None without a value."""
        return at(self.tree, *path)

    def origin(self, *path: str) -> ValueOrigin | None:
        """Return the origin of the value at `path`; None without a value."""
        node = node_at(self.tree, path)
        return None if node is None else node.origin

    @property
    def settings(self) -> tuple[EffectiveValue, ...]:
        """Every value with its path and origin, by path."""
        return settings(self.tree)

    @property
    def left_to_engine(self) -> tuple[Path, ...]:
        """The paths of arguments with an agent's flag that no layer sets: the engine's or the model's default holds."""
        backend = backend_of(self.tree)
        known = (
            path
            for path in FLAGS.values()
            if backend not in ENGINE.fields[path[0]].pruned and (self.role != "encode" or path[0] in ENCODE)
        )
        return tuple(sorted(path for path in known if node_at(self.tree, path) is None))

    @property
    def attention_dp_size(self) -> int:
        """How many ranks, each with a KV cache of its own, the engine has."""
        return engine_checks.attention_dp_size(self.tree)

    @property
    def world_size(self) -> int:
        """How many GPUs the engine takes, on all nodes."""
        return engine_checks.world_size(self.tree)


def effective_args(layers: Sequence[Layer], circumstances: Circumstances) -> EngineArgs:
    """Return the engine's arguments; each value has the highest layer that sets it as its origin.

    `layers` are flags, file and override, in any order, each at most once; none of them is changed.

    Raises:
        EngineArgsInvalid: with all errors of the layers, or, if there are none, of the merged arguments.
    """
    layers = sorted([DEFAULTS, *layers], key=lambda layer: LAYERS.index(layer.name))
    passes_unknown = circumstances.allows_unknown or bool(circumstances.engine_version)
    findings = [
        finding
        for layer in layers
        for finding in _section_findings(layer, ENGINE, layer.values, (), allows_unknown=passes_unknown)
    ]
    _refuse_errors(findings)
    tree: Tree = {}
    replaced: list[Replacement] = []
    for layer in layers:
        tree = _put(tree, layer, replaced)
    tree = _put(tree, forced_layer(tree, circumstances), replaced)
    tree, left_out = pruned(tree, circumstances.role)
    findings += [*left_out, *engine_checks.findings(tree, circumstances)]
    _refuse_errors(findings)
    return EngineArgs(role=circumstances.role, tree=tree, replaced=tuple(replaced), warnings=tuple(findings))


def _section_findings(
    layer: Layer, field: Field, values: Mapping[str, Any], above: Path, *, allows_unknown: bool
) -> Iterator[ArgumentFinding]:
    """Yield unknown names, and values of a wrong type or out of range."""
    for name, value in values.items():
        path = (*above, str(name))
        known = field.fields.get(name)
        if known is None:
            yield _unknown(layer, field, path, allows_unknown=allows_unknown)
        elif not known.fits(value) or (known.kind == "section" and value is not None and not is_section(value)):
            has_names = known.kind != "section" or not isinstance(value, dict)
            what = found(shown(path, value)) if has_names else "a mapping with a name that is no text"
            yield ArgumentFinding(
                severity="error", place=layer.place_of(path), path=path, expected=known.expected, found=what
            )
        elif known.kind == "section" and value is not None:
            yield from _section_findings(layer, known, value, path, allows_unknown=allows_unknown)


def _unknown(layer: Layer, field: Field, path: Path, *, allows_unknown: bool) -> ArgumentFinding:
    near = get_close_matches(path[-1], field.fields, n=1)
    of = dotted(path[:-1]) or "the engine"
    return ArgumentFinding(
        severity="warning" if allows_unknown else "error",
        place=layer.place_of(path),
        path=path,
        expected=f"an argument of {of}" + (f" (is it {near[0]}?)" if near else ""),
        found="a name that is not known here" + ("; passed on" if allows_unknown else ""),
    )


def _put(tree: Tree, layer: Layer, replaced: list[Replacement]) -> Tree:
    upper = tree_of(layer)
    replaced += replacements(tree, upper)
    return merge(tree, upper)


def _refuse_errors(findings: Sequence[ArgumentFinding]) -> None:
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise EngineArgsInvalid(errors)
