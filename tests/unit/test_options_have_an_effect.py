"""No option is without effect: with it a command's settings, or its engine's arguments, are others than without.

Options that are arguments of a function are the linter's: it finds those that nothing reads.
"""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from indexer.__main__ import main as indexer
from kv_runtime.extras import LazyCommand
from router.__main__ import main as router
from worker_agent.__main__ import main as worker_agent
from worker_agent.commands.print_engine_args import print_engine_args

OF_ALL = frozenset({"file", "assignments", "print_config", "explain", "version"})
"""Options of every process, which have tests of their own."""
CHECKS = frozenset({"gpu_count", "allows_unknown", "as_json"})
"""Of `print-engine-args`: they decide what is refused, and the form of what is printed."""
ENGINE_ARGUMENTS = frozenset(str(each.name) for each in print_engine_args.params)
SAMPLES = {
    "connector": "kvbm",
    "dynamic": "--trtllm.max_batch_size=7",
    "engine__api_endpoints": "embeddings",
    "engine__base_url": "http://127.0.0.1:1",
    "engine__kind": "trtllm",
    "engine__publish_endpoint": "tcp://127.0.0.1:1",
    "engine__replay_endpoint": "tcp://127.0.0.1:1",
    "engine__reasoning_parser": "qwen3",
    "engine__requests": "forward",
    "engine__tool_call_parser": "qwen3",
    "free_gpu_memory_fraction": "0.5",
    "nats__url": "nats://127.0.0.1:1",
    "nats_url": "nats://127.0.0.1:1",
    "override": '{"max_batch_size": 7}',
    "policy__mode": "random",
    "role": "prefill",
    "tokens__text": "byte",
    "worker__endpoint": "a.worker.generate",
    "worker__role": "prefill",
    "workers": "http://127.0.0.1:1",
}
"""Values that are no default; all others are made of the option's type."""
OF_ATTACH = {"engine__kind": "vllm"}


def serving(group: click.Command) -> Iterator[click.Command]:
    """Yield the commands of a program that run a process, imported."""
    assert isinstance(group, click.Group)
    for name in ("serve", "attach"):
        found = group.commands.get(name)
        if found is not None:
            yield found.imported() if isinstance(found, LazyCommand) else found


def given(option: click.Parameter, directory: Path, command: str | None = None) -> list[str]:
    """Return the option as it is typed, with a value that is not its default."""
    name = str(option.name)
    if isinstance(option, click.Argument):
        return [SAMPLES[name]]
    if isinstance(option, click.Option) and option.is_flag:
        return [option.opts[0]]
    if isinstance(option.type, click.Path):
        file = directory / "arguments.yaml"
        file.write_text("max_batch_size: 7\n")
        return [option.opts[0], str(file)]
    if isinstance(option.type, click.Choice) and name not in SAMPLES:
        return [option.opts[0], next(each for each in option.type.choices[::-1] if each != option.default)]
    if command == "attach" and name in OF_ATTACH:
        return [option.opts[0], OF_ATTACH[name]]
    is_number = isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType))
    return [option.opts[0], SAMPLES.get(name, "2" if is_number else "a-name")]


def printed(command: click.Command, *arguments: str) -> str:
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, (arguments, done.output)
    return done.stdout


SETTINGS = [
    pytest.param(command, option, id=f"{program} {option.opts[0]}")
    for program, commands in (
        ("router", [router]),
        ("indexer", serving(indexer)),
        ("worker-agent", serving(worker_agent)),
    )
    for command in commands
    for option in command.params
    if option.name not in OF_ALL | ENGINE_ARGUMENTS
]


@pytest.mark.parametrize(("command", "option"), SETTINGS)
def test_an_option_of_a_process_changes_its_settings(
    command: click.Command, option: click.Parameter, tmp_path: Path
) -> None:
    assert printed(command, *given(option, tmp_path, command.name), "--print-config") != printed(
        command, "--print-config"
    )


ARGUMENTS = [each for each in print_engine_args.params if each.name not in CHECKS]


@pytest.mark.parametrize("option", ARGUMENTS, ids=[str(each.name) for each in ARGUMENTS])
def test_an_option_of_an_engine_changes_its_arguments(option: click.Parameter, tmp_path: Path) -> None:
    usual = ["--model", "m", "--json", "--tensor-parallel-size", "4"]
    assert printed(print_engine_args, *usual, *given(option, tmp_path)) != printed(print_engine_args, *usual)
