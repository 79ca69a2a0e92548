"""Reads the engine's arguments from the command line and its files, without the engine.

    --extra-engine-args FILE          YAML, over our own flags
    --override-engine-args JSON       over both; or, instead, any number of
    --trtllm.a.b.c VALUE

`arguments.py` defines the layers. No value that looks like a secret is logged.

The version of the installed engine is read from its `version.py`, which states it in every release, without importing
the package: an import takes seconds and wants a GPU. Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/version.py`.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog

from kv_protocol.errors import shortened
from worker_agent.engine_args.arguments import EngineArgs, effective_args
from worker_agent.engine_args.findings import ArgumentFinding, EngineArgsInvalid, shown
from worker_agent.engine_args.layers import Replacement, Values
from worker_agent.engine_args.rules import Circumstances, flag_layer
from worker_agent.engine_args.text import FLAG_PREFIX, read_file, read_flags, read_json

_log = structlog.get_logger("engine_args")
_OVERRIDE = "--override-engine-args"
_PACKAGE = "tensorrt_llm"
_VERSION = re.compile(r"""^__version__ *= *["']([^"']{1,64})["']""", re.MULTILINE)
_UNKNOWN_VERSION = "unknown"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
"""A repository on the hub. Source: huggingface_hub, `huggingface_hub/utils/_validators.py`, `validate_repo_id`."""


class EngineArgsSources(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of arguments: `flags` by name (`rules.FLAGS`), None: not given; `dynamic`: the remaining flags."""

    flags: Mapping[str, Any] = {}
    extra: Path | None = None
    override: str | None = None
    dynamic: tuple[str, ...] = ()


def load_engine_args(sources: EngineArgsSources, circumstances: Circumstances) -> EngineArgs:
    """Return the effective arguments; every replacement of one layer by another, and every warning, is logged.

    Raises:
        EngineArgsInvalid: with every source that cannot be read, or else with every invalid argument.
    """
    circumstances = msgspec.structs.replace(circumstances, engine_version=installed_version())
    args = effective_args(_layers(sources, circumstances), circumstances)
    for replacement in args.replaced:
        _log_replacement(replacement)
    for warning in args.warnings:
        _log.warning("engine_argument_doubtful", argument=".".join(warning.path), says=str(warning))
    return args


def installed_version() -> str:
    """Return the version of the installed TensorRT-LLM; empty: none is installed; `unknown`: it states none."""
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return ""
    for folder in spec.submodule_search_locations:
        try:
            found = _VERSION.search((Path(folder) / "version.py").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if found is not None:
            return found[1]
    return _UNKNOWN_VERSION


def check_model(args: EngineArgs) -> None:
    """Check that the model is a directory that has a `config.json`, or a name on the hub (`org/name`).

    A directory comes first, as in the engine itself. Whether the hub has the name is not asked.

    Raises:
        EngineArgsInvalid: it is neither.
    """
    model = str(args.value("model"))
    if found := _model_problem(model):
        _refuse(args, ("model",), model, found, "a directory with config.json, or a name on the hub (org/name)")


def check_files(args: EngineArgs) -> None:
    """Check that the files which arguments name are there: `moe_config.load_balancer`, where it is a text.

    The engine opens it in its worker processes, minutes later, relative to the directory of this process.
    Source: NVIDIA/TensorRT-LLM, `examples/wide_ep/README.md` (a path, or the values themselves).

    Raises:
        EngineArgsInvalid: there is no such file.
    """
    path = ("moe_config", "load_balancer")
    named = args.value(*path)
    if isinstance(named, str) and not Path(named).is_file():
        _refuse(args, path, named, "which is no file here", "a file")


def _refuse(args: EngineArgs, path: tuple[str, ...], value: str, problem: str, expected: str) -> NoReturn:
    origin, found = args.origin(*path), f"{shortened(value)!r}, {problem}"
    place = "" if origin is None else origin.place
    raise EngineArgsInvalid([ArgumentFinding(severity="error", place=place, path=path, found=found, expected=expected)])


def _model_problem(model: str) -> str:
    """Return why no engine loads `model`; empty if it is a model's directory or may be a name on the hub."""
    path = Path(model)
    if path.is_dir():
        return "" if (path / "config.json").is_file() else "a directory without config.json"
    if path.exists():
        return "a file"
    return "" if _HUB_NAME.fullmatch(model) else "a path that does not exist"


def _layers(sources: EngineArgsSources, circumstances: Circumstances) -> list[Values]:
    problems: list[ArgumentFinding] = []
    layers = [flag_layer(sources.flags, circumstances)]
    if sources.extra is not None:
        layers += _read(partial(read_file, sources.extra, "file"), problems)
    if sources.override is not None and sources.dynamic:
        found, expected = f"both {_OVERRIDE} and {FLAG_PREFIX}* flags", "one of them"
        problems.append(ArgumentFinding(severity="error", place=_OVERRIDE, found=found, expected=expected))
    elif sources.override is not None:
        layers += _read(partial(read_json, sources.override, _OVERRIDE, "override"), problems)
    elif sources.dynamic:
        layers += _read(partial(read_flags, sources.dynamic, "override"), problems)
    if problems:
        raise EngineArgsInvalid(problems)
    return layers


def _read(read: Callable[[], Values], problems: list[ArgumentFinding]) -> list[Values]:
    try:
        return [read()]
    except EngineArgsInvalid as error:
        problems += error.findings
        return []


def _log_replacement(replacement: Replacement) -> None:
    """Log the replacement: a warning if a forced value replaces a user's, else information."""
    old, new = replacement.old, replacement.new
    is_overruled = new.origin.layer == "forced" and old.origin.layer != "default"
    log = _log.warning if is_overruled else _log.info
    log(
        "engine_argument_replaced",
        argument=old.name,
        old=shown(old.path, old.value),
        new=shown(new.path, new.value),
        old_layer=str(old.origin),
        new_layer=str(new.origin),
    )
