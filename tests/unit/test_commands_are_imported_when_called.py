"""What `--help` of a command loads, and that its lines are those of the commands that it does not load."""

import subprocess
import sys

import click
import pytest

import router.__main__
import worker_agent.__main__
from kv_runtime.extras import LazyCommand

GROUPS = {"router": router.__main__.main, "worker_agent": worker_agent.__main__.main}
HEAVY = ("aiohttp", "matplotlib", "nats", "numpy", "pydantic", "structlog", "zmq")
LOADED = """
import sys
from {program}.__main__ import main
main(["--help"], standalone_mode=False)
print("loaded", *sorted({{name.partition(".")[0] for name in sys.modules}} & {{*{heavy!r}}}))
"""


@pytest.mark.parametrize("program", GROUPS)
def test_the_help_of_a_program_loads_no_library_that_only_its_commands_need(program: str) -> None:
    code = LOADED.format(program=program, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded"
    assert "Usage: " in done.stdout


def test_a_router_that_traces_nothing_loads_nothing_of_opentelemetry() -> None:
    code = "import sys, router.cli.serve; print(*[name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("program", GROUPS)
def test_each_line_of_the_help_is_what_its_command_says_of_itself(program: str) -> None:
    group = GROUPS[program]
    context = click.Context(group)
    commands = [group.get_command(context, name) for name in group.list_commands(context)]
    lazy = [command for command in commands if isinstance(command, LazyCommand)]
    own = {command.name for command in commands if command} - {command.name for command in lazy}
    assert own <= {"key"}, "what is small stands in the group's own module"
    assert len(lazy) >= 3
    for command in lazy:
        assert command.get_short_help_str(1000) == command.imported().get_short_help_str(1000)
        assert command.name == command.imported().name
