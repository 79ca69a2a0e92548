"""The engine's arguments from the command line and its files, without the engine: what was replaced is logged.

    --extra-engine-args FILE          YAML, over our own flags
    --override-engine-args JSON       over both; or, instead, any number of
    --trtllm.a.b.c VALUE

The layers and what they mean stand in `core/engine_args.py`. No value that looks like a secret is logged.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from worker_agent.core.engine_args import EngineArgs, effective_args
from worker_agent.core.engine_findings import EngineArgsInvalid, Finding, shown
from worker_agent.core.engine_layers import Layer, Replacement
from worker_agent.core.engine_rules import Circumstances, flag_layer
from worker_agent.engine_args_text import FLAG_PREFIX, read_file, read_flags, read_json

_log = structlog.get_logger("engine_args")
_OVERRIDE = "--override-engine-args"


class EngineArgsSources(msgspec.Struct, frozen=True, kw_only=True):
    """Where arguments are given: `flags` by name (`engine_rules.FLAGS`), None: not given; `dynamic`: what is left."""

    flags: Mapping[str, Any] = {}
    extra: Path | None = None
    override: str | None = None
    dynamic: tuple[str, ...] = ()


def load_engine_args(sources: EngineArgsSources, circumstances: Circumstances) -> EngineArgs:
    """Return the effective arguments; what one layer replaced of another, and every warning, is logged.

    Raises:
        EngineArgsInvalid: with every source that cannot be read, or else with all that may not be.
    """
    args = effective_args(_layers(sources, circumstances), circumstances)
    for replacement in args.replaced:
        _log_replacement(replacement)
    for warning in args.warnings:
        _log.warning("engine_argument_doubtful", argument=".".join(warning.path), says=str(warning))
    return args


def _layers(sources: EngineArgsSources, circumstances: Circumstances) -> list[Layer]:
    problems: list[Finding] = []
    layers = [flag_layer(sources.flags, circumstances)]
    if sources.extra is not None:
        layers += _read(partial(read_file, sources.extra, "file"), problems)
    if sources.override is not None and sources.dynamic:
        found, expected = f"both {_OVERRIDE} and {FLAG_PREFIX}* flags", "one of them"
        problems.append(Finding(severity="error", place=_OVERRIDE, found=found, expected=expected))
    elif sources.override is not None:
        layers += _read(partial(read_json, sources.override, _OVERRIDE, "override"), problems)
    elif sources.dynamic:
        layers += _read(partial(read_flags, sources.dynamic, "override"), problems)
    if problems:
        raise EngineArgsInvalid(problems)
    return layers


def _read(read: Callable[[], Layer], problems: list[Finding]) -> list[Layer]:
    try:
        return [read()]
    except EngineArgsInvalid as error:
        problems += error.findings
        return []


def _log_replacement(replacement: Replacement) -> None:
    """Replacing is what the layers are for; only where the agent overrules what somebody said, it is a warning."""
    is_overruled = replacement.new_origin.layer == "forced" and replacement.old_origin.layer != "default"
    log = _log.warning if is_overruled else _log.info
    log(
        "engine_argument_replaced",
        argument=replacement.name,
        old=shown(replacement.path, replacement.old),
        new=shown(replacement.path, replacement.new),
        old_layer=str(replacement.old_origin),
        new_layer=str(replacement.new_origin),
    )
