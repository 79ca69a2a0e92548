"""Options of `router` itself, before a command that does not take them."""

import pytest
from click.testing import CliRunner

from router.__main__ import main


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--port", "9000", "--print-config"], "--print-config, --port"),
        (["--set", "data.port=1"], "--set"),
        (["--explain", "--worker", "http://a:1"], "--explain, --worker"),
    ],
)
@pytest.mark.parametrize("command", [["dashboards"], ["pools"], ["bench", "index"]])
def test_options_before_a_command_are_refused_by_name(options: list[str], named: str, command: list[str]) -> None:
    ended = CliRunner().invoke(main, [*options, *command])
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert f"{named}: found before {command[0]}, allowed without a command" in ended.stderr


def test_a_command_with_no_option_before_it_runs() -> None:
    assert CliRunner().invoke(main, ["key", "team-a"]).exit_code == 0
