"""Reads the engine's arguments from the command line and its files, without the engine.

    --extra-engine-args FILE          YAML, which replaces values of our own flags
    --override-engine-args JSON       replaces values of flags and file; in its place any number of flags:
    --trtllm.a.b.c VALUE              null (`none`, `null`), a boolean, an integer, a number, else a text

`arguments.py` defines the layers. All errors of flags are reported together, but only the first error of a file or of
JSON, each with its place. No value that looks like a secret is logged.

The version of the installed engine is read from its `version.py`, which states it in every release, without importing
the package: an import takes seconds and wants a GPU. Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/version.py`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import structlog
import yaml

from kv_protocol.errors import UNDECODABLE, shortened
from kv_runtime.config.loading import load_yaml
from worker_agent.engine_args.arguments import EngineArgs, EngineOptions, effective_args, flag_layer
from worker_agent.engine_args.layers import (
    ArgumentFinding,
    EngineArgsInvalid,
    LayerName,
    Values,
    found,
    layer,
)
from worker_agent.engine_args.layers import Path as ArgumentPath

_log = structlog.get_logger("engine_args")
_OVERRIDE = "--override-engine-args"
FLAG_PREFIX = "--trtllm."
_PACKAGE = "tensorrt_llm"
_VERSION = re.compile(r"""^__version__ *= *["']([^"']{1,64})["']""", re.MULTILINE)
_UNKNOWN_VERSION = "unknown"
_BALANCER: ArgumentPath = ("moe_config", "load_balancer")
_MODEL = "a directory with config.json, or a name on the hub (org/name)"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
"""A repository on the hub. Source: huggingface_hub, `huggingface_hub/utils/_validators.py`, `validate_repo_id`."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NULLS, _BOOLEANS = {"none", "null"}, {"true": True, "false": False}


def load_engine_args(options: EngineOptions) -> EngineArgs:
    """Return the effective arguments; every replacement of one layer by another, and every warning, is logged.

    Raises:
        EngineArgsInvalid: with the first source that cannot be read, or else with every invalid argument.
    """
    options = msgspec.structs.replace(options, engine_version=installed_version())
    args = effective_args(_layers(options), options)
    for old, new in args.replaced:
        log = _log.warning if new.layer == "forced" and old.layer != "default" else _log.info
        log(
            "engine_argument_replaced",
            argument=old.name,
            old=old.shown,
            new=new.shown,
            old_layer=old.origin,
            new_layer=new.origin,
        )
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
            stated = _VERSION.search((Path(folder) / "version.py").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if stated is not None:
            return stated[1]
    return _UNKNOWN_VERSION


def check_files(args: EngineArgs) -> None:
    """Check what arguments name on this machine.

    The model is a directory that has a `config.json`, or a name on the hub (`org/name`). A directory comes first, as in
    the engine itself; whether the hub has the name is not asked. `moe_config.load_balancer`, if it is a text, is a
    file: the engine opens it in its worker processes, minutes later, relative to the directory of this process.
    Source: NVIDIA/TensorRT-LLM, `examples/wide_ep/README.md` (a path, or the values themselves).

    Raises:
        EngineArgsInvalid: the model is neither, or there is no such file.
    """
    balancer = args.value(*_BALANCER)
    is_missing = isinstance(balancer, str) and not Path(balancer).is_file()
    for path, problem, expected in (
        (("model",), _model_problem(str(args.value("model"))), _MODEL),
        (_BALANCER, "which is no file here" if is_missing else "", "a file"),
    ):
        given = args.first(*path)
        if problem and given is not None:
            what = f"{shortened(str(given.value))!r}, {problem}"
            raise EngineArgsInvalid([ArgumentFinding(given.place, what, expected, path)])


def _model_problem(model: str) -> str:
    """Return why no engine loads `model`; empty if it is a model's directory or may be a name on the hub."""
    path = Path(model)
    if path.is_dir():
        return "" if (path / "config.json").is_file() else "a directory without config.json"
    if path.exists():
        return "a file"
    return "" if _HUB_NAME.fullmatch(model) else "a path that does not exist"


def _layers(options: EngineOptions) -> list[Values]:
    if options.override is not None and options.dynamic:
        raise _invalid(_OVERRIDE, f"both {_OVERRIDE} and {FLAG_PREFIX}* flags", "one of them")
    layers = [flag_layer(options)]
    if options.extra is not None:
        layers.append(read_file(Path(options.extra)))
    layers.append(read_flags(options.dynamic) if options.override is None else read_json(options.override))
    return layers


# ---------------------------------------------------------------- texts
def read_file(file: Path) -> Values:
    """Return the layer of a YAML file; an empty file is an empty layer.

    Raises:
        EngineArgsInvalid: the file cannot be read.
    """
    try:
        text = file.read_bytes().decode()
        values = load_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise _invalid(str(file), why, "a readable file in UTF-8") from error
    except yaml.YAMLError as error:
        raise _invalid(str(file), str(error).removeprefix("found "), "YAML") from error
    lines = _lines(yaml.compose(text, yaml.SafeLoader))
    return _named("file", values or {}, str(file), {path: f"{file}:{line}" for path, line in lines.items()})


def read_json(text: str) -> Values:
    """Return a JSON object's values as a layer of engine arguments.

    Raises:
        EngineArgsInvalid: the text is not a JSON object.
    """
    try:
        return _named("override", msgspec.json.decode(text), _OVERRIDE, {})
    except UNDECODABLE as error:
        raise _invalid(_OVERRIDE, str(error), "JSON") from error


def _named(name: LayerName, values: object, place: str, places: Mapping[ArgumentPath, str]) -> Values:
    """Return the layer of the values; a value without a place gets its section's."""
    if not isinstance(values, dict) or not all(isinstance(each, str) for each in values):
        raise _invalid(place, found(values), "a mapping, whose names are texts")
    whole = layer(name, [((), values, place)])
    for path, each in whole.items():
        named = [places[path[:size]] for size in range(1, len(path) + 1) if path[:size] in places]
        whole[path] = each._replace(place=[place, *named][-1])
    return whole


def read_flags(arguments: Sequence[str]) -> Values:
    """Return the layer of flags `--trtllm.a.b.c value` or `--trtllm.a.b.c=value`.

    Raises:
        EngineArgsInvalid: with every argument that is not such a flag, lacks its value, or contradicts an earlier one.
    """
    values: Values = {}
    problems: list[ArgumentFinding] = []
    for flag, text in _pairs(arguments, problems):
        path = tuple(flag.removeprefix(FLAG_PREFIX).split("."))
        one = layer("override", [(path, typed(text), flag)])
        if not all(map(_NAME.fullmatch, path)):
            problems.append(ArgumentFinding(flag, "no such path", f"{FLAG_PREFIX}a.b.c, of letters, digits and _"))
        elif any(path[: len(each)] == each[: len(path)] for each in values):
            problems.append(
                ArgumentFinding(flag, "an earlier flag for the same path, or one above it", "one flag for a path")
            )
        values |= one
    if problems:
        raise EngineArgsInvalid(problems)
    return values


def typed(text: str) -> Any:  # noqa: ANN401 - one of the types above
    """Return the value that a flag's text spells; the text itself if it is no null, boolean or number."""
    small = text.lower()
    if small in _NULLS:
        return None
    if small in _BOOLEANS:
        return _BOOLEANS[small]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def _lines(node: yaml.Node | None, above: ArgumentPath = ()) -> dict[ArgumentPath, int]:
    """Return the line of every name in the document."""
    lines: dict[ArgumentPath, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        path = (*above, str(key.value))
        lines |= {path: key.start_mark.line + 1, **_lines(value, path)}
    return lines


def _pairs(arguments: Sequence[str], problems: list[ArgumentFinding]) -> Iterator[tuple[str, str]]:
    rest = iter(arguments)
    for argument in rest:
        flag, has_value, text = argument.partition("=")
        if not flag.startswith(FLAG_PREFIX):
            what = "no option of this command" if flag.startswith("-") else "a value that belongs to no option"
            place = flag if flag.startswith("-") else "arguments"
            problems.append(ArgumentFinding(place, what, f"this command's options, or {FLAG_PREFIX}a.b.c VALUE"))
        elif has_value:
            yield flag, text
        else:
            value = next(rest, None)
            if value is None or value.startswith("--"):
                problems.append(ArgumentFinding(flag, "nothing", "a value behind it"))
            else:
                yield flag, value


def _invalid(place: str, what: str, expected: str) -> EngineArgsInvalid:
    return EngineArgsInvalid([ArgumentFinding(place, what, expected)])
