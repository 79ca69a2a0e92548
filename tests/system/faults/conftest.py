"""The faults' own option, and where their recovery times are collected."""

from pathlib import Path

import pytest

from tests.system.faults.recoveries import Recoveries

_RECOVERIES = pytest.StashKey[Recoveries]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-report", type=Path, metavar="FILE", help="write a table of recovery times")


@pytest.fixture(scope="session")
def recoveries(request: pytest.FixtureRequest) -> Recoveries:
    """Recovery times: told at the end, and written where `--faults-report` says; those of one pytest process."""
    return request.config.stash.setdefault(_RECOVERIES, Recoveries())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    collected = config.stash.get(_RECOVERIES, Recoveries())
    for line in collected.lines():
        terminalreporter.write_line(line)
    file: Path | None = config.getoption("--faults-report", default=None)
    if file is not None:
        collected.write(file)
