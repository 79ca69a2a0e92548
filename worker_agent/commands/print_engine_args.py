"""`worker-agent print-engine-args`: the arguments that the engine would get, and where each is from."""

import json
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from kv_protocol.fleet import Role
from kv_runtime.config.command import errors_printed
from kv_runtime.telemetry import configure_logs
from worker_agent.engine_args.arguments import EngineArgs, EngineOptions, flag_path, left_out
from worker_agent.engine_args.layers import EngineArgsInvalid, Path, dotted
from worker_agent.engine_args.sources import load_engine_args

_ENGINE_DEFAULT = "engine default"
INVALID = 2
"""The exit code of a process with invalid engine arguments."""
_COUNT = click.IntRange(1)
_ENGINE_FLAGS: dict[str, Any] = {
    "backend": {"type": click.Choice(["pytorch", "_autodeploy"]), "help": "the engine's backend"},
    "tensor-parallel-size": {"type": _COUNT, "help": "GPUs that share a layer"},
    "pipeline-parallel-size": {"type": _COUNT, "help": "stages that the layers are cut into"},
    "expert-parallel-size": {"type": _COUNT, "help": "GPUs that a layer's experts are spread over"},
    "enable-attention-dp": {"is_flag": True, "default": None, "help": "one KV cache a tensor-parallel rank"},
    "kv-block-size": {"type": _COUNT, "help": "tokens in a KV block"},
    "gpus-per-node": {"type": _COUNT, "help": "absent: the engine counts them"},
    "max-batch-size": {"type": _COUNT, "help": "requests computed together"},
    "max-num-tokens": {"type": _COUNT, "help": "tokens computed in one iteration"},
    "max-seq-len": {"type": _COUNT, "help": "prompt and answer together, in tokens; absent: the model says it"},
    "max-beam-width": {"type": _COUNT, "help": "beams of a request"},
    "free-gpu-memory-fraction": {
        "type": click.FloatRange(0, 1),
        "help": "of the memory that the weights leave, for KV",
    },
    "load-format": {
        "type": click.Choice(["auto", "dummy", "vision_only", "gms"], case_sensitive=False),
        "help": "how weights are loaded",
    },
    "guided-decoding-backend": {"type": click.Choice(["xgrammar", "llguidance"]), "help": "absent: no guided decoding"},
    "publish-metrics": {
        "is_flag": True,
        "default": None,
        "help": "statistics of every iteration and request, and the engine's own metrics; costs some time each",
    },
}
"""The flags that each set one engine argument (`flag_path`)."""
DYNAMIC_FLAGS = {"ignore_unknown_options": True}
"""The context settings that a command with `engine_args_options` needs for `--trtllm.a.b.c`."""

_CONNECTOR, _MODALITY = click.Choice(["none", "kvbm"]), click.Choice(["text", "multimodal"])


_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "extra": ("--extra-engine-args", {"type": click.Path(), "help": "YAML file of engine arguments"}),
    "override": ("--override-engine-args", {"help": "JSON object of engine arguments; or --trtllm.a.b.c VALUE flags"}),
    "publishes_kv_events": (
        "--publish-kv-events", {"is_flag": True, "help": "publish what the KV cache holds to the fleet"},
    ),
    "connector": (
        "--connector",
        {"type": _CONNECTOR, "default": "none", "help": "what keeps KV blocks beyond the engine's own cache"},
    ),
    "is_multimodal": (
        "--modality",
        {
            "type": _MODALITY, "default": "text", "help": "what prompts are made of",
            "callback": lambda _context, _option, modality: modality == "multimodal",
        },
    ),
    "gpu_count": (
        "--gpu-count", {"type": click.IntRange(0), "help": "GPUs for the engine, on all nodes; absent: not checked"},
    ),
    "allows_unknown": (
        "--allow-unknown-engine-args",
        {"is_flag": True, "help": "use an engine of an unsupported version, with a warning"},
    ),
}  # fmt: skip
"""The options that set no engine argument themselves, by their fields in `EngineOptions`."""


def engine_args_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of the engine's arguments; it is called with their values as `options`.

    Model and role are not among them: a worker uses both for more, so each command has flags of its own for them.
    """
    named = {flag.replace("-", "_"): (f"--{flag}", how) for flag, how in _ENGINE_FLAGS.items()}
    every = named | _OPTIONS

    @wraps(command)
    def wrapped(**values: Any) -> None:  # noqa: ANN401 - click has checked them
        dynamic, source = values.pop("dynamic"), click.get_current_context().get_parameter_source
        given = [
            flag
            for name, (flag, how) in every.items()
            if source(name) is ParameterSource.COMMANDLINE
            and values[name] is not False
            and values[name] != how.get("default")
        ]
        given += [each.partition("=")[0] for each in dynamic if each.startswith("--")] or dynamic
        flags = {flag: values.pop(name) for flag, name in zip(_ENGINE_FLAGS, named, strict=True)}
        others = {name: values.pop(name) for name in _OPTIONS}
        command(options=EngineOptions(flags=flags, dynamic=dynamic, given=tuple(given), **others), **values)

    decorated = click.argument("dynamic", nargs=-1, type=click.UNPROCESSED, metavar="[--trtllm.a.b.c VALUE]...")(
        wrapped
    )
    for name, (flag, how) in reversed(every.items()):
        decorated = click.option(flag, name, show_default="default" in how, **how)(decorated)
    return decorated


@click.command("print-engine-args", context_settings=DYNAMIC_FLAGS)
@click.option("--model", help="the model's directory or its name on the hub")
@click.option(
    "--role",
    type=click.Choice(["aggregated", "prefill", "decode", "encode"]),
    default="aggregated",
    show_default=True,
    help="phases that the worker serves",
)
@engine_args_options
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def print_engine_args(*, options: EngineOptions, model: str | None, role: Role, as_json: bool) -> None:
    """Print the TensorRT-LLM arguments that a worker would give its engine, each with its layer, and the warnings.

    An argument that has a flag and is not set is shown as `engine default`: it is not sent, and the default of the
    engine or of the model holds. The layer `default` has the agent's own defaults.

    \b
    default < flag < file (--extra-engine-args) < override (--override-engine-args, --trtllm.*) < forced

    A value that one layer replaces in another is logged. The exit code is 2 if an argument is invalid: file and line,
    path, what is expected and what was found are printed. Values that look like secrets are not shown.

    \b
    Example:  worker-agent print-engine-args --extra-engine-args engine.yaml --publish-kv-events
              --trtllm.kv_cache_config.dtype fp8
    """  # noqa: D301  (click reads the character, not its name)
    configure_logs("info")
    with errors_printed("worker-agent", (EngineArgsInvalid,), INVALID):
        args = load_engine_args(msgspec.structs.replace(options, flags={**options.flags, "model": model}, role=role))
    if as_json:
        click.echo(json.dumps(_as_json(args), indent=2))
    else:
        click.echo("\n".join(_lines(args)))


def left_to_engine(args: EngineArgs) -> list[Path]:
    """Return the paths of arguments with a flag that no layer sets: the engine's or the model's default holds."""
    paths = map(flag_path, ("model", *_ENGINE_FLAGS))
    return [path for path in paths if not left_out(args.role, path[0]) and args.first(*path) is None]


def _lines(args: EngineArgs) -> Iterator[str]:
    rows = [(setting.name, json.dumps(setting.shown), setting.origin) for setting in args.settings]
    rows += [(dotted(path), _ENGINE_DEFAULT, "not sent") for path in left_to_engine(args)]
    rows.sort()
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        yield f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}"
    yield from (f"warning: {warning}" for warning in args.warnings)


def _as_json(args: EngineArgs) -> dict[str, Any]:
    return {
        "role": args.role,
        "world_size": args.world_size,
        "attention_dp_size": args.attention_dp_size,
        "arguments": {
            setting.name: {"value": setting.shown, "layer": setting.layer, "place": setting.place}
            for setting in args.settings
        },
        "engine_defaults": sorted(map(dotted, left_to_engine(args))),
        "replaced": [
            {"path": old.name, "old": old.shown, "new": new.shown, "old_layer": old.origin, "new_layer": new.origin}
            for old, new in args.replaced
        ],
        "warnings": [
            {"place": each.place, "path": ".".join(each.path), "expected": each.expected, "found": each.found}
            for each in args.warnings
        ],
    }
